"""CIFAR-10's reader, on small stand-ins for the published files."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unflip.data import DataError, ImageSet, cifar, load
from unflip.data.cifar import BINARY, PYTHON, BatchFile, Layout, load_cifar10

IMAGES = 4  # in each batch
Pickler = Callable[[np.ndarray, list[int]], bytes]


def pickle_as_python_2(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes of the published files, whose strings are Python 2's `str`."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    shape = b"M" + struct.pack("<H", len(pixels)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    raw = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    array = empty + b"\x87R(K\x01" + shape + dtype + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def pickle_as_python_3(pixels: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2)


def fake(layout: Layout, contents: dict[str, bytes]) -> Layout:
    """The layout with the lengths and MD5s of `contents`, its files in the order of the layout."""
    files = [
        BatchFile(batch.name, len(data), hashlib.md5(data).hexdigest())
        for batch in layout.batches
        for data in [contents[batch.name]]
    ]
    return replace(layout, train=tuple(files[:-1]), test=files[-1])


def batches() -> list[tuple[np.ndarray, list[int]]]:
    random = np.random.default_rng(0)
    return [
        (
            random.integers(0, 256, (IMAGES, 3072), dtype=np.uint8),
            random.integers(0, 10, IMAGES).tolist(),
        )
        for _ in range(6)
    ]


def binary_contents() -> dict[str, bytes]:
    packed = [
        b"".join(
            bytes([label]) + image.tobytes() for image, label in zip(pixels, labels, strict=True)
        )
        for pixels, labels in batches()
    ]
    return dict(zip([batch.name for batch in BINARY.batches], packed, strict=True))


def python_contents(pickler: Pickler) -> dict[str, bytes]:
    packed = [pickler(pixels, labels) for pixels, labels in batches()]
    return dict(zip([batch.name for batch in PYTHON.batches], packed, strict=True))


def unpacked(root: Path, layout: Layout, contents: dict[str, bytes]) -> Path:
    folder = root / layout.folder
    folder.mkdir(parents=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def packed(root: Path, layout: Layout, contents: dict[str, bytes]) -> Path:
    """As published, the archive also holds files that are not batches, in no useful order."""
    root.mkdir(parents=True, exist_ok=True)
    extra = {"readme.html": b"hello", "../escape.bin": b"out"}
    with tarfile.open(root / layout.archive, "w:gz") as tar:
        for name, data in reversed([*contents.items(), *extra.items()]):
            member = tarfile.TarInfo(f"{layout.folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return root / layout.archive


def use(monkeypatch: pytest.MonkeyPatch, *layouts: Layout) -> None:
    monkeypatch.setattr(cifar, "LAYOUTS", layouts)


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The small binary version, with the tables changed to expect it and a small Python one."""
    contents = binary_contents()
    use(
        monkeypatch,
        fake(BINARY, contents),
        fake(PYTHON, python_contents(pickle_as_python_2)),
    )
    return contents


def assert_is_the_set(found: ImageSet) -> None:
    made = batches()
    pixels = np.concatenate([pixels for pixels, _ in made]).reshape(-1, 3, 32, 32)
    labels = [label for _, labels in made for label in labels]
    assert np.array_equal(found.train_images, pixels[: 5 * IMAGES])
    assert np.array_equal(found.test_images, pixels[5 * IMAGES :])
    assert found.train_labels.tolist() == labels[: 5 * IMAGES]
    assert found.test_labels.tolist() == labels[5 * IMAGES :]
    assert found.train_labels.dtype == np.int64


def test_binary_unpacked(tmp_path: Path, contents: dict[str, bytes]) -> None:
    folder = unpacked(tmp_path, BINARY, contents)
    assert_is_the_set(load_cifar10(tmp_path))
    assert_is_the_set(load_cifar10(folder))
    assert_is_the_set(load("cifar10", tmp_path))


def test_binary_packed_is_read_without_writing(tmp_path: Path, contents: dict[str, bytes]) -> None:
    archive = packed(tmp_path, BINARY, contents)
    assert_is_the_set(load_cifar10(tmp_path))
    assert_is_the_set(load_cifar10(archive))
    assert list(tmp_path.rglob("*")) == [archive]


@pytest.mark.parametrize("pickler", [pickle_as_python_2, pickle_as_python_3])
def test_the_python_version_holds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickler: Pickler
) -> None:
    contents = python_contents(pickler)
    use(monkeypatch, BINARY, fake(PYTHON, contents))
    folder = unpacked(tmp_path / "unpacked", PYTHON, contents)
    archive = packed(tmp_path / "packed", PYTHON, contents)
    for place in (folder, folder.parent, archive, archive.parent):
        assert_is_the_set(load_cifar10(place))


def test_the_binary_version_goes_before_the_python_one(
    tmp_path: Path, contents: dict[str, bytes]
) -> None:
    unpacked(tmp_path, PYTHON, {"data_batch_1": b"not a batch"})
    packed(tmp_path, BINARY, contents)
    assert_is_the_set(load_cifar10(tmp_path))


def test_the_description_of_the_set(tmp_path: Path, contents: dict[str, bytes]) -> None:
    unpacked(tmp_path, BINARY, contents)
    found = load_cifar10(tmp_path)
    assert found.classes[0] == "airplane"
    assert found.classes[9] == "truck"
    assert (found.mean, found.std) == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    assert (found.crop_padding, found.flip) == (4, True)


def test_the_environment_names_the_default_folder(
    tmp_path: Path, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked(tmp_path, BINARY, contents)
    monkeypatch.setenv("UNFLIP_DATA", str(tmp_path))
    assert_is_the_set(load_cifar10())


def test_without_the_environment_the_cache_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNFLIP_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=str(tmp_path / ".cache/unflip/data/cifar-10-binary")):
        load_cifar10()


def test_nothing_found_says_what_to_download_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_cifar10(tmp_path / "absent")
    message = str(caught.value)
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in message
    assert "c32a1d4ab5d03f1284b67883e8d87530" in message
    assert f"into {tmp_path / 'absent'} without unpacking it" in message
    assert "with --data (folder= in Python) or the environment variable UNFLIP_DATA" in message
    for name in (BINARY.archive, BINARY.folder, PYTHON.archive, PYTHON.folder):
        assert str(tmp_path / "absent" / name) in message


def test_an_absent_archive_is_to_be_put_beside_its_own_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"into {tmp_path} without unpacking it"):
        load_cifar10(tmp_path / BINARY.archive)


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"images\.zip is a file of another name.*Give cifar-10-binary\.tar\.gz"
    ):
        load_cifar10(tmp_path / "images.zip")


def test_a_missing_batch_is_named(tmp_path: Path, contents: dict[str, bytes]) -> None:
    folder = unpacked(tmp_path, BINARY, contents)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing"):
        load_cifar10(tmp_path)


def test_a_missing_member_is_named(tmp_path: Path, contents: dict[str, bytes]) -> None:
    del contents["test_batch.bin"]
    packed(tmp_path, BINARY, contents)
    with pytest.raises(DataError, match=r"lacks cifar-10-batches-bin/test_batch\.bin"):
        load_cifar10(tmp_path)


def test_a_link_in_the_archive_is_not_followed(tmp_path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(tmp_path / BINARY.archive, "w:gz") as tar:
        member = tarfile.TarInfo(f"{BINARY.folder}/data_batch_1.bin")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"lacks .*data_batch_1\.bin"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("pack", [unpacked, packed])
def test_a_wrong_length_names_file_and_lengths(
    tmp_path: Path,
    contents: dict[str, bytes],
    pack: Callable[[Path, Layout, dict[str, bytes]], Path],
) -> None:
    contents["data_batch_2.bin"] = contents["data_batch_2.bin"][:-5]
    pack(tmp_path, BINARY, contents)
    with pytest.raises(DataError, match=r"data_batch_2\.bin.*12,292 bytes and has 12,287"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("pack", [unpacked, packed])
def test_one_flipped_bit_names_file_and_md5s(
    tmp_path: Path,
    contents: dict[str, bytes],
    pack: Callable[[Path, Layout, dict[str, bytes]], Path],
) -> None:
    whole = contents["data_batch_4.bin"]
    flipped = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    contents["data_batch_4.bin"] = flipped
    pack(tmp_path, BINARY, contents)
    expected, found = (hashlib.md5(data).hexdigest() for data in (whole, flipped))
    with pytest.raises(DataError, match=rf"data_batch_4\.bin.*should be {expected} and is {found}"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 0.01, 0.5, 0.9])
def test_a_truncated_archive_is_named_with_its_size(
    tmp_path: Path, contents: dict[str, bytes], kept: float
) -> None:
    archive = packed(tmp_path, BINARY, contents)
    whole = archive.read_bytes()
    cut = whole[: kept if isinstance(kept, int) else int(len(whole) * kept)]
    archive.write_bytes(cut)
    with pytest.raises(DataError) as caught:
        load_cifar10(tmp_path)
    message = str(caught.value)
    assert f"{archive} ({len(cut):,} bytes) is truncated" in message
    assert BINARY.archive_md5 in message


def test_a_damaged_archive_is_named(tmp_path: Path, contents: dict[str, bytes]) -> None:
    archive = packed(tmp_path, BINARY, contents)
    whole = bytearray(archive.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 200] = bytes(200)
    archive.write_bytes(whole)
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz"):
        load_cifar10(tmp_path)


class Attack:
    """Unpickled by the ordinary unpickler, this makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"mkdir '{self.mark}'",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_a_command_is_refused_unrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    mark = tmp_path / "was-run"
    contents = python_contents(pickle_as_python_3)
    contents["data_batch_1"] = pickle.dumps(Attack(mark), protocol=protocol)
    use(monkeypatch, BINARY, fake(PYTHON, contents))
    unpacked(tmp_path, PYTHON, contents)
    with pytest.raises(DataError, match=r"data_batch_1.*(posix|nt)\.system, which is refused"):
        load_cifar10(tmp_path)
    assert not mark.exists()
    pickle.loads(contents["data_batch_1"])
    assert mark.exists(), "the attack itself must work, or the test shows nothing"


def test_a_changed_pickle_is_caught_by_its_md5_before_unpickling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = python_contents(pickle_as_python_3)
    use(monkeypatch, BINARY, fake(PYTHON, contents))
    whole = contents["data_batch_1"]
    contents["data_batch_1"] = pickle.dumps(Attack(tmp_path / "x")).ljust(len(whole), b".")
    unpacked(tmp_path, PYTHON, contents)
    with pytest.raises(DataError, match="its MD5 should be"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cbuiltins\neval\n.", r"builtins\.eval"),
        (b"c__builtin__\ngetattr\n.", r"__builtin__\.getattr"),
        (b"cnumpy\nfromfile\n.", r"numpy\.fromfile"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tofile_\x93.", r"numpy\.ndarray\.tofile_"),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00bz2tR.", "codec 'bz2'"),
        (b"", "not a readable pickle"),
        (b"\x80\x02}(U\x04dataU", "not a readable pickle"),
        (pickle.dumps([1, 2]), "should be a pickled dict"),
        (pickle.dumps({b"data": 1, b"labels": [1]}), "should be a pickled dict"),
        (pickle_as_python_3(np.zeros((2, 3072), np.uint8), [1]), "should be a pickled dict"),
        (pickle_as_python_3(np.zeros((1, 3000), np.uint8), [1]), "should be a pickled dict"),
        (pickle_as_python_3(np.zeros((1, 3072), np.float32), [1]), "should be a pickled dict"),
    ],
)
def test_what_is_not_a_batch_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"here .*{message}"):
        PYTHON.decode(data, "here")


def test_a_binary_batch_must_be_whole_records() -> None:
    with pytest.raises(DataError, match="3,073 bytes and has 3,074"):
        BINARY.decode(bytes(3074), "here")

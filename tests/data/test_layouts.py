"""Class folders, tars and Parquet files give the same images, in the same order."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unflip.data.describe import rows
from unflip.data.errors import DataError
from unflip.data.parquet import Rows
from unflip.data.store import open_any, open_store

LAYOUTS = ("folders", "tars", "parquet")
SHORT_NAMES = ("tench", "English springer", "church")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_images_in_the_same_order(write, samples, layout):
    store = open_any(write(layout))
    assert store.keys == ("n01440764", "n02102040", "n03028079")
    assert store.classes == SHORT_NAMES
    for part, images in (("train", store.train), ("val", store.test)):
        expected = [sample for sample in samples if sample.part == part]
        assert images.labels.dtype == np.int64
        assert images.labels.tolist() == [sample.label for sample in expected]
        assert [images.read(i) for i in range(len(images))] == [s.data for s in expected]
        assert all(s.stem in images.name(i) for i, s in enumerate(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_can_be_sent_to_another_process(write, layout):
    part = open_any(write(layout)).train
    part.read(3)
    again = pickle.loads(pickle.dumps(part))
    assert again.read(3) == part.read(3)
    assert again.name(3) == part.name(3)


def test_reading_chunks_hold_every_image_once(write):
    for layout in LAYOUTS:
        part = open_any(write(layout)).train
        numbers = np.concatenate(part.reading_chunks())
        assert sorted(numbers.tolist()) == list(range(len(part)))


def test_folders_and_tars_in_place_have_one_fingerprint_that_notices_changes(write, samples):
    folders, tars = open_store(write("folders")), open_store(write("tars"))
    assert folders.fingerprint == tars.fingerprint
    path = Path(folders.train.name(0))
    path.write_bytes(path.read_bytes() + b"x")
    assert open_store(folders.path).fingerprint != folders.fingerprint


def test_parquet_is_refused_for_training_with_the_command_that_packs_it(write):
    with pytest.raises(DataError, match=r"unflip data pack .*parquet NAME.pack"):
        open_store(write("parquet"))


def test_a_test_folder_without_classes_is_not_used(write):
    root = write("folders")
    (root / "test").mkdir()
    (root / "test" / "ILSVRC2012_test_00000001.JPEG").write_bytes(b"")
    assert len(open_store(root).test) == 6


def test_kaggles_imagenet_is_found_with_the_labels_of_its_table(tmp_path, write, samples):
    source = write("folders")
    inner = tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC"
    inner.mkdir(parents=True)
    (source / "train").rename(inner / "train")
    (inner / "val").mkdir()
    lines = ["ImageId,PredictionString\n"]
    for sample in samples:
        if sample.part == "val":
            (inner / "val" / sample.name).write_bytes(sample.data)
            lines.append(
                f"{sample.stem},n0{['1440764', '2102040', '3028079'][sample.label]} 1 2 3 4 \n"
            )
    root = tmp_path / "kaggle"
    with pytest.raises(DataError, match=r"val has no class folders.*LOC_val_solution.csv into"):
        open_store(root)
    (root / "LOC_val_solution.csv").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"LOC_val_solution.csv is not a table: 'utf-8' codec"):
        open_store(root)
    (root / "LOC_val_solution.csv").write_text("".join(lines))
    store = open_store(root)
    assert store.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert store.classes == store.keys  # no file with readable names
    assert store.test.read(5) == samples[-1].data


def test_two_classes_with_one_name_stay_apart(write):
    root = write("folders")
    (root / "LOC_synset_mapping.txt").write_text(
        "n01440764 crane\nn02102040 crane\nn03028079 maillot, tank suit\n"
    )
    assert open_store(root).classes == ("crane (n01440764)", "crane (n02102040)", "maillot")


def test_classes_are_shown_without_letters_that_turn_text(write):
    root = write("folders")
    lines = (root / "LOC_synset_mapping.txt").read_text()
    (root / "LOC_synset_mapping.txt").write_text(lines.replace("tench,", "ten\u202ech,"))
    shown = [text for _, text in rows(open_store(root))]
    assert any(r"ten\u202ech" in text for text in shown)
    assert all(text.isprintable() for text in shown)


def test_classes_that_a_pack_cannot_hold_are_refused(write, samples):
    root = write("folders")
    lines = (root / "LOC_synset_mapping.txt").read_text()
    (root / "LOC_synset_mapping.txt").write_text(lines.replace("tench,", "ten\x1b[2Jch\tx,"))
    with pytest.raises(
        DataError, match=r"a class called ten\\x1b\[2Jch x, with control characters"
    ):
        open_store(root)
    renamed = [type(s)(s.part, s.label, f"{n}.jpg", s.data) for n, s in enumerate(samples)]
    root = write("tars", renamed)
    (root / "classes.txt").write_text("a cat\nb dog\na cow\n")
    with pytest.raises(DataError, match=r"two classes with the key a\. Rename one"):
        open_store(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "val").rename(root / "other"), "no folder with test images"),
        (lambda root: (root / "val" / "eel").mkdir(), "eel is a class without training images"),
        (lambda root: (root / "train" / "eel").mkdir(), "eel holds no image"),
    ],
)
def test_a_wrong_tree_is_refused(write, change, message):
    root = write("folders")
    change(root)
    with pytest.raises(DataError, match=message):
        open_store(root)


def test_an_unknown_path_names_what_is_there_and_what_is_expected(tmp_path):
    with pytest.raises(DataError, match=r"does not exist.*class folders"):
        open_store(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match="is a file, but not a pack"):
        open_store(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"holds notes.txt. It should hold class folders.*tars"):
        open_store(tmp_path)


def add(tar: tarfile.TarFile, name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, len(data)
    tar.addfile(member, io.BytesIO(data))


def test_odd_members_of_tars(write, samples):
    """Folders, links, macOS' files and suffixes in capitals do not matter."""
    root = write("tars")
    with tarfile.open(root / "imagenet1k-train-0001.tar", "a") as tar:
        add(tar, "more/", b"", tarfile.DIRTYPE)
        add(tar, "more/._n01440764_900.jpg", b"left by macOS")
        add(tar, "more/n01440764_900.JPG", samples[0].data)
        add(tar, "more/n01440764_900.CLS", b"0\n")
        add(tar, f"more/{'n01440764_901' + 'x' * 120}.jpg", samples[1].data)  # a long header
        add(tar, f"more/{'n01440764_901' + 'x' * 120}.cls", b"0")
        add(tar, "more/link.jpg", b"", tarfile.SYMTYPE)
    train = open_store(root).train
    assert len(train) == 26
    assert [train.read(9), train.read(10)] == [samples[0].data, samples[1].data]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"n01440764_900.jpg": b"x"}, r"train-0001\.tar/n01440764_900\.jpg has no label.*900\.cls"),
        ({"a.jpg": b"x", "a.cls": b"cat"}, r"a\.cls holds b'cat'.*number of the class"),
        ({"a.jpg": b"x", "a.cls": b"-1"}, r"a\.cls holds b'-1'"),
        ({"a.jpg": b"x", "a.cls": b"9" * 40}, r"a\.cls holds"),
        ({"a.jpg": b"x", "a.cls": b"7"}, "labels up to 7, but no training image with label 3"),
        ({"a.jpg": b"x", "a.png": b"x", "a.cls": b"1"}, r"two images with the key a: a\.jpg"),
        ({"a.jpg": b"x", "a.cls": b"1", "a.CLS": b"0"}, r"two labels with the key a\. Remove one"),
        ({"a.tif": b"x", "a.cls": b"1"}, r"a\.cls is the label of no image.*\.webp\. Add the"),
    ],
)
def test_wrong_tars_are_refused_by_name(write, members, message):
    root = write("tars")
    with tarfile.open(root / "imagenet1k-train-0001.tar", "a") as tar:
        for name, data in members.items():
            add(tar, name, data)
    with pytest.raises(DataError, match=message):
        open_store(root)


def test_a_hard_link_in_a_tar_is_refused_by_name(write):
    root = write("tars")
    with tarfile.open(root / "imagenet1k-train-0001.tar", "a") as tar:
        add(tar, "n01440764_900.cls", b"0")
        member = tarfile.TarInfo("n01440764_900.jpg")
        member.type, member.linkname = tarfile.LNKTYPE, "n01440764_001.jpg"
        tar.addfile(member)
    with pytest.raises(
        DataError, match=r"900\.jpg is a hard link to n01440764_001\.jpg.*--hard-deref"
    ):
        open_store(root)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        (tarfile.GNUTYPE_SPARSE, 0, r"900\.jpg is sparse, .*without the option --sparse"),
        (tarfile.REGTYPE, -512, "a member of negative size"),  # read again and again by tarfile
    ],
)
def test_tars_that_cannot_be_read_in_place(write, kind, size, message):
    root = write("tars")
    with tarfile.open(root / "imagenet1k-train-0001.tar", "a") as tar:
        add(tar, "n01440764_900.cls", b"0")
        member = tarfile.TarInfo("n01440764_900.jpg")
        member.type, member.size = kind, size
        tar.addfile(member)
    with pytest.raises(DataError, match=message):
        open_store(root)


def test_a_tar_that_is_cut_off_is_named(write):
    path = write("tars") / "imagenet1k-train-0001.tar"
    whole = path.read_bytes()
    for length in (0, 700, 2048, 5000, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"train-0001\.tar"):
            open_store(path.parent)


def test_test_tars_without_labels_are_not_used(write, samples):
    root = write("tars")
    with tarfile.open(root / "imagenet1k-test-00.tar", "w") as tar:
        add(tar, "ILSVRC2012_test_00000001.jpg", samples[0].data)
    assert len(open_store(root).test) == 6


def test_a_tars_own_name_tells_its_part_before_its_folder(write):
    root = write("tars")
    for tar in list(root.glob("*.tar")):
        (root / "training_sets").mkdir(exist_ok=True)
        tar.rename(root / "training_sets" / tar.name)
    store = open_store(root)
    assert (len(store.train), len(store.test)) == (24, 6)


@pytest.mark.parametrize(
    "name", ["my-train-val-0.tar", "test-project-train-0.tar", "train-val/0.tar"]
)
def test_a_tar_in_both_parts_is_refused_by_name(write, name):
    root = write("tars")
    (root / name).parent.mkdir(exist_ok=True)
    (root / "imagenet1k-train-0001.tar").rename(root / name)
    with pytest.raises(DataError, match=rf"{name} has both '.*' and .*Rename it"):
        open_store(root)


def test_tars_without_wnids_or_names_number_their_classes(write, samples):
    renamed = [
        type(s)(s.part, s.label, f"{number:05d}.jpg", s.data) for number, s in enumerate(samples)
    ]
    root = write("tars", renamed)
    assert open_store(root).keys == ("n01440764", "n02102040", "n03028079")  # by classes.txt
    (root / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match="has 1 classes, but there are labels up to 2"):
        open_store(root)
    (root / "classes.txt").unlink()
    assert open_store(root).keys == ("0", "1", "2")


def test_parquet_of_another_kind_is_refused_by_name(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train-00000.parquet"
    (tmp_path / "validation-00000.parquet").write_bytes(b"PAR1 and no more")
    parquet.write_table(pa.table({"text": ["a"], "label": [0]}), path)
    with pytest.raises(DataError, match=r"validation-00000\.parquet cannot be read as Parquet"):
        open_any(tmp_path)
    parquet.write_table(
        pa.table({"text": ["a"], "label": [0]}), tmp_path / "validation-00000.parquet"
    )
    with pytest.raises(DataError, match=r"has the columns text, label. It should have"):
        open_any(tmp_path)


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize(
    "kinds", ["binary string", "large_binary large_string", "binary_view string_view"]
)
def test_parquet_files_of_other_writers(tmp_path, kinds, encoding):
    """Writers of Parquet's second version encode text as differences."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data, text = (getattr(pa, kind)() for kind in kinds.split())
    images = [{"bytes": bytes([i] * 9), "path": f"{i}.jpg"} for i in range(7)]
    kind = pa.struct([("bytes", data), ("path", text)])
    schema = pa.schema([("image", kind), ("label", pa.int64())])
    options = {"use_dictionary": False, "column_encoding": {"image.path": encoding}}
    with parquet.ParquetWriter(tmp_path / "train.parquet", schema, **options) as file:
        for part in (images[:4], images[4:]):
            file.write_table(pa.table([pa.array(part, kind), [0] * len(part)], schema=schema))
    rows = Rows([tmp_path / "train.parquet"])
    assert rows.names == [image["path"] for image in images]
    read = rows.read_block(0)[1] + rows.read_block(4)[1]
    assert read == [image["bytes"] for image in images]


def test_a_parquet_file_with_a_name_that_is_not_text_is_named(tmp_path):
    path = repeated(tmp_path, {"bytes": b"x", "path": "aaaaaaaa.jpg"}, 1)
    path.write_bytes(path.read_bytes().replace(b"aaaaaaaa", b"\xff" * 8))
    with pytest.raises(DataError, match=r"train-00000\.parquet cannot be read .*'utf-8' codec"):
        Rows([path])


DELTA = {"use_dictionary": False, "column_encoding": {"image.path": "DELTA_BYTE_ARRAY"}}


def repeated(folder: Path, image: dict[str, Any], rows: int, **options: Any) -> Path:
    """A small Parquet file: its dictionary, or its first name, is repeated by every row."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array([image] * rows, kind), "label": [0] * rows})
    parquet.write_table(table, folder / "train-00000.parquet", **options)
    return folder / "train-00000.parquet"


@contextmanager
def arrow_memory(most: int) -> Iterator[None]:
    """Fail if Arrow allocates more bytes than ``most`` at a time."""
    pa = pytest.importorskip("pyarrow")
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        yield
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() <= most


def test_a_parquet_dictionary_cannot_repeat_an_image_past_the_limit(tmp_path, monkeypatch):
    """The limit must hold for the images in memory, not only for the bytes of the file's pages."""
    path = repeated(tmp_path, {"bytes": b"x" * 10_000, "path": "a.jpg"}, 500)
    monkeypatch.setattr("unflip.data.parquet.MOST_BYTES", 100_000)
    with arrow_memory(500_000):
        rows = Rows([path])
        with pytest.raises(DataError, match="row group 0 has images of more than 100,000 bytes"):
            rows.read_block(0)


@pytest.mark.parametrize("options", [{}, DELTA])
def test_a_parquet_file_cannot_repeat_a_long_name(tmp_path, options):
    path = repeated(tmp_path, {"bytes": b"x", "path": "a" * 10_000}, 500, **options)
    with (
        arrow_memory(500_000),
        pytest.raises(DataError, match="has an image name of 10,000 bytes; at most 4,096"),
    ):
        Rows([path])


def test_a_parquet_file_cannot_list_more_images_than_it_has_bytes(tmp_path):
    path = repeated(tmp_path, {"bytes": b"x", "path": "a.jpg"}, 20_000)
    with pytest.raises(DataError, match=r"lists more than .* images, but has only that many bytes"):
        Rows([path])

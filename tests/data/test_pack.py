"""Packs: what is written can be read, and a file that is damaged or hostile is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unflip.data import pack_format
from unflip.data.errors import DamagedImage, DataError
from unflip.data.listing import Names
from unflip.data.pack import Pack
from unflip.data.pack_format import HASH, PREAMBLE, RECORD, index_path
from unflip.data.packing import Encoding, pack_images
from unflip.data.partial_pack import Encoded, PartialPack
from unflip.data.store import open_any, open_store
from unflip.pictures import decode_rgb

AS_THEY_ARE = Encoding()


@pytest.fixture
def pack(write, tmp_path: Path) -> Path:
    out = tmp_path / "set.pack"
    pack_images(open_any(write("folders")), out, AS_THEY_ARE)
    return out


def test_three_layouts_give_the_same_images(write, samples, tmp_path):
    fingerprints = []
    for layout in ("folders", "tars", "parquet"):
        out = tmp_path / "packs" / f"{layout}.pack"
        packed = pack_images(open_any(write(layout)), out, AS_THEY_ARE)
        for part, images in (("train", packed.train), ("val", packed.test)):
            expected = [sample for sample in samples if sample.part == part]
            assert images.labels.tolist() == [sample.label for sample in expected]
            assert [images.read(i) for i in range(len(images))] == [s.data for s in expected]
            for index, (width, height) in enumerate(images.sizes().tolist()):
                assert decode_rgb(expected[index].data, "").size == (width, height)
        assert packed.classes == ("tench", "English springer", "church")
        assert packed.keys[0] == "n01440764"
        fingerprints.append(packed.fingerprint)
    assert fingerprints[0] == fingerprints[1] == fingerprints[2]


def test_names_are_relative_to_the_source(pack):
    assert open_store(pack).test.name(0) == "val/n01440764/ILSVRC2012_val_00000000.JPEG"


def test_resized_images_have_the_short_side_and_are_rgb_jpegs(write, samples, tmp_path):
    packed = pack_images(open_any(write("folders")), tmp_path / "small.pack", Encoding(size=24))
    for index, sample in enumerate(samples[: len(packed.train)]):
        before, data = decode_rgb(sample.data, ""), packed.train.read(index)
        after = decode_rgb(data, "")
        assert data.startswith(b"\xff\xd8")
        assert after.size == tuple(packed.train.sizes()[index])
        if min(before.size) <= 24:
            assert after.size == before.size
        else:
            assert min(after.size) == 24
            assert max(after.size) == round(max(before.size) * 24 / min(before.size))
    assert (packed.header.size, packed.header.quality) == (24, 90)
    assert "Pillow" in (packed.header.encoder or "")


def test_a_pack_can_be_packed_again(pack, tmp_path, write):
    small = pack_images(open_any(pack), tmp_path / "b.pack", Encoding(size=24))
    direct = pack_images(open_any(write("folders")), tmp_path / "c.pack", Encoding(size=24))
    assert small.fingerprint == direct.fingerprint


def test_a_pickled_part_is_small_and_opens_the_pack_again(pack):
    part = open_store(pack).test
    sent = pickle.dumps(part)
    assert len(sent) < 1000
    assert pickle.loads(sent).read(2) == part.read(2)


def test_a_flipped_byte_names_image_and_pack(pack):
    """Each byte of the data belongs to one image, and only that one is refused."""
    whole = pack.read_bytes()
    records = Pack(pack).records
    for position in random.Random(0).sample(range(8, len(whole) - HASH), 12):
        changed = bytearray(whole)
        changed[position] ^= 16
        pack.write_bytes(changed)
        opened = Pack(pack)
        hit = int(
            np.argmin(np.where(records["offset"] <= position, position - records["offset"], 2**60))
        )
        with pytest.raises(DamagedImage, match=r"is damaged.*CRC") as raised:
            opened.read(hit)
        assert f"{opened.names[hit]} in {pack}" in str(raised.value)
        for other in range(len(records)):
            if other != hit:
                opened.read(other)


def test_files_that_do_not_belong_together_are_refused(pack, write, tmp_path):
    other = tmp_path / "other.pack"
    pack_images(open_any(write("tars")), other, AS_THEY_ARE)
    assert len(other.read_bytes()) == len(pack.read_bytes())  # the same images in another order
    index_path(pack).write_bytes(index_path(other).read_bytes())
    with pytest.raises(DataError, match=r"set\.pack does not belong to .*set\.pack\.index"):
        Pack(pack)
    index_path(pack).write_bytes(pack.read_bytes())
    with pytest.raises(DataError, match=r"begins with .*not b'UNFLIPIX'"):
        Pack(pack)
    index_path(other).replace(other)
    index_path(other).write_bytes(other.read_bytes())
    with pytest.raises(DataError, match=r"other\.pack is not a pack: it begins with"):
        Pack(other)


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_pack_that_is_cut_off_or_too_long_is_refused(pack, cut):
    whole = pack.read_bytes()
    pack.write_bytes(whole[: cut and -cut] if cut else whole + b"x")
    with pytest.raises(DataError, match="does not belong to"):
        Pack(pack)


def test_missing_and_mistaken_files_are_named(pack):
    with pytest.raises(DataError, match=r"is the index of a pack. Give the pack itself"):
        open_store(index_path(pack))
    with pytest.raises(DataError, match=r"does not exist. Make it with: unflip data pack"):
        open_store(pack.with_name("absent.pack"))
    index_path(pack).unlink()
    with pytest.raises(DataError, match=r"index does not exist.*Copy both files"):
        open_store(pack)


def signed(content: bytes) -> bytes:
    """An index with a right checksum: what an attacker would write."""
    return content + hashlib.blake2b(content, digest_size=HASH).digest()


def with_header(content: bytes, change: Callable[[dict], object]) -> bytes:
    length = int.from_bytes(content[12:16], "little")
    header = json.loads(content[PREAMBLE : PREAMBLE + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(PREAMBLE + len(text)) % 8)
    return content[:12] + len(text).to_bytes(4, "little") + text + content[PREAMBLE + length :]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(images=10**15),
        lambda h: h.update(images=2**63),
        lambda h: h.update(images=-1),
        lambda h: h.update(images=True),
        lambda h: h.update(train=0),
        lambda h: h.update(train=h["images"]),
        lambda h: h.update(names=h["names"] - 1),
        lambda h: h.update(names=2**61),
        lambda h: h.update(classes=["one"], keys=["one"]),
        lambda h: h.update(classes=["a", "b"], keys=["a", "b"]),
        lambda h: h.update(classes=["a"] * 4),
        lambda h: h.update(classes=[1, 2, 3]),
        lambda h: h.update(classes="abc"),
        lambda h: h.update(pack_length=h["pack_length"] - 1),
        lambda h: h.update(pack_length=0),
        lambda h: h.update(pack_hash=5),
        lambda h: h.update(size="x"),
        lambda h: h.update(more=1),
        lambda h: h.update(classes=["a", "\ud800", "c"]),
        lambda h: h.update(classes=["a", "\x1b[2J", "c"]),
        lambda h: h.update(keys=["a", "b\n", "c"]),
        lambda h: h.update(keys=["a", "b", "a"]),
        lambda h: h.update(skipped_names=["\x9b2J"]),
        lambda h: h.update(encoder="\x07"),
        lambda h: h.pop("job"),
    ],
)
def test_a_wrong_header_is_refused(pack, change):
    path = index_path(pack)
    path.write_bytes(signed(with_header(path.read_bytes()[:-HASH], change)))
    with pytest.raises(DataError, match=r"set\.pack"):
        Pack(pack)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset", 2**64 - 1),
        ("offset", 0),
        ("offset", 10**9),
        ("length", 0),
        ("length", 2**32 - 1),
        ("label", 3),
        ("label", 2**32 - 1),
        ("name_end", 2**64 - 1),
        ("name_end", 10**6),
        ("width", 0),
        ("height", 0),
    ],
)
@pytest.mark.parametrize("number", [0, 5, -1])
def test_a_wrong_record_is_refused(pack, column, value, number):
    path = index_path(pack)
    content = bytearray(path.read_bytes()[:-HASH])
    begin = PREAMBLE + int.from_bytes(content[12:16], "little")
    records = np.frombuffer(content, RECORD, len(Pack(pack).records), begin)
    records[column][number] = value
    path.write_bytes(signed(bytes(content)))
    with pytest.raises(DataError, match=r"set\.pack\.index is not an index"):
        Pack(pack)


@given(seed=st.integers(0, 2**32), sign=st.booleans())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_index_raises_anything_else_or_takes_much_memory(pack, seed, sign):
    generator = random.Random(seed)
    path = index_path(pack)
    whole = path.with_suffix(".kept")
    if not whole.exists():
        whole.write_bytes(path.read_bytes())
    content = bytearray(whole.read_bytes()[:-HASH])
    for _ in range(generator.randint(1, 5)):
        kind, place = generator.randrange(4), generator.randrange(len(content))
        if kind == 0:
            content[place] = generator.randrange(256)
        elif kind == 1:
            del content[place : place + generator.randint(1, 50)]
        elif kind == 2:
            content[place:place] = generator.randbytes(generator.randint(1, 50))
        else:
            content[place : place + 8] = b"\xff" * 8
    path.write_bytes(signed(bytes(content)) if sign else bytes(content))
    tracemalloc.start()
    problem = "set.pack is as it was"
    try:
        opened = Pack(pack)
        for number in range(len(opened.records)):
            opened.names[number]
            opened.read(number)
    except DataError as error:
        problem = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "set.pack" in problem
    assert peak < 5e6


def test_names_of_images_cannot_command_a_terminal(write, samples, tmp_path):
    root = write("folders")
    names = (os.fsdecode(b"n01440764_90\xff.jpg"), "n01440764_91\x1b[2J.jpg")
    for name, data in zip(names, (samples[0].data, b"damaged"), strict=True):
        (root / "train/n01440764" / name).write_bytes(data)
    out = tmp_path / "odd.pack"
    packed = pack_images(open_any(root), out, AS_THEY_ARE, skip_damaged=True)
    assert packed.train.name(9) == r"train/n01440764/n01440764_90\udcff.jpg"
    assert packed.header.skipped_names == (r"train/n01440764/n01440764_91\x1b[2J.jpg",)


def test_deeply_nested_json_is_refused(pack):
    text = b"[" * 99_992 + b" " * 8
    content = b"UNFLIPIX" + (1).to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
    index_path(pack).write_bytes(signed(content))
    with pytest.raises(DataError, match="its header is wrong"):
        Pack(pack)


def test_another_version_is_refused_with_its_number(pack):
    content = bytearray(index_path(pack).read_bytes())
    content[8] = 9
    index_path(pack).write_bytes(content)
    with pytest.raises(DataError, match="has format version 9; this unflip reads version 1"):
        Pack(pack)


def test_many_images_need_little_time_and_memory(tmp_path, samples):
    """100,000 images: an index of 6 MB, of which the labels are in memory."""
    count, out = 100_000, tmp_path / "many.pack"
    image = Encoded(samples[0].data[:100], 20, 30)
    names = Names.of(
        f"train/n{number % 1000:08d}/image_{number:08d}.JPEG" for number in range(count)
    )
    with PartialPack(out, {"names": "x"}, np.zeros(count, np.uint64)) as partial:
        for _ in range(count // 1000):
            partial.append([image] * 1000)
        records = np.zeros(count, dtype=RECORD)
        for column in ("length", "width", "height", "crc"):
            records[column] = partial.all_entries()[column]
        records["offset"] = 8 + 100 * np.arange(count)
        records["label"] = np.arange(count) % 1000
        records["name_end"] = names.ends
        keys = tuple(f"n{number:08d}" for number in range(1000))
        header = pack_format.Header(
            images=count,
            train=count - 5000,
            names=len(names.block),
            classes=keys,
            keys=keys,
            pack_length=partial.length(),
            pack_hash=pack_format.content_hash(records).hex(),
            layout="class folders",
            size=None,
            quality=None,
            encoder=None,
            job="",
            skipped=0,
            skipped_names=(),
        )
        partial.finish(header, records, bytes(names.block))
    tracemalloc.start()
    began = time.perf_counter()
    opened = Pack(out)
    for index in range(0, count - 5000, 7):
        assert len(opened.train.read(index)) == 100
    assert opened.train.labels[1234] == 234
    assert opened.test.name(4999).endswith("image_00099999.JPEG")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6e6
    assert time.perf_counter() - began < 10
    assert dataclasses.asdict(opened.header)["images"] == count

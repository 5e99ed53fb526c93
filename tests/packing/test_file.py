"""The container: what is written is read, and what was damaged is refused."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from unflip.packing.file import (
    Packed,
    PackedFileError,
    from_bytes,
    read,
    sha256,
    to_bytes,
    write,
    write_whole,
)

GRAPH = {"input": {"shape": [1, 2, 2], "preprocess": None}, "ops": [], "output": 0, "labels": ["ü"]}
TENSORS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(5, dtype=np.uint8),
    "c": np.zeros((0, 2), np.float32),
}
FILE = to_bytes(Packed(GRAPH, TENSORS))


def test_round_trip(tmp_path):
    path = tmp_path / "x.unflip"
    assert write(path, Packed(GRAPH, TENSORS)) == path.stat().st_size == len(FILE)
    found = read(path)
    assert found.graph == GRAPH
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found.tensors[name], tensor)
    assert len(sha256(path)) == 64
    assert [p.name for p in tmp_path.iterdir()] == ["x.unflip"]


def test_the_order_of_tensors_does_not_matter():
    turned = dict(reversed(TENSORS.items()))
    assert to_bytes(Packed(GRAPH, turned)) == FILE


def test_it_is_a_safetensors_file():
    assert safetensors.numpy.load(FILE).keys() == TENSORS.keys()


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(FILE) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(at, bit):
    damaged = bytearray(FILE)
    damaged[at] ^= 1 << bit
    with pytest.raises(PackedFileError):
        from_bytes(bytes(damaged))


@settings(max_examples=100, deadline=None)
@given(size=st.integers(0, len(FILE) - 1))
def test_a_file_cut_short_is_found(size):
    with pytest.raises(PackedFileError):
        from_bytes(FILE[:size])


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "m.onnx", b"data")
    assert not list(tmp_path.iterdir())


def test_writing_to_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"m\.onnx cannot be written: there is no folder .*typo; create it"
    ):
        write_whole(tmp_path / "typo" / "m.onnx", b"data")


def test_other_files(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors.numpy.save(TENSORS))
    with pytest.raises(PackedFileError, match=r"weights\.safetensors: a safetensors file, but not"):
        read(path)
    path.write_bytes(safetensors.numpy.save(TENSORS, {"format": "pt"}))
    with pytest.raises(PackedFileError, match="not a packed network; make a packed network with"):
        read(path)
    later = FILE.replace(b'"version":"1"', b'"version":"2"')
    with pytest.raises(
        PackedFileError, match="its format version is '2', but this unflip reads version '1'"
    ):
        from_bytes(later)


def test_numbers_are_numbers():
    with pytest.raises(ValueError, match="Out of range float"):
        to_bytes(Packed({**GRAPH, "output": float("nan")}, {}))
    assert json.loads(json.dumps(GRAPH)) == GRAPH


@pytest.mark.parametrize("problem", ["full disk", "no folder", "file as folder"])
def test_a_file_that_cannot_be_written_is_named(problem, tmp_path, monkeypatch):
    """By the name that was given, not by that of the temporary file."""

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.unflip"
    if problem == "full disk":
        monkeypatch.setattr("unflip.packing.file.open_new", full)
    else:
        path = tmp_path / "folder" / "a.unflip"
    if problem == "file as folder":
        path.parent.write_text("")
    with pytest.raises(OSError, match=r"/a\.unflip('$| cannot be written: there is no folder)"):
        write_whole(path, b"data")

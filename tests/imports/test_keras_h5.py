"""HDF5 files that are damaged, or that point outside themselves: refused with a reason, and nothing else is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_writer import Net

from unflip.imports import CannotImport, keras_h5, larq
from unflip.imports.keras_config import parse_config

h5py = pytest.importorskip("h5py", reason="importing Larq's networks needs h5py")


def small(path: Path) -> Path:
    net = Net(4, 4, 3)
    net.add(
        "QuantConv2D",
        name="conv",
        filters=4,
        kernel_size=[3, 3],
        use_bias=False,
        input_quantizer="ste_sign",
        kernel_quantizer="ste_sign",
    )
    return net.write(path)


def load_here(path: Path) -> None:
    """Without a process of its own, which takes longer."""
    config, arrays = keras_h5.read_here(path)
    assert config is not None
    larq.build(parse_config(config, str(path)), keras_h5.KerasFile(str(path), config, arrays))


KERNEL = "model_weights/conv/conv/kernel:0"
SHAPE = (3, 3, 3, 4)


def replace(file: Any, **options: Any) -> None:
    del file[KERNEL]
    file.create_dataset(KERNEL, **options)


def external_link(file: Any, secret: Path) -> None:
    del file[KERNEL]
    file[KERNEL] = h5py.ExternalLink(secret, "kernel")


def external_group(file: Any, secret: Path) -> None:
    del file["model_weights"]
    file["model_weights"] = h5py.ExternalLink(secret, "/")


def soft_link(file: Any, secret: Path) -> None:
    file.move(KERNEL, "elsewhere")
    file[KERNEL] = h5py.SoftLink("/elsewhere")


def virtual(file: Any, secret: Path) -> None:
    layout = h5py.VirtualLayout(SHAPE, "f4")
    layout[:] = h5py.VirtualSource(secret, "kernel", SHAPE)
    del file[KERNEL]
    file.create_virtual_dataset(KERNEL, layout)


def raw_data_elsewhere(file: Any, secret: Path) -> None:
    replace(file, shape=SHAPE, dtype="f4", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def huge(file: Any, secret: Path) -> None:
    replace(file, shape=(2**20, 2**20, 3, 4), dtype="f4")  # never written, so nothing is stored


def huge_and_compressed(file: Any, secret: Path) -> None:
    replace(file, shape=(2**14, 2**14), dtype="f4", chunks=(1024, 1024), compression="gzip")


def group_in_itself(file: Any, secret: Path) -> None:
    file["model_weights/conv/again"] = file["model_weights"]


def many_names_of_one_array(file: Any, secret: Path) -> None:
    for number in range(100):
        file[f"model_weights/conv/{number}"] = file[KERNEL]


def texts(file: Any, secret: Path) -> None:
    replace(file, data=np.array([b"abc"] * 4))


def integers(file: Any, secret: Path) -> None:
    replace(file, data=np.ones(SHAPE, np.int32))


def complex_numbers(file: Any, secret: Path) -> None:
    replace(file, data=np.ones(SHAPE, np.complex64))


def another_shape(file: Any, secret: Path) -> None:
    replace(file, data=np.ones((3, 3, 4, 4), np.float32))


def not_a_number(file: Any, secret: Path) -> None:
    file[KERNEL][0, 0, 0, 0] = np.nan


def beyond_float32(file: Any, secret: Path) -> None:
    replace(file, data=np.full(SHAPE, 1e300))


def config_of_many_texts(file: Any, secret: Path) -> None:
    file.attrs["model_config"] = [b"{}", b"{}"]


def config_of_a_number(file: Any, secret: Path) -> None:
    file.attrs["model_config"] = 3.0


def keras_3(file: Any, secret: Path) -> None:
    del file["model_weights"]
    file.create_group("layers")
    file.create_group("vars")


CASES: dict[Callable[[Any, Path], None], str] = {
    external_link: "'kernel:0' is a link",
    external_group: "'model_weights' is a link",
    soft_link: "'kernel:0' is a link",
    virtual: "in pieces, compressed, or in other files",
    raw_data_elsewhere: "in pieces, compressed, or in other files",
    huge: "needs 52,776,558,133,248 bytes, but 0 are stored",
    huge_and_compressed: "in pieces, compressed, or in other files",
    group_in_itself: "more than 100,000 objects, or groups deeper than 16|announce more bytes",
    many_names_of_one_array: "announce more bytes than the file has",
    texts: "has type",
    integers: "has type 'int32'",
    complex_numbers: "has type 'complex64'",
    another_shape: r"kernel of layer 'conv' has shape \(3, 3, 4, 4\); the layer needs \(3, 3, 3, 4\)",
    not_a_number: "kernel of layer 'conv' contains NaN",
    beyond_float32: "kernel of layer 'conv' contains .* numbers too large for float32",
    config_of_many_texts: "model_config should be one text",
    config_of_a_number: "model_config should be a text",
    keras_3: "the layout of Keras 3",
}


@pytest.mark.parametrize("damage", CASES, ids=lambda function: function.__name__)
def test_damaged_files_are_refused(tmp_path, damage):
    path, secret = small(tmp_path / "small.h5"), tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["kernel"] = np.ones(SHAPE, np.float32)
    with h5py.File(path, "r+") as file:
        damage(file, secret)
    with pytest.raises(CannotImport, match=CASES[damage]) as error:
        load_here(path)
    assert str(path) in str(error.value)


def test_a_virtual_array_with_an_open_size_opens_no_other_file(tmp_path):
    """Its size depends on which source files exist, so HDF5 opens them as soon as somebody asks for the shape."""
    path = small(tmp_path / "small.h5")
    with h5py.File(path, "r+") as file:
        del file[KERNEL]
        space, source = (h5py.h5s.create_simple((1, 4), (h5py.h5s.UNLIMITED, 4)) for _ in range(2))
        space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (1, 4), (1, 4))
        source.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (1, 4), (1, 4))
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_virtual(space, str(tmp_path / "other.h5").encode(), b"kernel", source)
        group = file.require_group("model_weights/conv/conv")
        h5py.h5d.create(group.id, b"kernel:0", h5py.h5t.IEEE_F32LE, space, plan)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["kernel"] = np.ones((9, 4), np.float32)
    (tmp_path / "other.h5").chmod(0)
    with pytest.raises(CannotImport, match="in pieces, compressed, or in other files"):
        load_here(path)


def test_many_layers_in_a_model():
    """Each weight was looked for among all of them: half a minute for 2,000 layers, and 10,000 are allowed."""
    one = np.ones(1, np.float32)
    weights = ("gamma", "beta", "moving_mean", "moving_variance")
    file = keras_h5.KerasFile(
        "x", None, {f"m/b{i}/{w}:0": one for i in range(5000) for w in weights}
    )
    began = time.process_time()
    for i in range(5000):
        for weight in weights:
            assert file.find(("m", f"b{i}"), weight, (1,)) == 1
    assert time.process_time() - began < 2
    assert not file.unused()
    with pytest.raises(CannotImport, match="gamma of layer 'm': 5000 arrays could be it"):
        file.find(("m",), "gamma", (1,))


def test_long_paths(tmp_path):
    path = small(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file.create_dataset(f"model_weights/{'x' * 5000}", data=np.ones(1, np.float32))
    with pytest.raises(CannotImport, match=r"a name has 5,000 letters: 'x{60}'"):
        load_here(path)


def test_files_that_are_not_hdf5(tmp_path):
    with pytest.raises(CannotImport, match="the file does not exist"):
        keras_h5.read_h5(tmp_path / "missing.h5")
    for content in (b"", b"\x80\x04pickle", b"PK\x03\x04" + bytes(100)):
        (tmp_path / "other.h5").write_bytes(content)
        with pytest.raises(CannotImport, match="is not an HDF5 file"):
            keras_h5.read_here(tmp_path / "other.h5")


def test_cut_off_and_changed_files_are_refused_or_read(tmp_path, monkeypatch):
    """Some changes make the HDF5 library loop forever; it runs in a process of its own, with a limit."""
    monkeypatch.setattr(keras_h5, "SECONDS", 2)
    data = small(tmp_path / "small.h5").read_bytes()
    random = np.random.default_rng(0)
    path, refused = tmp_path / "damaged.h5", []
    for attempt in range(8):
        broken = bytearray(data)
        if attempt < 4:
            broken = broken[: 100 + len(data) * attempt // 4]
        else:
            for at in random.integers(8, len(data), 40):
                broken[at] = random.integers(256)
        path.write_bytes(broken)
        try:
            larq.load(path)
        except CannotImport as error:
            refused.append(str(error))
    assert len(refused) > 4
    assert all(str(path) in message for message in refused)


def test_a_reader_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(keras_h5, "SECONDS", 1)
    monkeypatch.setattr(keras_h5, "BYTES_PER_SECOND", 10**12)
    folder = tmp_path / "h5py"
    folder.mkdir()
    (folder / "__init__.py").write_text("while True: pass")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CannotImport, match="the HDF5 library crashed, or needed more than 1 s"):
        keras_h5.read_h5(small(tmp_path / "small.h5"))


def test_nothing_is_written_for_a_damaged_file(unflip, tmp_path):
    path = small(tmp_path / "small.h5")
    path.write_bytes(path.read_bytes()[:-500])
    result = unflip("import", "larq", path, "-o", tmp_path / "out.unflip")
    assert result.code == 1
    assert "cut off or damaged" in result.err
    assert not (tmp_path / "out.unflip").exists()

"""``unflip.load``: the model gives the same numbers as the reference, for every kind of call.

More than 400 lines: the tests share the small networks of every op.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unflip
from unflip import models, pack
from unflip.packing.file import Packed, read, write
from unflip.packing.reference import evaluate
from unflip.runtime._native import Network
from unflip.runtime.images import probabilities

NETWORKS = ["residual", "pools", "levels", "pieces", "smooth", "vector"]
Files = dict[str, Path]


def some_input(model: unflip.Model, batch: int = 3) -> Any:
    return np.random.default_rng(batch).normal(size=(batch, *model.input_shape)).astype(np.float32)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_reference_agrees(files: Files, name: str) -> None:
    model = unflip.load(files[name])
    x = some_input(model)
    expected = evaluate(read(files[name]), torch.from_numpy(x)).reshape(3, *model.output_shape)
    assert np.allclose(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_instruction_set_and_number_of_threads_gives_the_same_bytes(
    files: Files, name: str, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert instruction_sets[-1] == "portable"
    assert unflip.load(files[name]).isa == instruction_sets[0]
    x = some_input(unflip.load(files[name]), 5)
    results = set()
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        for threads in (1, 2, 3):
            model = unflip.load(files[name], threads=threads)
            assert (model.isa, model.threads) == (isa, threads)
            results.add(model(x).tobytes())
    assert len(results) == 1


def test_a_wrong_instruction_set(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFLIP_ISA", "mmx")
    with pytest.raises(
        ValueError, match=r"UNFLIP_ISA is 'mmx', but this CPU and build support only .*portable"
    ):
        unflip.load(files["vector"])


@pytest.mark.parametrize("threads", [-1, 1025, 2**40, True, 1.0])
def test_a_wrong_number_of_threads(files: Files, threads: Any) -> None:
    with pytest.raises(ValueError, match=r"threads must be 1 \.\. 1024"):
        unflip.load(files["vector"], threads=threads)


def test_as_many_threads_as_cores(files: Files) -> None:
    assert unflip.load(files["vector"], threads=0).threads == len(os.sched_getaffinity(0))


# --- arrays


def test_numpy_gives_numpy_and_torch_gives_torch(files: Files) -> None:
    model = unflip.load(files["residual"])
    x = some_input(model)
    arrays, tensors = model(x), model(torch.from_numpy(x))
    assert isinstance(arrays, np.ndarray)
    assert isinstance(tensors, torch.Tensor)
    assert arrays.shape == (3, 4)
    assert arrays.tobytes() == tensors.numpy().tobytes()


def test_one_sample_gives_one_result(files: Files) -> None:
    for name in NETWORKS:
        model = unflip.load(files[name])
        x = some_input(model)
        single = model(x[1])
        assert single.shape == model.output_shape
        assert single.tobytes() == model(x)[1].tobytes()


def test_vectors_need_no_pixels(files: Files) -> None:
    model = unflip.load(files["vector"])
    x = some_input(model)
    for flat in (x.reshape(3, 20), torch.from_numpy(x.reshape(3, 20))):
        assert np.asarray(model(flat)).tobytes() == model(x).tobytes()
    assert model(x[0].reshape(20)).shape == (3,)


def test_images_come_out_as_images(files: Files) -> None:
    model = unflip.load(files["pieces"])
    assert model.output_shape == (5, 4, 3)
    assert model(some_input(model)).shape == (3, 5, 4, 3)


@pytest.mark.parametrize(
    "shape", [(), (3,), (6, 6), (2, 3, 6), (3, 6, 5), (1, 2, 6, 6), (1, 1, 3, 6, 6), (0, 3, 6, 6)]
)
def test_wrong_shapes(files: Files, shape: tuple[int, ...]) -> None:
    model = unflip.load(files["residual"])
    with pytest.raises(ValueError, match=r"must have the shape \(N, 3, 6, 6\) or \(3, 6, 6\)"):
        model(np.zeros(shape, np.float32))


def test_an_input_in_another_order_is_copied(files: Files) -> None:
    model = unflip.load(files["residual"])
    x = some_input(model, 4)
    tensor = torch.from_numpy(x)
    for view in (x[::2], x[:, :, :, ::-1], np.asfortranarray(x)):
        assert np.array_equal(model(view), model(view.copy("C")))
    for other in (tensor[::2], tensor.to(memory_format=torch.channels_last), tensor.flip(0).mT):
        assert torch.equal(model(other), model(other.clone(memory_format=torch.contiguous_format)))
    assert len(model.profile(x[::2], runs=1)) > 0
    with pytest.raises(ValueError, match=r"not \(4, 2, 6, 6\)"):  # not that it is in another order
        model(x[:, :2])


def test_copies_and_pickles(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "net.unflip"
    path.write_bytes(files["residual"].read_bytes())
    model = unflip.load(path, threads=2)
    x = some_input(model)
    data = pickle.dumps(model)
    for twin in (
        pickle.loads(data),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(pickle.loads(data))),
    ):
        assert np.array_equal(twin(x), model(x))
        assert repr(twin) == repr(model)
        assert twin.labels == model.labels
    path.write_bytes(files["vector"].read_bytes())
    with pytest.raises(ValueError, match=r"net\.unflip was changed or removed after it was loaded"):
        pickle.dumps(model)
    path.unlink()
    with pytest.raises(ValueError, match=r"load it again"):
        copy.copy(model)
    assert np.array_equal(pickle.loads(data)(x), model(x))


def test_what_would_need_a_conversion_is_refused(files: Files) -> None:
    model = unflip.load(files["residual"])
    x = some_input(model)
    tensor = torch.from_numpy(x)
    with pytest.raises(TypeError, match=r"float64: x\.astype\(np\.float32\)"):
        model(x.astype(np.float64))
    with pytest.raises(TypeError, match="float32"):
        model(x.astype(">f4"))
    with pytest.raises(TypeError, match=r"x\.float\(\)"):
        model(tensor.half())
    with pytest.raises(ValueError, match=r"x\.to_dense\(\)"):
        model(tensor.to_sparse())
    with pytest.raises(ValueError, match=r"x\.cpu\(\)"):
        model(tensor.to("meta"))
    with pytest.raises(ValueError, match=r"x\.detach\(\)"):
        model(tensor.clone().requires_grad_())
    with pytest.raises(TypeError, match="not list"):
        model(x.tolist())


def test_nothing_is_copied_below_either(files: Files) -> None:
    """The native call takes an array as it is or not at all, and writes into the one it is given."""
    network = Network(os.fsencode(files["residual"]), 1)
    x = np.zeros((2, 3, 6, 6), np.float32)
    for output in (np.full((2, 4), -1, np.float32), torch.full((2, 4), -1.0)):
        network.run(x, output)
        assert (np.asarray(output) >= 0).all()
    good = np.empty((2, 4), np.float32)
    for wrong in (x.astype(np.float64), np.asfortranarray(x), torch.from_numpy(x).double()):
        with pytest.raises(TypeError):
            network.run(wrong, good)
    with pytest.raises(ValueError, match="same batch"):
        network.run(x, np.empty((1, 4), np.float32))
    x.flags.writeable = False
    network.run(x, good)


@pytest.mark.parametrize("threads", [1, 2])
def test_nan_and_infinities_are_refused_with_their_place(
    files: Files,
    instruction_sets: list[str],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
) -> None:
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        model = unflip.load(files["residual"], threads)
        x = some_input(model)
        model(x)
        for wrong, what in ((np.nan, "a NaN"), (np.inf, "an infinity"), (-np.inf, "an infinity")):
            x[2, 1, 4, 5] = wrong
            place = f"{what}: sample 2, channel 1, row 4, column 5"
            for call in (model, model.profile):
                with pytest.raises(ValueError, match=place):
                    call(x)
        x[2, 1, 4, 5] = np.finfo(np.float32).max  # large, but a number
        model(x)


# --- many at once


def test_a_hundred_threads(files: Files) -> None:
    for threads in (1, 2):
        model = unflip.load(files["levels"], threads=threads)
        x = some_input(model, 100)
        expected = model(x)
        barrier = threading.Barrier(100)

        def ask(i: int, model: Any = model, x: Any = x, barrier: Any = barrier) -> Any:
            barrier.wait()
            return [model(x[i]) for _ in range(20)]

        with ThreadPoolExecutor(100) as pool:
            for i, results in enumerate(pool.map(ask, range(100))):
                assert all(r.tobytes() == expected[i].tobytes() for r in results)


def test_errors_belong_to_the_thread_that_made_them(files: Files) -> None:
    model = unflip.load(files["residual"])
    good, bad = some_input(model), some_input(model)

    def ask(i: int) -> str:
        x = bad.copy()
        x[i % 3] = np.nan
        with pytest.raises(ValueError, match="NaN") as caught:
            model(x)
        model(good)
        return str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        for i, message in enumerate(pool.map(ask, range(300))):
            assert f"sample {i % 3}," in message


def test_the_gil_is_released(files: Files) -> None:
    model = unflip.load(files["pools"])
    x = some_input(model, 20_000)
    thread = threading.Thread(target=model, args=(x,))
    ticks, start = 0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(1e-3)
        ticks += 1
    seconds = time.perf_counter() - start
    assert seconds > 0.02, "too short to tell"
    assert ticks >= 5  # with the GIL held this loop would have waited for the whole call


def test_a_child_after_a_fork(files: Files) -> None:
    """Its threads are in the parent; the child must not wait for them."""
    script = """
import os, sys, numpy as np, unflip
model = unflip.load(sys.argv[1], threads=2)
x = np.ones((4, *model.input_shape), np.float32)
expected = model(x)
child = os.fork()
same = all(np.array_equal(model(x), expected) for _ in range(20))
if child == 0:
    del model
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script, files["residual"]], check=True, timeout=60)


def test_children_while_other_threads_run(files: Files) -> None:
    """A fork may come while another thread has a lock of the model, which nobody releases in the child."""
    script = """
import os, signal, sys, threading, numpy as np, unflip
model = unflip.load(sys.argv[1])
x = np.ones((1, *model.input_shape), np.float32)
expected, stop = model(x), threading.Event()

def run():
    while not stop.is_set():
        model(x)

threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if all(np.array_equal(model(x), expected) for _ in range(3)) else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
"""
    command = [sys.executable, "-W", "ignore", "-c", script, files["residual"]]
    subprocess.run(command, check=True, timeout=120)


# --- what it tells


def test_what_a_model_tells(files: Files) -> None:
    model = unflip.load(files["residual"])
    assert model.input_shape == (3, 6, 6)
    assert model.labels == ["cat", "dog", "Käfer", "鳥"]
    assert model.preprocess == {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.3]}
    assert re.fullmatch(
        r"<unflip\.Model residual\.unflip: 3 x 6 x 6 -> 4, 6 ops, 1 thread, \w+>", repr(model)
    )
    other = unflip.load(files["levels"])
    assert other.labels is None
    assert other.preprocess is None


def test_profile(files: Files) -> None:
    model = unflip.load(files["residual"])
    profile = model.profile(some_input(model), runs=5)
    assert [(row.kind, row.name) for row in profile][:2] == [
        ("conv", "conv0"),
        ("quantize", "quantize1"),
    ]
    assert len(profile) == 6
    assert all(row.seconds >= 0 for row in profile)
    assert profile.seconds > 0
    assert sum(row.share for row in profile) == pytest.approx(1)
    assert re.search(r"conv0 +conv +\d+\.\d +\d+\.\d%", str(profile))
    with pytest.raises(ValueError, match="runs must be 1 or more"):
        model.profile(some_input(model), runs=0)


def test_a_path_that_is_no_utf8(tmp_path: Path, networks: dict[str, Packed]) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.unflip")
    write(path, networks["vector"])
    assert unflip.load(path).input_shape == (20, 1, 1)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a packed network"):
        unflip.load(path)


# --- the command


def test_predict(unflip: Callable[..., Any], files: Files, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, size=(6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels[..., 0]).resize((31, 17)).save(tmp_path / "grey.jpg")
    done = unflip(
        "predict", files["residual"], tmp_path / "a.png", tmp_path / "grey.jpg", "--top", 2
    )
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == str(tmp_path / "a.png")
    assert lines[3] == str(tmp_path / "grey.jpg")

    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.2, 0.2, 0.3])
    x = ((pixels / 255 - mean) / std).astype(np.float32).transpose(2, 0, 1)
    expected = evaluate(read(files["residual"]), torch.from_numpy(x.copy())[None]).reshape(4)
    best = int(expected.argmax())
    assert lines[1].split() == [f"{expected[best]:.2%}", ["cat", "dog", "Käfer", "鳥"][best]]


def test_sigmoids_are_probabilities_already(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Sigmoid())
    pack(model, torch.randn(2, 5), tmp_path / "several.unflip")
    network = unflip.load(tmp_path / "several.unflip")
    outputs = network(some_input(network))
    assert (probabilities(outputs, network) == outputs).all()


def test_another_curve_at_the_end_is_no_probability(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh())
    pack(model, torch.randn(2, 5), tmp_path / "tanh.unflip")
    network = unflip.load(tmp_path / "tanh.unflip")
    assert network.ops[-1].startswith("tanh ")
    assert probabilities(network(some_input(network)), network).sum(-1) == pytest.approx(1.0)


def test_logits_are_no_probabilities_if_a_softmax_has_no_use(tmp_path: Path) -> None:
    """They were shown as percentages: -3 as -300 %."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Softmax(-1))
    pack(model, torch.randn(2, 5), tmp_path / "softmax.unflip")
    packed = read(tmp_path / "softmax.unflip")
    assert packed.graph["ops"][-1]["op"] == "softmax"
    packed.graph["output"] = len(packed.graph["ops"]) - 1
    write(tmp_path / "logits.unflip", packed)
    network = unflip.load(tmp_path / "logits.unflip")
    logits = np.array([-3.0, 0.5, 2.0], np.float32)
    assert probabilities(logits, network).sum() == pytest.approx(1.0)
    assert probabilities(logits, network).argmax() == 2


def test_predict_scales_sixteen_bits(files: Files, tmp_path: Path) -> None:
    from PIL import Image

    from unflip.runtime.images import read_image

    model = unflip.load(files["residual"])
    pixels = np.random.default_rng(0).integers(0, 256, size=(6, 6), dtype=np.uint8)
    exif = Image.Exif()
    exif[274] = 6
    for name, values in (("8", pixels), ("16", pixels.astype(np.uint16) * 257)):
        Image.fromarray(values).save(tmp_path / f"{name}.png", exif=exif)
    shallow, deep = (read_image(tmp_path / f"{name}.png", model) for name in ("8", "16"))
    assert np.array_equal(shallow, deep)
    Image.fromarray(pixels.astype(np.float32)).save(tmp_path / "deep.tiff")
    with pytest.raises(ValueError, match=r"deep\.tiff is not an image of a known format \(JPEG"):
        read_image(tmp_path / "deep.tiff", model)


def test_predict_with_a_very_wide_input(tmp_path: Path) -> None:
    """The image became 65,536 pixels wide and as high, 17 GB, before it was cropped."""
    from PIL import Image

    from unflip.packing.file import Packed, write
    from unflip.runtime import images

    ops = [{"op": "mean", "name": "mean", "inputs": [0]}]
    source = {"shape": [3, 1, 65_536], "preprocess": None}
    write(tmp_path / "wide", Packed({"input": source, "ops": ops, "output": 1, "labels": None}, {}))
    pixels = np.random.default_rng(0).integers(0, 256, size=(50, 60, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "image.png")
    found = images.read_image(tmp_path / "image.png", unflip.load(tmp_path / "wide"))
    middle = np.asarray(image.resize((65_536, 2), Image.Resampling.BILINEAR, (0, 24.5, 60, 25.5)))
    np.testing.assert_allclose(found[:, 0].T * 255, middle.mean(0), atol=2)


@pytest.mark.parametrize("shape", [(7, 40), (40, 7), (20, 20), (64, 64)])
def test_large_images_are_cropped_as_others(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    from unflip.runtime import images

    pixels = np.random.default_rng(0).integers(0, 256, size=(31, 45, 3), dtype=np.uint8)
    plain = np.asarray(images._covering(Image.fromarray(pixels), *shape), int)
    monkeypatch.setattr(images, "MOST_PIXELS", 0)
    part = np.asarray(images._covering(Image.fromarray(pixels), *shape), int)
    assert part.shape == plain.shape == (*shape, 3)
    assert abs(part - plain).max() <= 1


def test_predict_says_what_is_wrong(
    unflip: Callable[..., Any], files: Files, tmp_path: Path
) -> None:
    assert "does not exist" in unflip("predict", tmp_path / "no.unflip", "x.png").err
    missing = unflip("predict", "digits-mcu", tmp_path / "no.png").err
    assert missing == f"unflip: the image {tmp_path}/no.png does not exist\n"
    folder = unflip("predict", "digits-mcu", tmp_path).err
    assert folder == f"unflip: {tmp_path} is a folder; give the images in it\n"
    assert "is not a classifier" in unflip("predict", files["pieces"], "x.png").err
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 1))
    pack(model, torch.randn(2, 3, 2, 2), tmp_path / "one.unflip")
    assert "no classes to choose" in unflip("predict", tmp_path / "one.unflip", "x.png").err
    missing = unflip("predict", files["residual"], tmp_path / "x.png")
    assert missing.code == 1
    assert "x.png" in missing.err
    (tmp_path / "x.png").write_bytes(b"no image")
    assert (
        "is not an image of a known format"
        in unflip("predict", files["residual"], tmp_path / "x.png").err
    )


def test_evaluate(unflip: Callable[..., Any], tmp_path: Path) -> None:
    import unflip as library
    from unflip.data import load

    digits = load("digits")
    torch.manual_seed(0)
    net = models.create("resnet20", "dorefa", in_channels=1, width=16).eval()
    preprocess = {"mean": list(digits.mean), "std": list(digits.std)}
    path, x = tmp_path / "digits.unflip", torch.randn(2, 1, 8, 8)
    library.pack(net, x, path, labels=list(digits.classes), preprocess=preprocess)

    done = unflip("evaluate", path, "digits", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    inputs = (torch.from_numpy(digits.test_images) / 255 - digits.mean[0]) / digits.std[0]
    right = int((library.load(path)(inputs).argmax(1).numpy() == digits.test_labels).sum())
    assert (found["right"], found["images"]) == (right, len(digits.test_labels))
    assert f"{100 * right / found['images']:.2f} %" in unflip("evaluate", path, "digits").out


def test_evaluate_refuses_images_that_mean_nothing_to_the_network(
    unflip: Callable[..., Any], files: Files, tmp_path: Path
) -> None:
    import unflip as library

    assert "takes images of (3, 6, 6)" in unflip("evaluate", files["residual"], "digits").err
    net = models.create("resnet20", "dorefa", in_channels=1, width=16).eval()
    path = tmp_path / "letters.unflip"
    library.pack(net, torch.randn(1, 1, 8, 8), path, labels=list("abcdefghij"))
    refusal = unflip("evaluate", path, "digits").err
    assert "class 0 of 10 is 'a' in the file and '0' in the data set" in refusal
    library.pack(net, torch.randn(1, 1, 8, 8), path, labels=["0", *"bcdefghij"])
    assert "class 1 of 10 is 'b'" in unflip("evaluate", path, "digits").err


def test_bench(unflip: Callable[..., Any], files: Files) -> None:
    done = unflip("bench", files["residual"], "--runs", 3, "--batch", 2, "--threads", 2)
    assert done.code == 0, done.err
    assert "conv0" in done.out
    assert "2 threads" in done.out
    assert re.search(r"batch 2: median \d+\.\d{3} ms of 3 runs", done.out)

"""Networks with several outputs: the same structure as the model's, and every output right however it is asked for."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unflip
from unflip.packing.file import Packed, read, to_bytes, write
from unflip.packing.reference import evaluate_outputs
from unflip.runtime._native import Network

Files = dict[str, Path]
NAMES = ["scores", "boxes", "gate", "features", "least", "again"]
SHAPES = [(5,), (4, 6, 6), (8, 6, 6), (8, 6, 6), (8, 3, 3), (4, 6, 6)]


def some_input(model: unflip.Model, batch: int = 3) -> Any:
    return np.random.default_rng(batch).normal(size=(batch, *model.input_shape)).astype(np.float32)


def test_a_dict_comes_back_as_a_dict(files: Files) -> None:
    model = unflip.load(files["several"])
    assert model.structure == "dict"
    assert model.output_shapes == dict(zip(NAMES, SHAPES, strict=True))
    x = some_input(model)
    found, of_torch = model(x), model(torch.from_numpy(x))
    assert list(found) == list(of_torch) == NAMES
    for name, shape in model.output_shapes.items():
        assert isinstance(found[name], np.ndarray)
        assert isinstance(of_torch[name], torch.Tensor)
        assert found[name].shape == of_torch[name].shape == (3, *shape)
        assert np.array_equal(found[name], of_torch[name].numpy())
    assert np.array_equal(found["boxes"], found["again"])
    assert not np.shares_memory(found["boxes"], found["again"])


def test_a_tuple_comes_back_as_a_tuple(files: Files) -> None:
    model = unflip.load(files["pair"])
    assert (model.structure, model.output_shapes) == ("tuple", {"0": (2,), "1": (9,)})
    for x in (np.ones((4, 6), np.float32), torch.ones(4, 6)):
        found = model(x)
        assert type(found) is tuple
        assert [part.shape for part in found] == [(4, 2), (4, 9)]
    assert [part.shape for part in model(np.ones(6, np.float32))] == [(2,), (9,)]


@pytest.mark.parametrize("name", ["several", "pair"])
@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_the_reference_agrees_on_every_output(
    files: Files, name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every instruction set and number of threads, to the same bytes."""
    packed = read(files[name])
    x = some_input(unflip.load(files[name]), batch)
    expected = evaluate_outputs(packed, torch.from_numpy(x))
    results = set()
    for isa in ("", "avx512", "avx2", "neon", "portable"):
        monkeypatch.setenv("UNFLIP_ISA", isa)
        for threads in (1, 2, 3):
            try:
                model = unflip.load(files[name], threads=threads)
            except ValueError:  # not one of this CPU's
                continue
            found = model(x)
            arrays = list(found.values() if isinstance(found, dict) else found)
            for array, right in zip(arrays, expected.values(), strict=True):
                close = np.allclose(array, right.reshape(array.shape), rtol=1e-4, atol=1e-5)
                assert close, (isa, threads)
            results.add(b"".join(array.tobytes() for array in arrays))
    assert len(results) == 1


def test_each_output_alone_has_the_same_bytes(networks: dict[str, Packed]) -> None:
    """What is returned besides changes what is fused and where values are kept, and nothing else."""
    packed = networks["several"]
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)

    def run(graph: dict[str, Any]) -> dict[str, bytes]:
        network = Network.from_bytes(to_bytes(Packed(graph, packed.tensors)), 1)
        found = {name: np.empty((2, *shape), np.float32) for name, shape in network.outputs}
        network.run(x, *found.values())
        return {name: array.tobytes() for name, array in found.items()}

    together = run(packed.graph)
    graph = {k: v for k, v in packed.graph.items() if k not in ("outputs", "structure")}
    for part in packed.graph["outputs"]:
        alone = run({**graph, "output": part["value"], "labels": None})
        assert alone == {"output": together[part["name"]]}
        one = run({**packed.graph, "outputs": [part], "labels": None})
        assert one == {part["name"]: together[part["name"]]}


def test_one_sample_pickle_copy_and_profile(files: Files) -> None:
    model = unflip.load(files["several"], threads=2)
    x = some_input(model)
    found, single = model(x), model(x[1])
    for name, shape in model.output_shapes.items():
        assert single[name].shape == shape
        assert np.array_equal(single[name], found[name][1])
    for other in (pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert other.structure == "dict"
        assert all(np.array_equal(other(x)[name], found[name]) for name in NAMES)
    assert len(model.profile(x, runs=2)) == len(model.ops)


def test_what_a_model_tells(files: Files) -> None:
    model = unflip.load(files["several"])
    assert "3 x 6 x 6 -> scores: 5, boxes: 4 x 6 x 6, gate: 8 x 6 x 6" in repr(model)
    assert model.labels == list("abcde")
    with pytest.raises(AttributeError, match="has 6 outputs, so it has no output_shape; use outp"):
        _ = model.output_shape
    one = unflip.load(files["residual"])
    assert (one.structure, one.output_shape, one.output_shapes) == (
        "tensor",
        (4,),
        {"output": (4,)},
    )


def test_one_output_in_a_structure(networks: dict[str, Packed], tmp_path: Path) -> None:
    packed = networks["several"]
    for structure, kind in (("tuple", tuple), ("dict", dict)):
        graph = {**packed.graph, "outputs": packed.graph["outputs"][:1], "structure": structure}
        write(tmp_path / "one.unflip", Packed(graph, packed.tensors))
        model = unflip.load(tmp_path / "one.unflip")
        assert model.output_shape == (5,)
        assert type(model(some_input(model))) is kind
        assert len(model(some_input(model))) == 1


def test_the_native_call_takes_as_many_arrays_as_there_are_outputs(files: Files) -> None:
    network = Network(str(files["pair"]).encode(), 1)
    x, first, second = (np.zeros((2, n), np.float32) for n in (6, 2, 9))
    network.run(x, first, second)
    for wrong in ((first,), (second, first), (first, second, second), ()):
        with pytest.raises(ValueError, match="same batch"):
            network.run(x, *wrong)
    for odd in (second.astype(np.float64), np.asfortranarray(second), None):
        with pytest.raises(TypeError, match="float32 array in C order"):
            network.run(x, first, odd)
    second.flags.writeable = False
    with pytest.raises(TypeError, match="that can be written"):
        network.run(x, first, second)


# --- commands


def test_show_and_bench(unflip: Callable[..., Any], files: Files) -> None:
    shown = unflip("show", files["several"])
    assert shown.code == 0, shown.err
    assert "output scores: 5 × 1 × 1" in shown.out
    assert "output least: 8 × 3 × 3" in shown.out
    assert "output 4 × 1 × 1" in unflip("show", files["residual"]).out
    timed = unflip("bench", files["several"], "--runs", 2, "--batch", 2)
    assert timed.code == 0, timed.err
    assert "scores: 5" in timed.out


def test_what_needs_scores_alone_says_so(
    unflip: Callable[..., Any], files: Files, tmp_path: Path
) -> None:
    for words in (
        ("predict", files["several"], tmp_path / "x.png"),
        ("evaluate", files["several"], "digits"),
    ):
        done = unflip(*words)
        assert done.code == 1
        text = " ".join(done.err.split())
        assert "returns a dict (scores, boxes, gate, features, least, again)" in text
        assert "needs a network that returns only the scores of classes" in text


# --- C

PROGRAM = """
#include <stdio.h>
#include <string.h>
#include "unflip.h"

int main(int count, char** arguments) {
  unflip_model* model = unflip_load(arguments[count - 1], 2, NULL);
  if (model == NULL) return 1;
  static float input[2 * 108], room[8][2 * 8 * 36];
  float* outputs[8];
  double seconds[64] = {0};
  int shape[3] = {7, 7, 7};
  for (int i = 0; i < 216; i++) input[i] = (float)(i * 37 % 41 - 20) / 8;
  for (int i = 0; i < 8; i++) outputs[i] = room[i];
  printf("%s %d\\n", unflip_structure(model), unflip_outputs(model));
  if (unflip_run_outputs(model, input, 2, outputs) != 0) return 2;
  for (int i = 0; i < unflip_outputs(model); i++) {
    if (unflip_shape_of_output(model, i, shape) != 0) return 3;
    printf("%s %d %d %d", unflip_output_name(model, i), shape[0], shape[1], shape[2]);
    for (int k = 0; k < 2 * shape[0] * shape[1] * shape[2]; k++) printf(" %.9g", (double)room[i][k]);
    printf("\\n");
  }
  if (unflip_profile_outputs(model, input, 2, outputs, seconds) != 0 || !(seconds[0] > 0)) return 4;
  if (unflip_output_shape(model, shape) != 0) printf("error %d %s\\n", shape[0], unflip_error());
  if (unflip_run(model, input, 2, room[0]) != 0) printf("error %s\\n", unflip_error());
  if (unflip_profile(model, input, 2, room[0], seconds) != 0) printf("error %s\\n", unflip_error());
  for (int i = -1; i < 9; i += 9)
    if (unflip_shape_of_output(model, i, shape) != 0 && strlen(unflip_output_name(model, i)) == 0)
      printf("error %d %s\\n", shape[2], unflip_error());
  if (unflip_run_outputs(model, input, 0, outputs) != 0) printf("error %s\\n", unflip_error());
  if (unflip_run_outputs(model, input, 2, NULL) != 0) printf("error %s\\n", unflip_error());
  outputs[0] = NULL;
  if (unflip_run_outputs(model, input, 2, outputs) != 0) printf("error %s\\n", unflip_error());
  unflip_free(model);
  return 0;
}
"""


def compiled(folder: Path, source: str, command: Callable[..., str]) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = unflip.runtime.c_folder()
    (folder / "program.c").write_text(source)
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1")
    where = (f"-I{library}", f"-L{library}", "-lunflip", f"-Wl,-rpath,{library}")
    command("gcc", *strict, folder / "program.c", *where, "-o", folder / "program")
    return folder / "program"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, command: Callable[..., str]) -> Path:
    return compiled(tmp_path_factory.mktemp("c"), PROGRAM, command)


def c_input() -> Any:
    return ((np.arange(216) * 37 % 41 - 20) / 8).astype(np.float32).reshape(2, 3, 6, 6)


def test_outputs_in_c(program: Path, files: Files, command: Callable[..., str]) -> None:
    lines = command(program, files["several"]).splitlines()
    assert lines[0] == "dict 6"
    model = unflip.load(files["several"])
    for line, (name, found) in zip(lines[1:7], model(c_input()).items(), strict=True):
        words = line.split()
        assert words[0] == name
        assert tuple(map(int, words[1:4])) == (*found.shape[1:], 1, 1)[:3]
        assert np.array_equal(np.array(words[4:], np.float32), found.ravel())
    assert lines[7:] == [
        "error 0 this network has 6 outputs: call unflip_shape_of_output",
        "error this network has 6 outputs: call unflip_run_outputs",
        "error this network has 6 outputs: call unflip_profile_outputs",
        "error 0 output -1 does not exist: there are 6, numbered from 0",
        "error 0 output 8 does not exist: there are 6, numbered from 0",
        "error the batch must be 1 or more, not 0",
        "error model, input and outputs must not be NULL",
        "error outputs[0] must not be NULL",
    ]


def test_one_output_either_way_in_c(
    program: Path, files: Files, command: Callable[..., str]
) -> None:
    lines = command(program, files["residual"]).splitlines()
    assert lines[0] == "tensor 1"
    words = lines[1].split()
    assert words[:4] == ["output", "4", "1", "1"]
    found = unflip.load(files["residual"])(c_input())
    assert np.array_equal(np.array(words[4:], np.float32), found.ravel())
    assert lines[2].startswith(
        "error 0 output -1 does not exist: there are 1, numbered"
    )  # those for one output work


def test_the_c_example_refuses_several(
    root: Path, files: Files, tmp_path: Path, command: Callable[..., str]
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = unflip.runtime.c_folder()
    where = (f"-I{library}", f"-L{library}", "-lunflip", f"-Wl,-rpath,{library}")
    command("gcc", root / "native/examples/classify.c", *where, "-o", tmp_path / "classify")
    words = [tmp_path / "classify", files["several"], "x.ppm"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "classify: this network has 6 outputs" in done.stderr

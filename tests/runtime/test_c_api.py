"""The C API as other programs see it: symbols, sizes, NULL, texts, and how CMake and pkg-config find it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unflip
from unflip.packing.file import Packed, write
from unflip.runtime import c_folder
from unflip.runtime._native import PATH

Files = dict[str, Path]
Command = Callable[..., str]
STRICT = ("-Wall", "-Wextra", "-Werror", "-O1")


@pytest.fixture(scope="session")
def library() -> Path:
    """The folder of the library that Python uses."""
    for tool in ("gcc", "g++", "nm", "readelf"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    return c_folder()


def compiled(source: str, folder: Path, library: Path, command: Command, cpp: bool = False) -> Path:
    path = folder / ("program.cpp" if cpp else "program.c")
    path.write_text(source)
    compiler = ("g++", "-std=c++17") if cpp else ("gcc", "-std=c11")
    where = (f"-I{library}", f"-L{library}", "-lunflip", f"-Wl,-rpath,{library}")
    command(*compiler, *STRICT, path, *where, "-o", folder / "program")
    return folder / "program"


# --- ABI


def prototypes(header: str) -> list[str]:
    """The functions of the header, one per line, without names of arguments."""
    found = re.findall(r"^UNFLIP_API (.*?)\((.*?)\);$", header, flags=re.MULTILINE)
    lines = []
    for head, arguments in found:
        types = [re.sub(r"\b\w+(\[\d*\])?$", r"\1", a).strip() for a in arguments.split(",")]
        lines.append(f"{head}({'void' if arguments == 'void' else ', '.join(types)})")
    return sorted(lines, key=lambda line: line.split("(")[0].split()[-1])


SIZES = """
#include <stdio.h>
#include "unflip.h"
#define FIELD(type, field) printf(" %s %zu", #field, offsetof(type, field));

int main(void) {
  printf("unflip_limits %zu:", sizeof(unflip_limits));
  FIELD(unflip_limits, max_memory)
  FIELD(unflip_limits, max_work)
  printf("\\n");
  return 0;
}
"""


def test_the_abi_is_the_one_in_the_list(
    root: Path, library: Path, tmp_path: Path, command: Command
) -> None:
    """A program compiled before must run with this library. If it does not, raise UNFLIP_ABI in native/CMakeLists.txt.

    Then, or if only functions were added, write the lines that this test prints to abi.txt.
    """
    sizes = command(compiled(SIZES, tmp_path, library, command)).splitlines()
    functions = prototypes((root / "native/include/unflip.h").read_text())
    cmake = (root / "native/CMakeLists.txt").read_text()
    version = re.search(r"^set\(UNFLIP_ABI (\d+)\)$", cmake, flags=re.MULTILINE)
    assert version is not None
    now = "\n".join([f"libunflip.so.{version[1]}", *sizes, *functions]) + "\n"
    print(now)  # the content of abi.txt
    assert now == (Path(__file__).parent / "abi.txt").read_text()


def test_only_the_functions_of_the_header_are_exported(
    root: Path, library: Path, command: Command
) -> None:
    lines = command("nm", "-D", "--defined-only", library / "libunflip.so.0").splitlines()
    exported = {line.split()[-1] for line in lines}
    header = (root / "native/include/unflip.h").read_text()
    assert exported == {line.split("(")[0].split()[-1] for line in prototypes(header)}


def test_the_soname_has_a_version(library: Path, command: Command) -> None:
    """Python loads the file of this name."""
    assert PATH.name == "libunflip.so.0"
    assert "soname: [libunflip.so.0]" in command("readelf", "-d", library / PATH.name)


# --- NULL and other wrong arguments

NULLS = """
#include <stdio.h>
#include <string.h>
#include "unflip.h"

static void say(const char* function, int failed) { printf("%s %d %s\\n", function, failed, unflip_error()); }
static int first_shape(const unflip_model* model, int* shape) { return unflip_shape_of_output(model, 0, shape); }

int main(int count, char** arguments) {
  unflip_limits low = {1000, 0}, high = {0, 1}, right = {0, 0};
  float number = 0, *numbers = &number;
  double seconds;
  if (strlen(unflip_error()) != 0) return 4;
  say("load", unflip_load(NULL, 1, NULL) == NULL);
  say("load_memory", unflip_load_memory(NULL, 8, 1, NULL) == NULL);
  say("max_memory", unflip_load(arguments[count - 1], 1, &low) == NULL);
  say("max_work", unflip_load(arguments[count - 1], 1, &high) == NULL);
  const char* names[] = {"input_shape", "output_shape", "shape_of_output"};
  int (*shapes[])(const unflip_model*, int*) = {unflip_input_shape, unflip_output_shape, first_shape};
  for (int i = 0; i < 3; i++) {
    int left[3] = {7, 7, 7};
    say(names[i], shapes[i](NULL, left) != 0 && left[0] == 0 && left[1] == 0 && left[2] == 0);
  }
  say("run", unflip_run(NULL, &number, 1, &number) != 0);
  say("profile", unflip_profile(NULL, &number, 1, &number, &seconds) != 0);
  say("ops", unflip_ops(NULL) == 0);
  say("op_name", strlen(unflip_op_name(NULL, 0)) == 0);
  say("outputs", unflip_outputs(NULL) == 0);
  say("output_name", strlen(unflip_output_name(NULL, 0)) == 0);
  say("output_dims", unflip_output_dims(NULL, 0) == 0);
  say("structure", strlen(unflip_structure(NULL)) == 0);
  say("run_outputs", unflip_run_outputs(NULL, &number, 1, &numbers) != 0);
  say("profile_outputs", unflip_profile_outputs(NULL, &number, 1, &numbers, &seconds) != 0);
  unsigned char pixel = 0;
  say("takes_pixels", unflip_takes_pixels(NULL) == 0);
  say("run_pixels", unflip_run_pixels(NULL, &pixel, 1, &numbers, NULL) != 0);
  say("has_preprocess", unflip_has_preprocess(NULL) == 0);
  say("preprocess", unflip_preprocess(NULL, &seconds, &seconds) != 0);
  say("labels", unflip_labels(NULL) == 0);
  say("label", strlen(unflip_label(NULL, 0)) == 0);
  say("isa", strlen(unflip_isa(NULL)) == 0);
  say("threads", unflip_threads(NULL) == 0);
  say("memory_needed", unflip_memory_needed(NULL) == 0);
  say("work_needed", unflip_work_needed(NULL) == 0);
  char text[8];
  say("printable", unflip_printable(NULL, text, 8) + 1 == 0 && unflip_printable("a", NULL, 8) + 1 == 0);
  if (unflip_printable("a\\x1b[31m", NULL, 0) != 9 || unflip_printable("a\\x1b[31m", text, 8) != 9) return 2;
  if (strcmp(text, "a\\\\x1b[3") != 0) return 3;
  unflip_free(NULL);
  unflip_model* model = unflip_load(arguments[count - 1], 1, &right);
  if (model == NULL) return 1;
  static float input[108], room[8 * 36];
  float* outputs[6] = {room, room, room, room, room, NULL};
  say("shape", unflip_input_shape(model, NULL) != 0 && unflip_shape_of_output(model, 0, NULL) != 0);
  say("shape", unflip_output_shape(model, NULL) != 0);
  say("input", unflip_run_outputs(model, NULL, 1, outputs) != 0);
  say("outputs", unflip_run_outputs(model, input, 1, NULL) != 0);
  say("outputs", unflip_run_outputs(model, input, 1, outputs) != 0);
  say("output", unflip_run(model, input, 1, NULL) != 0);
  say("seconds", unflip_profile(model, input, 1, room, NULL) != 0);
  say("seconds", unflip_profile_outputs(model, input, 1, outputs, NULL) != 0);
  say("mean", unflip_preprocess(model, NULL, &seconds) != 0);
  say("deviation", unflip_preprocess(model, &seconds, NULL) != 0);
  say("op", strlen(unflip_op_name(model, -1)) == 0);
  say("op", strlen(unflip_op_name(model, unflip_ops(model))) == 0);
  say("output", strlen(unflip_output_name(model, unflip_outputs(model))) == 0);
  say("output", unflip_output_dims(model, -1) == 0);
  say("label", strlen(unflip_label(model, 5)) == 0);
  unsigned long long memory = unflip_memory_needed(model), work = unflip_work_needed(model);
  printf("%llu %llu\\n", memory, work);
  unflip_free(model);
  return 0;
}
"""


def test_null_is_an_error_everywhere(
    library: Path, tmp_path: Path, files: Files, command: Command, root: Path
) -> None:
    program = compiled(NULLS, tmp_path, library, command)
    out = command(program, files["several"]).splitlines()
    header = (root / "native/include/unflip.h").read_text()
    functions = {line.split("(")[0].split()[-1] for line in prototypes(header)}
    functions -= {"unflip_error", "unflip_version", "unflip_free"}
    assert functions <= {f"unflip_{line.split()[0]}" for line in out}
    for line in out[:-1]:
        function, failed, message = line.split(maxsplit=2)
        assert failed == "1", line
        if "does not exist" in message:
            assert message.startswith(function)
        else:
            assert "NULL" in message or function in message
    model = unflip.load(files["several"])
    assert out[-1] == f"{model.memory_needed} {model.work_needed}"


# --- labels and preprocessing

TYPED = """
#include <stdio.h>
#include "unflip.h"

int main(int count, char** arguments) {
  unflip_model* model = unflip_load(arguments[count - 1], 1, NULL);
  double mean[4] = {7, 7, 7, 7}, deviation[4] = {7, 7, 7, 7};
  if (model == NULL || unflip_preprocess(model, mean, deviation) != 0) return 1;
  printf("%d %d", unflip_labels(model), unflip_has_preprocess(model));
  for (int i = 0; i < 4; i++) printf(" %.17g %.17g", mean[i], deviation[i]);
  printf("\\n");
  for (int i = 0; i < unflip_labels(model); i++) printf("%s\\n", unflip_label(model, i));
  unflip_free(model);
  return 0;
}
"""


def test_labels_and_preprocessing_are_typed(
    library: Path, tmp_path: Path, networks: dict[str, Packed], command: Command
) -> None:
    program = compiled(TYPED, tmp_path, library, command)
    packed = networks["residual"]
    packed.graph["labels"] = ["", 'a "quoted" \\ one', "Käfer\t鳥", "\u202e"]
    packed.graph["input"]["preprocess"] = {"mean": [0.1, -2, 1e-30], "std": [1 / 3, 2, 3e38]}
    write(tmp_path / "a.unflip", packed)
    first, *labels = command(program, tmp_path / "a.unflip").splitlines()
    assert labels == packed.graph["labels"]
    numbers = [0.1, 1 / 3, -2, 2, 1e-30, 3e38, 7, 7]
    assert first.split()[:2] == ["4", "1"]
    assert [float(word) for word in first.split()[2:]] == numbers
    model = unflip.load(tmp_path / "a.unflip")
    assert model.labels == labels
    assert model.preprocess == packed.graph["input"]["preprocess"]

    packed.graph["labels"] = packed.graph["input"]["preprocess"] = None
    write(tmp_path / "b.unflip", packed)
    assert command(program, tmp_path / "b.unflip") == "0 0 0 1 0 1 0 1 7 7\n"
    model = unflip.load(tmp_path / "b.unflip")
    assert model.labels is None
    assert model.preprocess is None


# --- the C++ wrapper

WRAPPER = """
#include <cassert>
#include <iostream>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>
#define max(a, b) ((a) > (b) ? (a) : (b))  // windows.h defines it
#include "unflip.hpp"

template <typename Action>
void expect(const std::string& message, Action action) {
  try {
    action();
  } catch (const unflip::Error& error) {
    if (std::string(error.what()).find(message) != std::string::npos) return;
    std::cout << error.what() << "\\n";
  }
  std::cout << "no error: " << message << "\\n";
}

int main(int, char** arguments) {
  static_assert(!std::is_copy_constructible_v<unflip::Model> && std::is_move_constructible_v<unflip::Model>);
  unflip::Model one(arguments[1]), several(arguments[2], 2);
  std::vector<float> input(2 * one.input_shape().size());
  for (size_t i = 0; i < input.size(); ++i) input[i] = float(int(i * 37 % 41) - 20) / 8;
  for (float x : one.run(input)) std::cout << x << " ";
  std::cout << "\\n";
  for (const auto& output : several.run_outputs(input)) std::cout << output.size() << " ";
  for (const unflip::Output& output : several.outputs())
    std::cout << output.name << output.dims << output.shape.channels << output.shape.height << " ";
  std::cout << one.labels().at(0) << one.preprocess().mean.at(1) << one.preprocess().deviation.at(2) << "\\n";

  std::ifstream file(arguments[1], std::ios::binary);
  const std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
  unflip::Model moved = unflip::Model::from_memory(data.data(), data.size());
  unflip::Model last = std::move(moved);
  if (last.run(input) != one.run(input)) std::cout << "moved models differ\\n";
  expect("does not exist", [] { unflip::Model("nothing.unflip"); });
  expect("the limit is 1,000", [&] { unflip::Model(arguments[1], 1, {1000, 0}); });
  expect("must not be NULL", [&] { moved.run(input); });
  expect("several outputs", [&] { several.run(input); });
  expect("5 numbers are not a batch: a sample has 108", [&] { one.run(std::vector<float>(5)); });
  expect("0 numbers are not a batch", [&] { one.run({}); });
  return 0;
}
"""


def test_the_cpp_wrapper(
    root: Path, library: Path, tmp_path: Path, files: Files, command: Command
) -> None:
    assert len((root / "native/include/unflip.hpp").read_text().splitlines()) <= 100
    program = compiled(WRAPPER, tmp_path, library, command, cpp=True)
    lines = command(program, files["residual"], files["several"]).splitlines()
    x = ((np.arange(216) * 37 % 41 - 20) / 8).astype(np.float32).reshape(2, 3, 6, 6)
    right = unflip.load(files["residual"])(x)
    assert np.allclose(np.array(lines[0].split(), float), right.ravel(), rtol=1e-4)
    model = unflip.load(files["several"])
    sizes = [str(2 * int(np.prod(shape))) for shape in model.output_shapes.values()]
    shapes = {name: (*shape, 1, 1)[:3] for name, shape in model.output_shapes.items()}
    named = [f"{name}{len(model.output_shapes[name])}{c}{h}" for name, (c, h, _) in shapes.items()]
    assert lines[1].split() == [*sizes, *named, "cat0.40.3"]
    assert lines[2:] == []


# --- the package


@pytest.fixture(params=["python", "prefix"])
def installed(
    request: pytest.FixtureRequest, root: Path, library: Path, tmp_path: Path, command: Command
) -> dict[str, Path]:
    """An install: the Python package's folder, or a prefix that was moved after installing."""
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake")
    if request.param == "python":
        return {"root": library, "lib": library, "pkgconfig": library / "pkgconfig"}
    folder = tmp_path / "installed here"
    # The library itself need not be built again: the files beside it are tested here.
    command("cmake", "-S", root / "native", "-B", tmp_path / "build", "-DCMAKE_INSTALL_LIBDIR=lib")
    shutil.copy(library / "libunflip.so.0", tmp_path / "build" / "libunflip.so.0")
    (tmp_path / "build" / "libunflip.so").symlink_to("libunflip.so.0")
    command("cmake", "--install", tmp_path / "build", "--prefix", folder)
    moved = folder.rename(tmp_path / "moved")
    return {"root": moved, "lib": moved / "lib", "pkgconfig": moved / "lib" / "pkgconfig"}


def test_cmake_finds_it(
    installed: dict[str, Path], root: Path, files: Files, tmp_path: Path, command: Command
) -> None:
    """Builds both examples and runs the one in C++."""
    where = (f"-Dunflip_ROOT={installed['root']}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
    command("cmake", "-S", root / "native/examples", "-B", tmp_path / "examples", *where)
    command("cmake", "--build", tmp_path / "examples")
    pixels = np.random.default_rng(0).integers(0, 256, size=(2, 3, 6, 6), dtype=np.uint8)
    run = [tmp_path / "examples" / "classify_cpp", files["residual"]]
    done = subprocess.run(run, input=pixels.tobytes(), capture_output=True, check=True)
    model = unflip.load(files["residual"])
    assert model.labels is not None
    mean, std = (np.reshape(c, (3, 1, 1)) for c in ([0.5, 0.4, 0.3], [0.2, 0.2, 0.3]))
    scores = model(((pixels / 255 - mean) / std).astype(np.float32))
    lines = done.stdout.decode().splitlines()
    assert [line.split()[1] for line in lines] == [model.labels[i] for i in scores.argmax(1)]
    assert np.allclose([float(line.split()[0]) for line in lines], scores.max(1), atol=1e-4)
    done = subprocess.run(run, input=b"short", capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == b"classify: 5 numbers are not a batch: a sample has 108\n"


def test_pkg_config_finds_it(
    installed: dict[str, Path], root: Path, tmp_path: Path, command: Command
) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    env: dict[str, Any] = {**os.environ, "PKG_CONFIG_PATH": str(installed["pkgconfig"])}
    assert command("pkg-config", "--modversion", "unflip", env=env).strip() == unflip.__version__
    flags = command("pkg-config", "--cflags", "--libs", "unflip", env=env).split()
    source = root / "native/examples/classify.cpp"
    words = ("g++", "-std=c++17", *STRICT, source, *flags, "-o", tmp_path / "classify")
    command(*words, f"-Wl,-rpath,{installed['lib']}")
    done = subprocess.run([tmp_path / "classify"], capture_output=True, check=False)
    assert done.stderr == b"classify: usage: classify MODEL.unflip < PIXELS\n"

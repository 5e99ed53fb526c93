"""Networks as plain C, compiled by this machine's cc: the same bits as the runtime, in the stated memory."""

from __future__ import annotations

import ctypes
import re
import runpy
import shutil
import subprocess
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_library import STRICT, Library

from unflip.export.plain_c.arena import Place, assign, ends_in_use
from unflip.export.plain_c.export import export_c, to_c
from unflip.export.plain_c.measure import export_int16
from unflip.export.plain_c.plan import make_plan
from unflip.packing.file import PackedFileError, write

ROOT = Path(__file__).parents[2]
NETWORKS = runpy.run_path(str(Path(__file__).with_name("c_networks.py")))
Net, affine, residual = NETWORKS["Net"], NETWORKS["affine"], NETWORKS["residual"]
integers, vectors = NETWORKS["integers"], NETWORKS["vectors"]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(NETWORKS["networks"](), tmp_path_factory.mktemp("plain_c"))


def test_the_same_bits_as_the_runtime(library: Library) -> None:
    """For floats, for small eighths (numbers equal to thresholds), and for zeros; twice in one arena's place."""
    random = np.random.default_rng(0)
    assert len(library.packed) > 20
    for name, model in library.models.items():
        shape = model.input_shape
        for x in (random.normal(size=shape), random.integers(-16, 17, shape) / 8, np.zeros(shape)):
            assert library.differences(name, x.astype(np.float32)) == 0, name


def test_the_same_bits_for_pixels(library: Library) -> None:
    random = np.random.default_rng(1)
    for name, model in library.models.items():
        channels, height, width = model.input_shape
        pixels = random.integers(0, 256, (height, width, channels), dtype=np.uint8)
        assert library.differences(name, pixels) == 0, name


def test_null_and_unaligned_pointers(library: Library) -> None:
    x, scores = np.zeros(8 * 16 * 16, np.float32), np.zeros(64, np.float32)
    arena = np.zeros(library.files["integers"].arena // 8 + 2)
    run = library.library.integers_run_floats
    good = [x.ctypes.data, scores.ctypes.data, arena.ctypes.data]
    for i in range(3):
        wrong = [None if k == i else p for k, p in enumerate(good)]
        assert run(*map(ctypes.c_void_p, wrong)) == 1
    assert run(*map(ctypes.c_void_p, [*good[:2], good[2] + 4])) == 1
    assert run(*map(ctypes.c_void_p, good)) == 0


def test_whole_numbers_replace_floats() -> None:
    source = to_c(integers(), "net").source
    assert "(uint32_t)(x[i + (j)] - first" in source
    assert source.count("(float)x[") == 1  # only the scores are computed in floats
    plan = make_plan(integers())
    assert [task.value is None for task in plan.tasks] == [True, True, False]


def test_only_needed_kernels(library: Library) -> None:
    source = to_c(vectors(), "net").source
    for name in ("u_map", "u_packed_layer"):
        assert f"static void {name}(" in source
    for name in ("u_prepare", "u_float_conv", "u_pad", "u_exp"):
        assert name not in source


def test_undefined_symbols(library: Library, tmp_path: Path) -> None:
    """Nothing of the C library but memcpy; no memory that can change. No warnings, with optimization too."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    for name in ("floats", "residual", "vectors", "byte_layers"):
        files = to_c(library.packed[name], name)
        (tmp_path / f"{name}.h").write_text(files.header)
        (tmp_path / f"{name}.c").write_text(files.source)
        built = tmp_path / "net.o"
        flags = [*STRICT, "-O2", "-fno-stack-protector", "-ffreestanding", "-fno-pic", "-c"]
        subprocess.run(["cc", *flags, str(tmp_path / f"{name}.c"), "-o", str(built)], check=True)
        symbols = subprocess.run(
            ["nm", str(built)], capture_output=True, text=True, check=True
        ).stdout
        kinds = [line.split()[-2:] for line in symbols.splitlines()]
        assert {symbol for kind, symbol in kinds if kind == "U"} <= {"memcpy"}
        assert not [symbol for kind, symbol in kinds if kind in "bBdDC"]


@pytest.mark.parametrize(
    ("factor", "folded"), [(1e30, False), (0.5, True), (1e-30, False), (0, True)]
)
def test_factors_that_stay_separate(factor: float, folded: bool) -> None:
    """As in the runtime: products that overflow give NaN, and those below the normal floats lose digits."""
    net = Net((4, 1, 1))
    steps = [affine(net, 3)]
    net.conv(net.quantize(0), [3, 4, 1, 1], steps=steps)
    packed = net.packed()
    name = packed.graph["ops"][-1]["scales"]
    small_or_large = factor if factor else 1.0
    packed.tensors[name][:] = small_or_large
    packed.tensors[steps[0]["scale"]][:] = factor
    [task] = [task for task in make_plan(packed).tasks if task.conv is not None]
    assert ("scale" not in task.steps[0]) == folded
    assert task.conv is not None
    expected = small_or_large * factor if folded else small_or_large
    np.testing.assert_allclose(task.conv.scales, expected, rtol=1e-6)


def test_many_ops() -> None:
    """Comparing all pairs of places took more than 40 seconds for 20,000 ops."""
    net = Net((4, 3, 3))
    for _ in range(20_000):
        net.op("upsample", len(net.ops), factor=[1, 1])
    started = time.process_time()
    assert to_c(net.packed(), "net").arena == 2 * 4 * 4 * 3 * 3
    assert time.process_time() - started < 20


def test_many_weights_are_refused() -> None:
    """A network of 34 MB took 3 GB to write."""
    net = Net((8192, 1, 1))
    net.conv(net.quantize(0), [4097, 8192, 1, 1])
    with pytest.raises(
        PackedFileError, match="it has 33,562,624 binary weights; in plain C at most"
    ):
        to_c(net.packed(), "net")
    net.ops.clear()
    net.conv(0, [1025, 8192, 1, 1])  # of floats, so the weights are floats too
    with pytest.raises(
        PackedFileError, match="it has 8,396,800 floats; in plain C at most 8,388,608"
    ):
        to_c(net.packed(), "net")


def test_large_arenas_are_refused() -> None:
    """Places in the arena are of type int."""
    net = Net((64, 600, 512))
    net.conv(net.quantize(0), [1, 64, 1, 1000], padding=[0, 500, 0, 499])
    with pytest.raises(PackedFileError, match=r"needs 2,\d+,\d+,\d+ bytes of memory"):
        to_c(net.packed(), "net")


@pytest.mark.parametrize(("channels", "offset"), [(65_000, -4096.0), (2000, -1.0)])
def test_whole_numbers_are_tried_in_little_memory(channels: int, offset: float) -> None:
    """All sums of the first one were listed before the limit was looked at: 4 GB. Steps did not count: 300 MB."""
    net = Net((channels, 1, 1))
    code = net.quantize(0, scales=[2.0], offset=offset)
    x = net.conv(code, [100, channels, 1, 1], scales=net.keep(np.ones((1, 1), np.float32)))
    levels = {"coding": "levels", "scales": [2.0**p for p in range(8)], "offset": 0.0}
    code = net.op("quantize", x, thresholds=net.tensor(255, 1), strict=[False] * 255, **levels)
    net.conv(code, [8, 100, 1, 1])
    tracemalloc.start()
    try:
        to_c(net.packed(), "net")
        assert tracemalloc.get_traced_memory()[1] < 150 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["", "3d", "a-b", "int", "a b", "a;b", "_x", "é", "x" * 41, "a\n"])
def test_names(name: str, library: Library, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a C identifier"):
        export_c(tmp_path / "none.unflip", tmp_path, name)


def test_text_from_the_file_stays_in_comments(tmp_path: Path) -> None:
    net = Net((4, 1, 1))
    net.op("map", 0, steps=[affine(net, 4)])
    packed = net.packed()
    packed.graph["ops"][0]["name"] = "a */ int stolen; /* ??/\nb"
    packed.graph["labels"] = ["*/ #error", "b\\", "c", "d"]
    files = to_c(packed, "net")
    for text in (files.header, files.source):
        bare = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        assert "stolen" not in bare
        assert "_ _error" not in bare
        assert "\\\n" not in "\n".join(line for line in text.splitlines() if "class" in line)


def test_command(unflip: Any, library: Library, tmp_path: Path) -> None:
    from PIL import Image

    model = tmp_path / "m.unflip"
    write(model, residual())
    images = tmp_path / "images"
    images.mkdir()
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(images / f"{i}.png")
    done = unflip("export", model, "--c", tmp_path / "c", "--name", "tiny", "--check", images)
    assert done.code == 0, done.err
    assert "2 images: the same bits as in the runtime" in done.out
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["tiny.c", "tiny.h"]
    again = unflip("export", model, "--c", tmp_path / "c", "--name", "tiny")
    assert again.code == 1
    assert "exists; choose another --name or folder, or pass --replace" in again.err
    assert unflip("export", model, "--c", tmp_path / "c", "--name", "tiny", "--replace").code == 0
    late = unflip("export", model, "--c", tmp_path / "late", "--check", tmp_path / "typo.png")
    assert "typo.png does not exist; give an image or a folder of images" in late.err
    assert not (tmp_path / "late").exists()
    assert "need --c DIR" in unflip("export", model, "--name", "tiny").err
    assert "give one of them" in unflip("export", model, "--c", tmp_path, "-o", "a.onnx").err


def test_shortcuts_of_16_bits(unflip: Any, library: Library, tmp_path: Path) -> None:
    """Half the memory for shortcuts; scores that are close, with the error stated."""
    from PIL import Image

    model = tmp_path / "m.unflip"
    write(model, residual())
    noise = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "image.png")
    done = unflip(
        "export", model, "--c", tmp_path / "c", "--name", "small", "--int16", tmp_path / "image.png"
    )
    assert done.code == 0, done.err
    stated = re.search(
        "scores differ by at most ([^ ]+) \\(the largest score is ([^)]+)\\)", done.out
    )
    assert stated is not None
    # One bit that flips near its threshold changes a score by twice a weight: the largest error is not small.
    assert 0 < float(stated[1]) < 0.5 * float(stated[2])
    header = (tmp_path / "c" / "small.h").read_text()
    assert stated[0] in header
    arena = int(re.findall("SMALL_ARENA_BYTES (.*)", header)[0])
    assert arena < library.files["residual"].arena - 1.9 * 8 * 16 * 24
    assert "int16_t *out" in (tmp_path / "c" / "small.c").read_text()
    write(model, vectors())
    refused = unflip("export", model, "--c", tmp_path, "--int16", tmp_path / "image.png")
    assert "no value can be stored in 16 bits" in refused.err
    both = unflip("export", model, "--c", tmp_path, "--int16", tmp_path, "--check", tmp_path)
    assert "give one of them" in both.err


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_shortcuts_that_16_bits_cannot_hold(factor: float, tmp_path: Path) -> None:
    """Infinities ended in an OverflowError. With NaN, scores differed "by at most 0"."""
    from PIL import Image

    Image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(tmp_path / "image.png")
    net = Net((3, 6, 6), exact=False)
    ones = {"scales": net.keep(np.ones((1, 3), np.float32))}
    huge = {"scale": net.keep(np.float32([3e38])), "shift": net.keep(np.float32([3e38]))}
    steps = [
        {"step": "affine", **huge},
        {"step": "affine", "scale": net.keep(np.float32([factor]))},
    ]
    x = net.conv(0, [3, 3, 1, 1], floats=True)
    for kept in (steps, [{"step": "add", "value": 3}]):
        net.conv(net.quantize(x), [3, 3, 1, 1], steps=kept, **ones)
        net.tensors[net.ops[-2]["thresholds"]][:] = -99
    net.op("mean", len(net.ops))
    write(tmp_path / "m.unflip", net.packed())
    with pytest.raises(
        PackedFileError, match=r"gives (inf|nan) for an image, which 16 bits cannot"
    ):
        export_int16(tmp_path / "m.unflip", tmp_path, "net", tmp_path / "image.png")


def test_stated_sizes(library: Library) -> None:
    files = library.files["residual"]
    assert f"#define RESIDUAL_ARENA_BYTES {files.arena}" in files.header
    assert f"#define RESIDUAL_FLASH_BYTES {files.flash}" in files.header
    # The stream of 8 x 16 x 24 floats is held once; the second copy that plain additions need would not fit.
    assert 4 * 8 * 16 * 24 < files.arena < 1.6 * 4 * 8 * 16 * 24


@pytest.mark.parametrize("compared", [0, 100])
def test_places_do_not_overlap(compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lifetimes: at no time do two places share a byte, and one place in turn is used again."""
    monkeypatch.setattr("unflip.export.plain_c.arena.MOST_COMPARED", compared)
    random = np.random.default_rng(0)
    for _ in range(200):
        places = []
        for _ in range(12):
            place = Place()
            for first in random.integers(0, 20, random.integers(1, 3)):
                place.hold(
                    int(first), int(first + random.integers(0, 5)), int(random.integers(1, 100))
                )
            places.append(place)
        size = assign(places)
        ends = ends_in_use(places, 26)
        for moment in range(26):
            used = np.zeros(size, int)
            for place in places:
                most = max((s for a, b, s in place.spans if a <= moment <= b), default=0)
                used[place.offset : place.offset + most] += 1
            assert used.max() <= 1
            assert ends[moment] == np.flatnonzero(used).max(initial=-1) + 1
    first, second = Place(), Place()
    first.hold(0, 1, 64)
    second.hold(2, 3, 64)
    assert assign([first, second]) == 64


def test_show_target(unflip: Any, library: Library, tmp_path: Path) -> None:
    """The sizes are those of the written files; the cycles of the layers add up."""
    model = tmp_path / "m.unflip"
    write(model, residual())
    done = unflip("show", model, "--target", "cortex-m4")
    assert done.code == 0, done.err
    total = next(line.split() for line in done.out.splitlines() if line.startswith("total"))
    files = library.files["residual"]
    assert total[1:3] == [f"{files.flash:,}", f"{files.arena:,}"]
    layers = [
        line.split()[-1] for line in done.out.splitlines() if re.match("conv|avg_pool|pad", line)
    ]
    assert sum(int(cycles.replace(",", "")) for cycles in layers) == int(total[3].replace(",", ""))
    assert "cycles are estimates" in done.out
    wrong = unflip("show", model, "--target", "z80")
    assert wrong.code == 1
    assert "--target z80 is not known; the only one is cortex-m4" in wrong.err


STAND_INS = {
    "Arduino.h": "#include <stdint.h>\nstruct S { void begin(long); template <class T> void print(T); "
    "template <class T> void println(T); };\nextern S Serial;\nunsigned long millis(); void delay(long);\n",
    "zephyr/kernel.h": "#include <stdint.h>\nint64_t k_uptime_get(void);\n",
    "zephyr/sys/printk.h": "void printk(const char *, ...);\n",
}


def test_examples_compile(tmp_path: Path) -> None:
    """Those that need other systems, with stand-ins for their headers."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = to_c(residual(), "network")
    (tmp_path / "network.h").write_text(files.header)
    folder = ROOT / "examples" / "plain_c"
    sketch = folder / "arduino" / "examples" / "Classify" / "Classify.ino"
    strict = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{tmp_path}"]
    plus = ["c++", "-std=c++11", "-x", "c++", "-include", "Arduino.h", *strict, str(sketch)]
    subprocess.run(plus, check=True)
    application = folder / "zephyr" / "src" / "main.c"
    subprocess.run(["cc", "-std=c99", *strict, str(application)], check=True)

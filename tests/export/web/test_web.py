"""Networks in WebAssembly: bits and errors of the native runtime, pixels as in Python; the page.

More than 400 lines, because all tests share the modules, the networks and one browser.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL import __version__ as pillow_version

from unflip.export.web import page
from unflip.packing.file import Packed, read, to_bytes, write
from unflip.runtime import load
from unflip.runtime.images import read_image, read_pixels

ROOT = Path(__file__).parents[3]
WEB = ROOT / "src" / "unflip" / "export" / "web"
TRAINED = ROOT / "results" / "cifar10" / "network" / "resnet20-strongest.unflip"
KERNELS = {"relaxed": "relaxed-simd", "simd": "simd128", "scalar": "portable"}
MOST_BYTES = 300_000

Node = Callable[[str, Path], dict[str, Any]]


def test_modules_are_small(modules: Path) -> None:
    for name in page.MODULES:
        assert (modules / f"unflip-{name}.wasm").stat().st_size < MOST_BYTES


@pytest.mark.parametrize("kernels", KERNELS)
def test_same_bits_in_node(
    node: Node, networks: Path, expected: dict[str, list[int]], kernels: str
) -> None:
    found = node(kernels, networks)
    assert len(found) == len(expected) > 20
    for name, bits in expected.items():
        assert found[name] == {"isa": KERNELS[kernels], "bits": bits}, name


MEMORY = """
import { readFileSync } from "node:fs";
import { load } from "LIBRARY/unflip.js";
const modules = { simd: readFileSync("LIBRARY/unflip-simd.wasm") };
const net = await load(readFileSync("FILE"), { kernels: "simd", modules });
console.log(process.memoryUsage().arrayBuffers - net.memory);
"""


def test_inputs_of_many_channels(node: Node, modules: Path, tmp_path: Path) -> None:
    """A table of pixels for each channel, which only images need, was 1 GB for a file of 300 bytes."""
    op = {"op": "mean_abs", "name": "", "inputs": [0], "over": "sample"}
    source = {"shape": [2**20, 1, 1], "preprocess": None}
    file = tmp_path / "wide.unflip"
    write(file, Packed({"input": source, "ops": [op], "output": 1, "labels": None}, {}))
    script = tmp_path / "memory.mjs"
    script.write_text(MEMORY.replace("LIBRARY", str(modules)).replace("FILE", str(file)))
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**24


FLIPPED = """
import { readFileSync } from "node:fs";
import { load } from "LIBRARY/unflip.js";
const modules = { simd: readFileSync("LIBRARY/unflip-simd.wasm") };
const net = await load(new URL("file://FILE"), { kernels: "simd", modules });
const input = new Float32Array(3 * 8 * 8).fill(1);
const scores = [0.5, 0.5, 0].map(async (part) => [...(await net.flipped(part)).run(input).scores]);
console.log(JSON.stringify([...(await Promise.all(scores)), [...net.run(input).scores]]));
"""


def test_flipped_weights_of_a_file(node: Node, modules: Path, tmp_path: Path) -> None:
    """Node reads a file: URL as a Buffer, whose slice() is no copy: every other network had its weights back."""
    linear = {"op": "conv", "name": "", "inputs": [0], "shape": [2, 3, 8, 8], "steps": []}
    window = {"stride": [1, 1], "dilation": [1, 1], "padding": [0] * 4, "groups": 1}
    graph = {
        "input": {"shape": [3, 8, 8], "preprocess": None},
        "ops": [{**linear, **window, "bits": "b", "scales": "s"}],
        "output": 1,
        "labels": None,
    }
    tensors = {"b": np.full(48, 255, np.uint8), "s": np.ones((1, 2), np.float32)}
    write(tmp_path / "net.unflip", Packed(graph, tensors))
    script = tmp_path / "flipped.mjs"
    text = FLIPPED.replace("LIBRARY", str(modules))
    script.write_text(text.replace("FILE", str(tmp_path / "net.unflip")))
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, check=True)
    first, again, none, unchanged = json.loads(done.stdout)
    assert none == unchanged == [192, 192]
    assert first == again != unchanged


TALL = """
import { covering } from "LIBRARY/pictures.js";
const image = { pixels: new Uint8Array(4 * 50_000).fill(9), width: 1, height: 50_000, step: 4 };
console.log(covering(image, 3, 224, 224).every((x) => x === 9));
"""


def test_tall_images_need_little_memory(tmp_path: Path) -> None:
    """Weights for rows that are cropped needed gigabytes."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    shutil.copy(WEB / "pictures.js", tmp_path / "pictures.mjs")
    script = tmp_path / "tall.mjs"
    script.write_text(TALL.replace("LIBRARY/pictures.js", "./pictures.mjs"))
    command = ["node", "--max-old-space-size=300", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "true\n"


def test_same_bits_in_chromium(
    chromium: Any, modules: Path, networks: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    with chromium() as browser:
        browser.open(_library(tmp_path).as_uri())
        for kernels in KERNELS:
            module = (modules / f"unflip-{kernels}.wasm").read_bytes()
            browser.evaluate(f"keep({_text(module)})")
            for name, bits in expected.items():
                file, given = (
                    (networks / f"{name}.{suffix}").read_bytes() for suffix in ("unflip", "input")
                )
                found = browser.evaluate(f"bits('{kernels}', {_text(file)}, {_text(given)})")
                assert found == bits, (kernels, name)
        assert browser.console == []


def _library(folder: Path) -> Path:
    """A page with the library and two functions for the test."""
    parts = [
        re.sub(r"(?m)^import .*\n", "", (WEB / name).read_text())
        for name in ("pictures.js", "unflip.js")
    ]
    parts.append(
        """
        const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        let module;
        globalThis.keep = (text) => void (module = bytes(text));
        globalThis.bits = async (kernels, file, given) => {
          const net = await load(bytes(file), { kernels, modules: { [kernels]: module } });
          const { outputs } = net.run(new Float32Array(bytes(given).buffer));
          return net.outputs.flatMap(({ name }) => [...new Uint32Array(outputs[name].buffer)]);
        };"""
    )
    target = folder / "library.html"
    target.write_text(f"<!doctype html><script type=module>{''.join(parts)}</script>")
    return target


def _text(data: bytes) -> str:
    return json.dumps(base64.b64encode(data).decode())


def test_images_become_the_same_pixels_as_in_python(node: Node, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for i, size in enumerate([(32, 32), (64, 64), (31, 47), (200, 33), (33, 500), (7, 9), (1, 1)]):
        for channels in (1, 3):
            name = f"{i}-{channels}"
            write(tmp_path / f"{name}.unflip", _scores_of(channels, 24, 20))
            rgb = random.integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(rgb).save(tmp_path / f"{name}.png")
            rgba = np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)])
            head = np.array(size, np.uint32).tobytes()
            (tmp_path / f"{name}.rgba").write_bytes(head + rgba.tobytes())
    for name, found in node("scalar", tmp_path).items():
        model = load(tmp_path / f"{name}.unflip")
        pixels = read_pixels(tmp_path / f"{name}.png", model).transpose(2, 0, 1).ravel()
        difference = np.abs(np.array(found["pixels"]) - pixels.astype(int)).max()
        # Older versions of Pillow resize rows and columns in another order.
        assert difference <= (0 if int(pillow_version.partition(".")[0]) >= 13 else 1), name


def _scores_of(channels: int, height: int, width: int, labels: list[str] | None = None) -> Packed:
    """A network of two classes: one linear layer on the channels' means."""
    random = np.random.default_rng(1)
    window = {"stride": [1, 1], "dilation": [1, 1], "padding": [0] * 4, "groups": 1, "steps": []}
    linear = {"op": "conv", "name": "fc", "inputs": [1], "shape": [2, channels, 1, 1], **window}
    graph = {
        "input": {"shape": [channels, height, width], "preprocess": None},
        "ops": [{"op": "mean", "name": "mean", "inputs": [0]}, {**linear, "weight": "w"}],
        "output": 2,
        "labels": labels,
    }
    return Packed(graph, {"w": random.normal(size=(2, channels, 1, 1)).astype(np.float32)})


def test_errors_are_those_of_the_native_runtime(node: Node, tmp_path: Path) -> None:
    good = to_bytes(_scores_of(3, 8, 8))
    files = {
        "empty": b"",
        "zip": b"PK\3\4" + bytes(100),
        "header": good[:8] + b"[" + good[9:],
        "short": good[:-1],
        "bit": good[:-1] + bytes([good[-1] ^ 1]),
        "version": good.replace(b'"version":"1"', b'"version":"9"'),
    }
    for name, data in files.items():
        (tmp_path / f"{name}.unflip").write_bytes(data)
        (tmp_path / f"{name}.input").write_bytes(b"")
    found = node("simd", tmp_path)
    for name in files:
        path = tmp_path / f"{name}.unflip"
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            load(path)
        assert str(caught.value).removeprefix(f"{path}: ") == found[name]["error"], name


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_in_a_browser(chromium: Any, unflip: Any, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert "open it in a browser" in unflip("export", TRAINED, "--html", target).out
    fake = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    with chromium(*fake) as browser:
        browser.resize(390, 844, phone=True)
        browser.open(target.as_uri())
        browser.wait_for("globalThis.unflipPage && document.querySelector('.score')")
        _check_facts(browser)
        _check_samples(browser)
        _check_file(browser, tmp_path)
        _check_drop(browser, tmp_path)
        _check_paste(browser)
        _check_latest_choice(browser)
        _check_slider(browser)
        _check_layers(browser)
        _check_camera(browser)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert browser.console == []
        assert browser.requests == [target.as_uri()]


def _best(browser: Any) -> str:
    return browser.evaluate("document.querySelector('.score').firstChild.textContent")


def _check_facts(browser: Any) -> None:
    facts = browser.evaluate("document.getElementById('facts').textContent")
    assert f"{TRAINED.stat().st_size:,} bytes · 267,264 binary weights · input 3 × 32 × 32" in facts
    browser.wait_for("document.getElementById('time').textContent.includes('ms per image')")
    c = browser.evaluate("document.getElementById('c').textContent")
    assert "Flash: 58,652 bytes" in c
    assert "RAM: an arena of 76,688 bytes" in c


def _check_samples(browser: Any) -> None:
    """The network recognizes each drawing, as the native runtime does."""
    names = browser.evaluate(
        "[...document.querySelectorAll('#samples button')].map((one) => one.title)"
    )
    assert len(names) == 6
    for i, name in enumerate(names):
        browser.evaluate(f"document.querySelectorAll('#samples button')[{i}].click()")
        browser.wait_for(f"document.querySelector('.score').firstChild.textContent === '{name}'")


def _check_file(browser: Any, folder: Path) -> None:
    """An image file gives the same scores as in Python, to the last bit; another file gives a message."""
    file, other = folder / "image.png", folder / "text.txt"
    _save_noise(file, 70)
    browser.give_file("#file", file)
    _check_scores(browser, file, 70)
    other.write_text("no image")
    browser.give_file("#file", other)
    _check_problem(browser)


def _save_noise(file: Path, width: int) -> None:
    random = np.random.default_rng(width)
    Image.fromarray(random.integers(0, 256, (50, width, 3), np.uint8)).save(file)


def _check_scores(browser: Any, file: Path, width: int) -> None:
    """The page has taken this image: its bits are those of Python, and its class is shown."""
    browser.wait_for(f"unflipPage.image.width === {width}")
    found = browser.evaluate("[...unflipPage.net.run(unflipPage.image).scores]")
    model = load(TRAINED)
    expected = model(read_image(file, model))
    assert np.array_equal(np.array(found, np.float32), expected)
    assert model.labels is not None
    assert _best(browser) == model.labels[int(expected.argmax())]


def _check_problem(browser: Any) -> None:
    browser.wait_for("!document.getElementById('problem').hidden")
    assert "not an image" in browser.evaluate("document.getElementById('problem').textContent")


def _check_drop(browser: Any, folder: Path) -> None:
    """The browser's own drag: the page is marked while it lasts, and does not open the file instead."""
    marked = "document.getElementById('input').classList.contains('over')"
    for width in (60, 90):
        file = folder / f"dropped-{width}.png"
        _save_noise(file, width)
        browser.drag("dragEnter", file)
        browser.drag("dragOver", file)
        browser.wait_for(marked)
        browser.drag("drop", file)
        _check_scores(browser, file, width)
        assert not browser.evaluate(marked)
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.drag(kind, folder / "text.txt")
    _check_problem(browser)
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.drag(kind, text="a text")
    assert browser.evaluate("unflipPage.image.width") == 90


def _check_paste(browser: Any) -> None:
    """A picture in the clipboard, and a text, which changes nothing."""
    browser.send("Browser.grantPermissions", permissions=["clipboardSanitizedWrite"])
    browser.send("Page.bringToFront")
    browser.evaluate(
        """(async () => {
          const canvas = new OffscreenCanvas(33, 21);
          const context = canvas.getContext("2d");
          context.fillStyle = "#c04020";
          context.fillRect(0, 0, 33, 21);
          const png = await canvas.convertToBlob({ type: "image/png" });
          await navigator.clipboard.write([new ClipboardItem({ "image/png": png })]);
        })()"""
    )
    browser.paste()
    browser.wait_for("unflipPage.image.width === 33 && unflipPage.image.height === 21")
    assert browser.evaluate("[...unflipPage.image.data.slice(0, 4)]") == [0xC0, 0x40, 0x20, 255]
    assert browser.evaluate("document.getElementById('problem').hidden")
    browser.evaluate("navigator.clipboard.writeText('a text')")
    browser.paste()
    assert browser.evaluate("unflipPage.image.width") == 33


def _check_latest_choice(browser: Any) -> None:
    """An image that takes long to read does not replace a later one, and no camera stays on behind another."""
    width = browser.evaluate(
        """(async () => {
          const blobs = [41, 43].map((width) => {
            const canvas = new OffscreenCanvas(width, 20);
            canvas.getContext("2d").fillRect(0, 0, width, 20);
            return canvas.convertToBlob();
          });
          const [slow, fast] = await Promise.all(blobs);
          const own = createImageBitmap;
          globalThis.createImageBitmap = async (blob) => {
            if (blob === slow) await new Promise((done) => setTimeout(done, 300));
            return own(blob);
          };
          await Promise.all([unflipPage.take(slow), unflipPage.take(fast)]);
          globalThis.createImageBitmap = own;
          return unflipPage.image.width;
        })()"""
    )
    assert width == 43
    live = browser.evaluate(
        """(async () => {
          const devices = navigator.mediaDevices, own = devices.getUserMedia.bind(devices), made = [];
          devices.getUserMedia = async (wish) => (made.push(await own(wish)), made.at(-1));
          await Promise.all([unflipPage.toggleCamera(), unflipPage.toggleCamera()]);
          unflipPage.stopCamera();
          delete devices.getUserMedia;
          return made.flatMap((one) => one.getTracks()).filter((one) => one.readyState === "live").length;
        })()"""
    )
    assert live == 0


def _check_slider(browser: Any) -> None:
    scores = "[...(unflipPage.changed ?? unflipPage.net).run(unflipPage.image).scores]"
    before = browser.evaluate(scores)
    _slide(browser, 100)
    browser.wait_for("unflipPage.changed !== null")
    shown = browser.evaluate("document.getElementById('flipped').textContent")
    assert shown == "50.00 %, about 133,632 weights"
    assert browser.evaluate("document.querySelectorAll('.track b').length") > 0
    assert browser.evaluate(scores) != before
    _slide(browser, 0)
    browser.wait_for("unflipPage.changed === null")
    assert browser.evaluate(scores) == before


def _slide(browser: Any, value: int) -> None:
    browser.evaluate(
        f"(document.getElementById('part').value = {value},"
        " document.getElementById('part').dispatchEvent(new Event('input')), 0)"
    )


def _check_layers(browser: Any) -> None:
    browser.evaluate("document.getElementById('profile').click()")
    browser.wait_for("document.getElementById('total').textContent.includes('ms in all')")
    names = browser.evaluate(
        "[...document.querySelectorAll('#layers tr')].slice(1).map((row) => row.children[1].textContent)"
    )
    assert names == [op["name"] for op in read(TRAINED).graph["ops"]]


def _check_camera(browser: Any) -> None:
    browser.evaluate("document.getElementById('camera').click()")
    browser.wait_for("unflipPage.stream !== null && unflipPage.image.width > 70")
    assert "stop" in browser.evaluate("document.getElementById('camera').textContent")
    browser.evaluate("document.getElementById('camera').click()")
    assert browser.evaluate("unflipPage.stream === null")


# ----------------------------------------------------------------------------------------- without a browser or modules


@pytest.fixture
def any_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "module", lambda name: name.encode())


def test_texts_of_the_file_do_not_end_the_script(any_modules: None, tmp_path: Path) -> None:
    source = tmp_path / "a<script>&.unflip"
    write(source, _scores_of(3, 8, 8, ["</script><b>", "b"]))
    size = page.export_html(source, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert size == len(text.encode())
    assert "<title>a&lt;script&gt;&amp;</title>" in text
    assert text.count("<script") == text.count("</script>") == 2
    [data] = re.findall(r'id="data">(.*)</script>', text)
    assert json.loads(data)["name"] == "a<script>&"


def test_names_of_files_that_are_no_unicode(any_modules: None, tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"caf\xe9.unflip")
    try:
        write(source, _scores_of(3, 8, 8))
    except OSError:
        pytest.skip("this file system has no such names")
    page.export_html(source, tmp_path / "page.html")
    assert "<title>caf?</title>" in (tmp_path / "page.html").read_text()


def test_the_page_contains_no_address(any_modules: None, tmp_path: Path) -> None:
    """Nothing can be fetched: a namespace and the base of a URL are not addresses."""
    page.export_html(TRAINED, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert set(re.findall(r"https?://[\w./]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_a_network_that_c_refuses(any_modules: None, tmp_path: Path) -> None:
    """A binary filter of 3 x 148 x 148 weights is too large."""
    packed = _scores_of(3, 8, 8)
    sign = {
        "op": "quantize",
        "name": "sign",
        "inputs": [0],
        "thresholds": "zero",
        "strict": [False],
    }
    sign |= {"coding": "planes", "scales": [2.0], "offset": -1.0}
    conv = {**packed.graph["ops"][1], "padding": [70] * 4, "shape": [2, 3, 148, 148]}
    del conv["weight"]
    packed.graph["ops"] = [sign, {**conv, "bits": "bits", "scales": "scales"}]
    zeros = {"zero": (1, 1), "scales": (1, 2)}
    packed = Packed(packed.graph, {k: np.zeros(v, np.float32) for k, v in zeros.items()})
    packed.tensors["bits"] = np.zeros(2 * 3 * 148 * 148 // 8, np.uint8)
    source = tmp_path / "a.unflip"
    write(source, packed)
    page.export_html(source, tmp_path / "page.html")
    [data] = re.findall(r'id="data">(.*)</script>', (tmp_path / "page.html").read_text())
    assert "at most 65,000 are supported" in json.loads(data)["c"]["refused"]


def test_refuses_networks_that_do_not_classify_images(any_modules: None, tmp_path: Path) -> None:
    for channels, output, words in [(4, 2, "input 4 × 8 × 8"), (3, 0, "output 3 × 8 × 8")]:
        packed = _scores_of(channels, 8, 8)
        if not output:
            packed = Packed({**packed.graph, "ops": [], "output": 0}, {})
        write(tmp_path / "a.unflip", packed)
        with pytest.raises(ValueError, match=words):
            page.export_html(tmp_path / "a.unflip", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_missing_modules_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(WEB, tmp_path / "web", ignore=shutil.ignore_patterns("*.wasm"))
    monkeypatch.setattr(page.resources, "files", lambda package: tmp_path / "web")
    with pytest.raises(page.ModulesMissing, match="make web"):
        page.module("simd")


def test_options_that_do_not_go_together(unflip: Any) -> None:
    for options, words in [
        (["--html", "a.html", "--c", "folder"], "give one of them"),
        (["--html", "a.html", "--name", "b"], "need --c DIR"),
        (["--html", "a.txt"], "should end in .html"),
    ]:
        assert words in unflip("export", TRAINED, *options).err


def test_types_name_every_member() -> None:
    script, types = ((WEB / name).read_text() for name in ("unflip.js", "unflip.d.ts"))
    exported = re.findall(r"(?m)^export (?:async )?(?:class|function) (\w+)", script)
    members = re.findall(r"(?m)^  (?:get |async )?([a-z]\w*)\(.*\{$", script)
    fields = re.findall(r"(?m)^    this\.(\w+) =", script)
    assert len(exported) == 5
    for name in {*exported, *members, *fields} - {"constructor", "for", "if"}:
        assert re.search(rf"\b{name}\b", types), name

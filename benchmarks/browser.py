"""How fast packed networks run in a browser, beside onnxruntime-web, in one run of headless Chromium.

    make web
    npm install onnxruntime-web
    python benchmarks/browser.py --ort node_modules/onnxruntime-web/dist [--seconds 10] [--json FILE]

The networks are those of benchmarks/inference.py. All engines use one thread and SIMD. In each round every engine runs
for a short while; a ratio is taken within its round, and the table shows the median over the rounds. On a machine with
other work, the ratio of the smallest times is more reliable.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import runpy
import shutil
import statistics
import subprocess
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from inference import build  # type: ignore[import-not-found]
from peers.base import Network  # type: ignore[import-not-found]
from peers.ort import _quantized  # type: ignore[import-not-found]
from unflip import models

ROOT = Path(__file__).parents[1]
WEB = ROOT / "src" / "unflip" / "export" / "web"
CHROMIUM = runpy.run_path(str(ROOT / "tests" / "export" / "web" / "chromium.py"))
OURS = {"unflip": "binary", "unflip, 8-bit ends": "8-bit ends"}
ROUNDS = 10

PAGE = """<!doctype html><script type="module">
import { load } from "./unflip/unflip.js";
import * as ort from "./ort/ort.wasm.min.mjs";
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("./ort/", location.href).href;

const engines = {};
const noise = (i) => (i * 7919) % 251;

globalThis.addOurs = async (name, file, side) => {
  const net = await load(file);
  const data = Uint8ClampedArray.from({ length: 4 * side * side }, (_, i) => noise(i));
  net.run({ data, width: side, height: side });
  engines[name] = { net };
  return net.kernels;
};
globalThis.addOrt = async (name, file, side) => {
  const options = { executionProviders: ["wasm"], graphOptimizationLevel: "all" };
  const session = await ort.InferenceSession.create(file, options);
  const values = Float32Array.from({ length: 3 * side * side }, (_, i) => noise(i) / 64 - 2);
  const input = new ort.Tensor("float32", values, [1, 3, side, side]);
  engines[name] = { run: () => session.run({ input }) };
};
// The median and the smallest of groups of runs that take 20 ms or more: the clock ticks every 0.1 ms.
globalThis.burst = async (name, milliseconds) => {
  const { run, net } = engines[name];
  if (net) {
    const found = net.bench({ seconds: milliseconds / 1000 });
    return [found.median, found.milliseconds];
  }
  const times = [];
  for (const end = performance.now() + milliseconds; times.length === 0 || performance.now() < end; ) {
    let runs = 0;
    const start = performance.now();
    do { await run(); runs++; } while (performance.now() - start < 20);
    times.push((performance.now() - start) / runs);
  }
  times.sort((a, b) => a - b);
  return [times[times.length >> 1], times[0]];
};
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    """Modules need their type; the log would hide the table."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *arguments: object) -> None:
        pass


def site(folder: Path, ort: Path) -> None:
    (folder / "index.html").write_text(PAGE)
    shutil.copytree(ort, folder / "ort", ignore=shutil.ignore_patterns("*.map", "*jsep*", "*jspi*"))
    shutil.copytree(WEB, folder / "unflip")


def networks(name: str, folder: Path) -> tuple[Network, dict[str, Path]]:
    """The packed files, and the float network as ONNX files, in the folder of the site."""
    torch.manual_seed(0)
    network = build(name, folder)
    files = {
        f"onnxruntime-web float, {kind}": network.twin_onnx(kind) for kind in ("same", "plain")
    }
    files["onnxruntime-web int8, plain"] = network.once(
        "plain-int8.onnx", lambda path: _quantized(network, "plain", path)
    )
    return network, files


def race(browser: Any, engines: list[str], seconds: float) -> dict[str, dict[str, float]]:
    medians: dict[str, list[float]] = {name: [] for name in engines}
    smallest = dict.fromkeys(engines, float("inf"))
    for name in engines:  # browsers compile while they run
        browser.evaluate(f"burst({json.dumps(name)}, 500)")
    for number in range(ROUNDS):
        for name in engines if number % 2 == 0 else reversed(engines):
            share = 1000 * seconds / ROUNDS
            median, least = browser.evaluate(f"burst({json.dumps(name)}, {share})")
            medians[name].append(median)
            smallest[name] = min(smallest[name], least)
    ours = engines[1]
    return {
        name: {
            "median_ms": statistics.median(times),
            "min_ms": smallest[name],
            "times_ours": statistics.median(
                a / b for a, b in zip(times, medians[ours], strict=True)
            ),
            "times_ours_by_min": smallest[name] / smallest[ours],
        }
        for name, times in medians.items()
    }


def measure(name: str, folder: Path, address: str, seconds: float) -> dict[str, dict[str, float]]:
    network, files = networks(name, folder)
    side = models.input_shape(name)[1]
    with CHROMIUM["Browser"]() as browser:
        browser.open(address)
        engines = []
        for ours, kind in OURS.items():
            path = json.dumps(_relative(network.packed[kind], folder))
            kernels = browser.evaluate(f"addOurs({json.dumps(ours)}, {path}, {side})")
            engines.append(ours)
        for peer, file in files.items():
            path = json.dumps(_relative(Path(file), folder))
            browser.evaluate(f"addOrt({json.dumps(peer)}, {path}, {side})")
            engines.append(peer)
        print(f"{name}: {kernels}", flush=True)
        return race(browser, engines, seconds)


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)).replace(" ", "%20")


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| network | engine | median ms | min ms | × 8-bit ends | × by the smallest times |",
        "|---|---|---|---|---|---|",
    ]
    for network, rows in results.items():
        lines += [
            f"| {network} | {engine} | {row['median_ms']:.3f} | {row['min_ms']:.3f} | {row['times_ours']:.2f} | "
            f"{row['times_ours_by_min']:.2f} |"
            for engine, row in rows.items()
        ]
    return "\n".join(lines)


def about(ort: Path) -> dict[str, str]:
    program = CHROMIUM["find"]()
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip()
    cpu = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    package = json.loads((ort.parent / "package.json").read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    return {"browser": version, "cpu": cpu, "onnxruntime-web": package["version"], "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ort", type=Path, required=True, help="the folder dist of onnxruntime-web"
    )
    parser.add_argument("--networks", default="resnet18,resnet20")
    parser.add_argument("--seconds", type=float, default=10, help="per engine and network")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        site(folder, chosen.ort)
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/index.html"
        for name in chosen.networks.split(","):
            results[name] = measure(name, folder, address, chosen.seconds)
        server.shutdown()
    print(json.dumps(about(chosen.ort)))
    print(table(results))
    if chosen.json:
        chosen.json.write_text(
            json.dumps({**about(chosen.ort), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

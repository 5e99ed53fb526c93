"""Tries the wheels of ``make wheels`` as a newcomer would have them: without a compiler and without torch.

The wheel for x86-64 is installed into a new environment, with its dependencies, and runs a packed network. The
library of the wheel for aarch64 runs the same network in an emulator, from C; both must give the same numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
NETWORK = ROOT / "src" / "unflip" / "networks" / "resnet20-strongest.unflip"
MOST_MB = 60  # of the base install, as it is downloaded
MOST_OWN_MB = 3  # of the wheel of unflip in it

SCRIPT = """
import importlib.util, sys, numpy as np, unflip
assert importlib.util.find_spec("torch") is None
model = unflip.load(sys.argv[1])
x = np.linspace(-1, 1, int(np.prod(model.input_shape)), dtype=np.float32)
for value in model(x.reshape(model.input_shape)):
    print(f"{value:.4f}")
"""

# The same input and output as in SCRIPT.
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include "unflip.h"
int main(int count, char** words) {
  unflip_model* model = count > 1 ? unflip_load(words[1], 1, NULL) : NULL;
  if (model == NULL) return fprintf(stderr, "%s\\n", unflip_error()), 1;
  int in[3], out[3];
  unflip_input_shape(model, in);
  unflip_output_shape(model, out);
  const int n = in[0] * in[1] * in[2];
  float *x = malloc(n * sizeof *x), *y = malloc(out[0] * sizeof *y);
  for (int i = 0; i < n; i++) x[i] = (float)(i == n - 1 ? 1 : -1 + i * (2.0 / (n - 1)));
  if (unflip_run(model, x, 1, y) != 0) return 1;
  for (int i = 0; i < out[0]; i++) printf("%.4f\\n", y[i]);
  fprintf(stderr, "%s\\n", unflip_isa(model));
  return 0;
}
"""


def main() -> None:
    dist = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    with tempfile.TemporaryDirectory() as folder:
        logits = try_x86_64(only(dist, "x86_64.manylinux"), Path(folder))
        try_aarch64(only(dist, "aarch64.manylinux"), Path(folder), logits)


def only(dist: Path, part: str) -> Path:
    found = [*dist.glob(f"unflip-*{part}*.whl")]
    if len(found) != 1:
        sys.exit(f"try_wheels: {dist} has {len(found)} wheels for {part}; run 'make wheels' first")
    return found[0]


def try_x86_64(wheel: Path, folder: Path) -> str:
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    downloads = folder / "downloads"
    run(python, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "-d", downloads, wheel)
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "-f", downloads, wheel)
    check_sizes(wheel, downloads, folder / "venv")
    # No compiler can be found, and none of the environment's other packages.
    clean = {"PATH": str(python.parent), "HOME": str(folder)}
    page = folder / "page.html"  # needs the WebAssembly modules
    for words in (
        ["--version"],
        ["show", "resnet20-cifar10"],
        ["bench", NETWORK, "--runs", 3],
        ["export", NETWORK, "--html", page],
    ):
        run(python.parent / "unflip", *words, env=clean)
    logits = run(python, "-c", SCRIPT, NETWORK, env=clean)
    print("x86-64: installed and run without a compiler and without torch")
    return logits


def check_sizes(wheel: Path, downloads: Path, venv: Path) -> None:
    """Print the sizes of the base install; those of the downloads are limited."""
    [packages] = (venv / "lib").glob("python*/site-packages")
    files = [path.relative_to(packages) for path in packages.rglob("*") if path.is_file()]
    others = ("pip", "setuptools", "pkg_resources")  # of every new environment
    kept = [path for path in files if path.parts[0] not in others]
    plain = [path for path in kept if "__pycache__" not in path.parts]
    download, own = megabytes(downloads.iterdir()), megabytes([wheel])
    unpacked, compiled = (megabytes(packages / path for path in paths) for paths in (plain, kept))
    print(
        f"the base install downloads {download:.1f} MB (allowed: {MOST_MB}), of which unflip has {own:.1f} MB "
        f"(allowed: {MOST_OWN_MB}). It takes {unpacked:.0f} MB on the disk, {compiled:.0f} MB with compiled files."
    )
    if download > MOST_MB or own > MOST_OWN_MB:
        sys.exit("try_wheels: the base install is too large")


def megabytes(paths: Iterable[Path]) -> float:
    return sum(path.stat().st_size for path in paths) / 1e6


def try_aarch64(wheel: Path, folder: Path, expected: str) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if not (emulator and compiler):
        print("aarch64: not run, because qemu-aarch64 or aarch64-linux-gnu-gcc is missing")
        return
    zipfile.ZipFile(wheel).extractall(folder / "aarch64")
    library = folder / "aarch64" / "unflip" / "runtime"
    (folder / "program.c").write_text(PROGRAM)
    places = (f"-I{library}", f"-L{library}", "-lunflip", f"-Wl,-rpath,{library}", "-lm")
    run(compiler, folder / "program.c", "-O1", *places, "-o", folder / "program")
    found = run(emulator, "-L", "/usr/aarch64-linux-gnu", folder / "program", NETWORK)
    if found != expected:
        sys.exit(f"try_wheels: logits differ. x86-64:\n{expected}aarch64:\n{found}")
    print("aarch64: its library gives the same logits in an emulator")


def run(*words: object, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        check=False,
        env=env or dict(os.environ),
        cwd="/",
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\ntry_wheels: failed: {' '.join(map(str, words))}")
    return done.stdout


if __name__ == "__main__":
    main()

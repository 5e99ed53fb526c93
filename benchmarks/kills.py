"""Kill commands at random moments with SIGKILL, start them again, and compare the end with that of an undisturbed run.

    python benchmarks/kills.py [--kills 1000] [--only train study pack data] [--seed 0] [--log FILE]

train   a digit network on the CPU; the same command resumes it
study   a baseline and its fine-tuning in a pool of two processes; the same command resumes it
pack    a trained network into one file; starts again
data    600 images into a pack, resized; the same command resumes it

Each is killed --kills / 4 times, at a moment drawn between its start and its usual end, at most ten times in one
folder. In half of the cases all its processes are killed, as when a machine stops; in the other half only the main one,
whose workers must then end by themselves. Every file of the end must have the same bytes as without kills: weights,
tables, figures, packs. JSON files are compared without times, and logs not at all: they show the progress of slow
epochs. A command must never fail after a kill, and a file that it writes in the end must not exist in part before.

A thousand kills take about two hours on two cores.

Exits with 1 at the first difference, and leaves the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = 10  # kills in one folder
TIMES = ("seconds", "finished")  # fields of JSON files
# One thread: sums in another order would round otherwise.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
STUDY = "compare digits-dorefa digits-finetune --seeds 1 --epochs-scale 0.04"


@dataclass(frozen=True)
class Case:
    """``command``: arguments of unflip that write into a folder. ``last``: files that must never exist in part."""

    command: Callable[[Path], list[str]]
    last: tuple[str, ...] = ()


def cases(inputs: Path) -> dict[str, Case]:
    def train(out: Path) -> list[str]:
        return ["train", "digits-dorefa", "epochs=4", "--device", "cpu", "--out", str(out)]

    def study(out: Path) -> list[str]:
        return ["study", *STUDY.split(), "--engine", "pool", "--workers", "2", "--out", str(out)]

    def pack(out: Path) -> list[str]:
        return ["pack", str(inputs / "run"), "--out", str(out / "digits.unflip")]

    def data(out: Path) -> list[str]:
        options = ["--size", "96", "--workers", "2"]
        return ["data", "pack", str(inputs / "images"), str(out / "small.pack"), *options]

    return {
        "train": Case(train),
        "study": Case(study),
        "pack": Case(pack, ("digits.unflip",)),
        "data": Case(data, ("small.pack.index",)),
    }


def make_inputs(folder: Path) -> None:
    """Random JPEG files in class folders, and a trained network."""
    import numpy as np
    from PIL import Image

    random_numbers = np.random.default_rng(0)
    for number in range(600):
        part = "val" if number % 6 == 0 else "train"
        path = folder / "images" / part / f"class-{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        blobs = random_numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(blobs).resize((640, 480)).save(path, quality=92)
    run(["train", "digits-dorefa", "epochs=1", "--device", "cpu", "--out", str(folder / "run")])


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "unflip", *arguments],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(arguments: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "unflip", *arguments], env=ENVIRONMENT, check=True, stdout=-3
    )


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def content(path: Path) -> str:
    """A hash of a file, without times."""
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        texts = [data.decode()] if path.suffix == ".json" else data.decode().splitlines()
        data = json.dumps([without_times(json.loads(text)) for text in texts]).encode()
    return hashlib.sha256(data).hexdigest()


def compared(path: Path) -> bool:
    """Not locks, logs of progress, or checkpoints before the last one of a run: one is saved where a run stops."""
    if path.name.startswith("checkpoint-"):
        return path.stem == max(p.stem for p in path.parent.glob("checkpoint-*"))
    return path.is_file() and path.name != ".lock" and path.suffix != ".log"


def contents(folder: Path) -> dict[str, str]:
    """Of all files that are compared, by name."""
    files = sorted(filter(compared, folder.rglob("*")))
    return {str(path.relative_to(folder)): content(path) for path in files}


class Campaign:
    def __init__(self, case: Case, work: Path, generator: random.Random) -> None:
        self.case, self.work, self.random = case, work, generator
        self.kills = self.ends = 0
        self.expected, self.seconds = self._undisturbed()
        again, _ = self._undisturbed()
        self._compare(again, "a second undisturbed run")

    def _new_folder(self) -> Path:
        """Always the same one, because a study writes its name into files."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return out

    def _undisturbed(self) -> tuple[dict[str, str], float]:
        out = self._new_folder()
        began = time.monotonic()
        run(self.case.command(out))
        return contents(out), time.monotonic() - began

    def until_the_end(self, most: int) -> None:
        """Start, kill and start again in one folder until the command ends by itself or ``most`` kills are done."""
        out, log = self._new_folder(), self.work / "killed.log"
        log.unlink(missing_ok=True)
        for _ in range(most):
            process = start(self.case.command(out), log)
            try:
                status = process.wait(self.random.uniform(0, self.seconds))
            except subprocess.TimeoutExpired:
                self._kill(process)
                self._check_last(out)
                continue
            if status:
                raise SystemExit(f"the command failed with {status} after a kill: see {log}")
            break
        else:
            run(self.case.command(out))
        self.ends += 1
        self._compare(contents(out), f"the end after kills in {out}")

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if self.random.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        self.kills += 1

    def _check_last(self, out: Path) -> None:
        for name in self.case.last:
            path = out / name
            if path.exists() and content(path) != self.expected[name]:
                raise SystemExit(f"{path} exists, but is not what the command writes in the end")

    def _compare(self, found: dict[str, str], what: str) -> None:
        for name in sorted(found.keys() | self.expected.keys()):
            if found.get(name) != self.expected.get(name):
                raise SystemExit(f"{what}: {name} differs from that of an undisturbed run")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=("train", "study", "pack", "data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="also write the lines here")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="unflip-kills-"))
    make_inputs(work / "inputs")
    chosen = {k: v for k, v in cases(work / "inputs").items() if k in (options.only or [k])}
    lines = []
    for name, case in chosen.items():
        began = time.monotonic()
        campaign = Campaign(case, work / name, random.Random(f"{options.seed} {name}"))
        wanted = options.kills // len(chosen)
        while campaign.kills < wanted:
            campaign.until_the_end(min(MOST, wanted - campaign.kills))
            print(f"\r{name}: {campaign.kills} kills", end="", flush=True)
        took = time.monotonic() - began
        line = f"{name}: {campaign.kills} kills, {campaign.ends} ends, all as without kills; {took:.0f} s"
        lines.append(line)
        print(f"\r{line}", flush=True)
        if options.log:
            options.log.write_text("\n".join(lines) + "\n")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

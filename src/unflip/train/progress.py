"""What a person sees while training: a bar in a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import statistics
import sys
import time
from types import TracebackType
from typing import Any

from unflip.printable import printable

EPOCH_SECONDS = 5.0  # between the lines of epochs
STEP_SECONDS = 30.0  # without a line: then an epoch is so long that its steps are shown


class Progress:
    """Epoch, loss, accuracy, flip rate and time left, for one seed or several."""

    def __init__(self, name: str, epochs: int, seeds: list[int], mode: str, quiet: bool) -> None:
        self.name, self.epochs, self.quiet = printable(name), epochs, quiet
        self.began = self.printed = self.printed_epoch = time.monotonic()
        self.first_epoch: int | None = None
        self.accuracy: float | None = None  # the last one measured
        self.top5: float | None = None
        self.bar: Any = None
        self.task: Any = None
        if quiet:
            return
        print(
            f"{self.name}: {epochs} epoch{'s' * (epochs > 1)}, {_plural(seeds)}, {mode}", flush=True
        )
        if sys.stdout.isatty():
            self._make_bar()

    def _make_bar(self) -> None:
        try:
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        text = TextColumn("{task.description}", markup=False)  # a recipe's name may be [x]
        columns = (text, BarColumn(), TimeRemainingColumn())
        self.bar = Bar(*columns, transient=True)
        self.task = self.bar.add_task(self.name, total=float(self.epochs))

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()

    def step(self, epoch: int, step: int, steps: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=epoch + step / steps)
        elif not self.quiet and time.monotonic() - self.printed > STEP_SECONDS:
            self.printed = time.monotonic()
            print(f"{self.name}  epoch {epoch + 1}/{self.epochs}  step {step}/{steps}", flush=True)

    def epoch(self, epoch: int, lines: list[dict[str, Any]]) -> None:
        if self.quiet:
            return
        if self.first_epoch is None:
            self.first_epoch = epoch
        text = f"{self.name}  epoch {epoch + 1}/{self.epochs}  {self._figures(lines)}"
        if self.bar:
            self.bar.update(self.task, completed=epoch + 1, description=text)
            return
        now = time.monotonic()
        last = epoch + 1 == self.epochs
        if last or now - self.printed_epoch > EPOCH_SECONDS or epoch == self.first_epoch:
            self.printed = self.printed_epoch = now
            done = epoch + 1 - self.first_epoch
            left = (now - self.began) / done * (self.epochs - epoch - 1)
            print(f"{text}  {lines[0]['seconds']:.2f} s/epoch  {_duration(left)} left", flush=True)

    def _figures(self, lines: list[dict[str, Any]]) -> str:
        def mean(key: str) -> float:
            return statistics.fmean(line[key] for line in lines)

        if lines[0]["accuracy"] is not None:
            self.accuracy = mean("accuracy")
            self.top5 = None if lines[0]["top5"] is None else mean("top5")
        text = f"loss {mean('loss'):.4f}"
        if self.accuracy is not None:
            text += f"  accuracy {self.accuracy:.2f} %"
        if self.top5 is not None:
            text += f"  top-5 {self.top5:.2f} %"
        if "flip_rate" in lines[0]:
            text += f"  flips {mean('flip_rate'):.3%}"
        return text


def _plural(seeds: list[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def _duration(seconds: float) -> str:
    """In the unit that a person would use."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.{1 if seconds < 10 * unit else 0}f} {name}"
    return f"{seconds:.0f} s"

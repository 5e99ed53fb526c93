"""A run on disk: the one class that reads and writes its files.

A run lives in a folder ``OUT/seed-N``:

    recipe.json       the recipe with every default filled in, the seed, the command that repeats it, and its inputs
                      (shape, class names, normalization): all that is needed to rebuild the network
    provenance.json   fingerprints of images, start, teacher and code (provenance.py)
    metrics.jsonl     one line per epoch
    checkpoint-*      the last two checkpoints (checkpoint.py)
    result.json       written last: the run is finished
    stopped.json      the reason why training gave up, if it did
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unflip.data.spec import InputSpec
from unflip.disk import try_lock
from unflip.printable import printable
from unflip.runs import checkpoint as checkpoints
from unflip.runs.checkpoint import Checkpoint
from unflip.runs.files import (
    DamagedFile,
    RunError,
    append_line,
    read_json,
    read_metrics,
    whole_metrics,
    write_atomically,
    write_json,
)

SEED_FOLDER = re.compile(r"seed-(\d+)")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. ``accuracy`` and ``top5`` are those of the last epoch; None for a run that stopped. With
    fewer than ten classes, ``top5`` is None."""

    seed: int
    accuracy: float | None = None
    best_accuracy: float | None = None
    epochs: int = 0
    seconds: float = 0.0
    stopped: str | None = None
    top5: float | None = None


@dataclass(frozen=True)
class Run:
    """One seed's run. Nothing is read before it is asked for, and nothing is kept: the files are the state."""

    folder: Path

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "folder", Path(folder))

    # ------------------------------------------------------------------------------------------ where runs are

    @classmethod
    def of_seed(cls, out: str | os.PathLike[str], seed: int) -> Run:
        """The run of a seed below a recipe's folder."""
        return cls(Path(out) / f"seed-{seed}")

    @classmethod
    def find(cls, folder: str | os.PathLike[str], seed: int = 0) -> Run:
        """The run of a seed below ``folder``; or of ``folder`` itself, if that is one seed's."""
        inside = cls.of_seed(folder, seed)
        return inside if inside.folder.is_dir() else cls(folder)

    @classmethod
    def only_one(cls, folder: str | os.PathLike[str]) -> Run:
        """The run that ``folder`` means: its own, or that of its only seed."""
        runs = cls.seeds_of(folder)
        if not runs:
            raise ValueError(
                f"{folder} is not a run: it has neither a recipe.json nor seed-N folders. 'unflip runs' lists runs"
            )
        if len(runs) > 1:
            names = ", ".join(run.folder.name for run in runs)
            raise ValueError(f"{folder} has several seeds ({names}): name one, such as {runs[0]}")
        return runs[0]

    @classmethod
    def seeds_of(cls, folder: str | os.PathLike[str]) -> list[Run]:
        """The runs in the seed-N folders of ``folder``, by seed; or ``folder`` itself, if it is one seed's."""
        root = cls(folder)
        if root.exists:
            return [root]
        if not root.folder.is_dir():
            return []
        numbered = ((SEED_FOLDER.fullmatch(path.name), cls(path)) for path in root.folder.iterdir())
        found = [(int(match[1]), run) for match, run in numbered if match]
        return [run for _, run in sorted(found, key=lambda pair: pair[0]) if run.is_run()]

    @classmethod
    def below(cls, root: str | os.PathLike[str]) -> list[Run]:
        """Every run below ``root``, sorted by path. Files of the same name that are not a run's are passed over."""
        runs = [cls(path.parent) for path in sorted(Path(root).rglob("recipe.json"))]
        return [run for run in runs if run._looks_like_a_run()]

    def __str__(self) -> str:
        return str(self.folder)

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def exists(self) -> bool:
        return self._path("recipe.json").is_file()

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as JSON values, every default filled in."""
        recipe = self._about("recipe")
        if not isinstance(recipe, dict):
            raise DamagedFile(self._path("recipe.json"), f"its recipe is {recipe!r}, not an object")
        try:
            _ = recipe["name"], recipe["epochs"], recipe["data"]["name"], recipe["method"]
        except (KeyError, TypeError) as error:
            raise DamagedFile(
                self._path("recipe.json"), f"its recipe lacks or misstates {error}"
            ) from None
        return recipe

    @property
    def seed(self) -> int:
        """Refused if the folder is another seed's: a run that was copied there would count twice."""
        seed = self._about("seed")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise DamagedFile(
                self._path("recipe.json"), f"its seed is {seed!r}, not a whole number"
            )
        self.refuse_other_seed()
        return seed

    @property
    def command(self) -> str:
        """The command that repeats the run; see ``recipes.command.with_seeds`` for several seeds."""
        return str(self._about("command"))

    @property
    def inputs(self) -> InputSpec:
        """Shape, class names and normalization of the images: what building and packing the network need."""
        try:
            return InputSpec.from_plain(self._about("input"))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(self._path("recipe.json"), f"its input: {error}") from None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One object per epoch; empty where only the result was kept."""
        return read_metrics(self._path("metrics.jsonl"))

    @property
    def finished(self) -> bool:
        return self._path("result.json").exists()

    @property
    def result(self) -> dict[str, Any] | None:
        """None while the run is not finished."""
        if not self.finished:
            return None
        return read_json(self._path("result.json"), "accuracy", "epochs", "seconds")

    @property
    def stopped(self) -> str | None:
        """Why training gave up; None if it did not, or if the run was finished later."""
        note = self._path("stopped.json")
        if self.finished or not note.exists():
            return None
        return str(read_json(note, "reason")["reason"])

    @property
    def checkpoints(self) -> list[tuple[int, int]]:
        """(epoch, step) of each checkpoint, oldest first."""
        return checkpoints.available(self.folder)

    @property
    def state(self) -> str:
        """finished, stopped, running, interrupted or damaged."""
        try:
            _ = self.recipe, self.seed
            if self.result:
                return "finished"
            if self.stopped is not None:
                return "stopped"
        except ValueError:
            return "damaged"
        return "running" if self._locked() else "interrupted"

    @property
    def position(self) -> tuple[int, float | None]:
        """Epochs done and the accuracy measured last, from whatever can be read."""
        lines, _ = whole_metrics(self._path("metrics.jsonl"))
        measured = [line["accuracy"] for line in lines if line["accuracy"] is not None]
        epoch, accuracy = (lines[-1]["epoch"] if lines else 0), (measured[-1] if measured else None)
        try:
            result = self.result
        except ValueError:
            result = None
        return (result["epochs"], result["accuracy"]) if result else (epoch, accuracy)

    @property
    def outcome(self) -> Outcome | None:
        """None while the run is neither finished nor stopped."""
        reason, result = self.stopped, self.result
        if reason is None and result is None:
            return None
        seed, lines = self.seed, self.metrics
        best = max((m["accuracy"] for m in lines if m["accuracy"] is not None), default=None)
        if result is None:
            seconds = round(sum(m["seconds"] for m in lines), 2)
            return Outcome(seed, None, best, len(lines), seconds, reason)
        last = float(result["accuracy"])
        best = last if best is None else max(best, last)
        rest = result["epochs"], result["seconds"]
        return Outcome(seed, last, best, *rest, top5=result.get("top5"))

    def load_checkpoint(self) -> Checkpoint:
        """The newest undamaged checkpoint; see ``checkpoint.load_usable``."""
        return checkpoints.load_usable(self.folder)

    def difference(self, recipe: Mapping[str, Any]) -> list[str]:
        """How the run's recipe differs from this one, both as JSON values; empty where there is no run."""
        if not self.exists:
            self.is_run()
            return []
        return differences(self.recipe, recipe)

    def refuse_other_recipe(self, recipe: Mapping[str, Any]) -> None:
        differs = self.difference(recipe)
        if differs:
            raise RunError(
                f"{self} holds a run of another recipe: {'; '.join(differs)}. "
                "Choose another --out, or delete that folder."
            )

    def refuse_other_seed(self) -> None:
        """The folder's name and the seed in the files must agree."""
        named = SEED_FOLDER.fullmatch(self.folder.name)
        for path in (self._path("recipe.json"), self._path("result.json")) if named else ():
            seed = read_json(path).get("seed") if path.exists() else None
            if seed is not None and named and seed != int(named[1]):
                raise ValueError(
                    f"{path} is of seed {seed}, but the folder is for seed {named[1]}: it was copied or renamed. "
                    f"Delete {self} and run the same command again"
                )

    # ------------------------------------------------------------------------------------------------- writing

    def begin(self, recipe: Mapping[str, Any], seed: int, command: str, inputs: InputSpec) -> None:
        about = {"recipe": recipe, "seed": seed, "command": command, "input": inputs.plain()}
        write_json(self._path("recipe.json"), about)

    def add_metrics(self, line: dict[str, Any]) -> None:
        append_line(self._path("metrics.jsonl"), line)

    def sync_metrics(self) -> None:
        """Flush to disk: a checkpoint that survives a power cut must find the lines of the epochs before it."""
        with open(self._path("metrics.jsonl")) as file:
            os.fsync(file.fileno())

    def cut_metrics(self, epochs: int) -> tuple[list[dict[str, Any]], list[int]]:
        """Keep the readable lines of the first ``epochs`` epochs; returns them, and the epochs without a line.

        Lines of later epochs are about to be written again. A damaged line is no reason to refuse: the weights are
        undamaged, and a run that was killed should resume.
        """
        lines, _ = whole_metrics(self._path("metrics.jsonl"))
        kept = {line["epoch"]: line for line in lines if line["epoch"] <= epochs}
        text = "".join(json.dumps(line) + "\n" for line in kept.values())
        write_atomically(self._path("metrics.jsonl"), text.encode())
        return list(kept.values()), [e for e in range(1, epochs + 1) if e not in kept]

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        checkpoints.save(self.folder, checkpoint)

    def finish(self, result: Mapping[str, Any]) -> None:
        write_json(self._path("result.json"), result)

    def stop(self, reason: str) -> None:
        """Keep the reason, so that a study that resumes does not run into it again."""
        write_json(self._path("stopped.json"), {"reason": reason})

    # ------------------------------------------------------------------------------------------------ details

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _about(self, key: str) -> Any:
        path = self._path("recipe.json")
        if not path.is_file():
            raise ValueError(
                f"{self} is not a run: it has no recipe.json. 'unflip runs' lists runs"
            )
        return read_json(path, key)[key]

    def is_run(self) -> bool:
        """False for an empty folder. A result without its recipe is an error: a mean would silently miss a seed."""
        if not self.exists and self.finished:
            raise ValueError(
                f"{self} has a result.json but no recipe.json, so its recipe is unknown. "
                "Restore recipe.json, or delete the folder to do without that seed"
            )
        return self.exists

    def _looks_like_a_run(self) -> bool:
        """Also if its recipe.json is damaged: one damaged run must not be hidden."""
        try:
            return bool(self.recipe)
        except ValueError:
            numbered = SEED_FOLDER.fullmatch(self.folder.name)
            return bool(numbered) and self._path("metrics.jsonl").exists()

    def _locked(self) -> bool:
        path = self._path(".lock")
        if not path.exists():
            return False
        with open(path) as file:
            return not try_lock(file)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key in ("about", "expected"):  # they do not change how a network is trained
            continue
        a, b, here = old.get(key), new.get(key), f"{path}{printable(key)}"
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{here}.")
        elif a != b:
            lines.append(f"{here} is {a!r} there and {b!r} here")
    return lines

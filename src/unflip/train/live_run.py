"""One seed of a run: its folder, its learner, and what is written of each epoch."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unflip import __version__
from unflip.freeze import pack_signs, unpack_signs
from unflip.layers import state_restored
from unflip.runs import checkpoint as checkpoints
from unflip.runs.checkpoint import Checkpoint, CheckpointError
from unflip.runs.files import read_metrics, whole_metrics
from unflip.train import distributed
from unflip.train.flips import Moved
from unflip.train.health import TrainingStopped, Watch
from unflip.train.learner import Learner
from unflip.train.recipe import Recipe


class Seed:
    """One seed of the recipe: its folder, its learner, and what was seen at the epoch's start."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        folder: Path,
        learner: Learner,
        classes: int,
    ) -> None:
        self.recipe, self.seed, self.folder, self.learner = recipe, seed, folder, learner
        self.watch = Watch(recipe, classes)
        self.board: Any = None
        self.moved = Moved(learner.model)
        self.metrics = folder / "metrics.jsonl"
        self.seconds_before = 0.0  # of the epochs before this process went on

    def checkpoint(self, epoch: int, step: int) -> Checkpoint:
        tensors = self.learner.state()
        for name, values in self.moved.signs.items():
            tensors[f"signs.{name}"] = pack_signs(values)
        for name, values in self.moved.latent.items():
            tensors[f"latent.{name}"] = values
        info = {"recipe": self.recipe.plain(), "seed": self.seed, "epoch": epoch, "step": step}
        return Checkpoint(epoch, step, tensors, info)

    def restore(self, saved: Checkpoint) -> None:
        parts: dict[str, dict[str, Tensor]] = {"signs": {}, "latent": {}, "": {}}
        for name, tensor in saved.tensors.items():
            part, _, rest = name.partition(".")
            if part in ("signs", "latent"):
                parts[part][rest] = tensor
            else:
                parts[""][name] = tensor
        self.learner.restore(parts[""])
        state_restored(self.learner.model)  # a run begins with a checkpoint, after its warm start
        for name, now in self.moved.signs.items():
            packed = parts["signs"][name].to(now.device)
            now.copy_(unpack_signs(packed, tuple(now.shape), now.dtype))
        for name, latent in self.moved.latent.items():
            latent.copy_(parts["latent"][name])

    def cut_metrics(self, epochs: int) -> list[int]:
        """Drop lines of epochs that are about to be run again, and those that are damaged; which of the epochs before
        have none. Not refused: the weights are whole, and a run that was killed is to go on."""
        whole, _ = whole_metrics(self.metrics)
        kept = {line["epoch"]: line for line in whole if line["epoch"] <= epochs}
        text = "".join(json.dumps(line) + "\n" for line in kept.values())
        checkpoints.write_atomically(self.metrics, text.encode())
        if epochs:  # where no line is left, what the loss began with is known to no one
            self.watch.start_loss = next((line["loss"] for line in kept.values()), math.inf)
        self.seconds_before = sum(line["seconds"] for line in kept.values())
        return [epoch for epoch in range(1, epochs + 1) if epoch not in kept]

    def keep_metrics(self) -> None:
        """A checkpoint that outlives a power cut is to find the lines of the epochs before it."""
        with open(self.metrics) as file:
            os.fsync(file.fileno())

    def last_line(self) -> dict[str, Any]:
        """Of the run's last epoch, whose figures are its result."""
        for line in read_metrics(self.metrics):
            if line["epoch"] == self.recipe.epochs:
                return line
        raise CheckpointError(
            f"{self.metrics} has no line of epoch {self.recipe.epochs}, whose accuracy is the run's result. Delete the "
            "last checkpoint in that folder: the run goes on from the one before."
        )

    def end_epoch(self, epoch: int, seconds: float, evaluate: bool = True) -> dict[str, Any]:
        """Look at the epoch, write its line, and stop the run if it has gone wrong."""
        figures = self._figures(epoch, evaluate)
        moved = self.moved.since_the_start()
        if moved is not None:
            figures |= {
                "flips": moved.flips,
                "flip_rate": moved.flips / moved.weights,
                "differs_from_sign": moved.off_sign / moved.weights,
                "latent_change": moved.latent_change,
            }
        line = {"epoch": epoch + 1, **figures, "seconds": round(seconds, 4)}
        if distributed.rank() == 0:
            _append(self.metrics, line)
            self._to_tensorboard(line)
        moves = None if moved is None else moved.latent_change != 0
        problem = self.watch.problem(epoch, line["loss"], line.get("flip_rate"), moves)
        # Rank 0 decides: it alone knows how the epoch began, if that was before a restart.
        problem = distributed.from_rank_0(problem)
        if problem:
            raise TrainingStopped(problem)
        return line

    def open_tensorboard(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard needs the tensorboard package: pip install 'unflip[tensorboard]'"
            ) from None
        self.board = SummaryWriter(str(self.folder))

    def _to_tensorboard(self, line: dict[str, Any]) -> None:
        if self.board is None:
            return
        for key, value in line.items():
            if key == "auxiliary_loss":
                for layer, loss in value.items():
                    self.board.add_scalar(f"auxiliary_loss/{layer}", loss, line["epoch"])
            elif key != "epoch" and value is not None:
                self.board.add_scalar(key, value, line["epoch"])
        self.board.flush()

    def _figures(self, epoch: int, evaluate: bool) -> dict[str, Any]:
        learner = self.learner
        last = epoch + 1 == self.recipe.epochs
        return {
            "loss": distributed.average(learner.loss_sum).item() / learner.steps,
            "auxiliary_loss": dict(
                zip(
                    learner.auxiliary_layers,
                    (learner.auxiliary_sum / learner.steps).tolist(),
                    strict=True,
                )
            ),
            "accuracy": learner.evaluate(exact=last) if evaluate else None,
            "lr": float(learner.optimizers[0].param_groups[-1]["lr"]),
        }

    def finish(self, last: dict[str, Any], seconds: float) -> dict[str, Any]:
        result = {
            "recipe": self.recipe.name,
            "seed": self.seed,
            "epochs": self.recipe.epochs,
            "accuracy": last["accuracy"],
            "loss": last["loss"],
            "evaluated_on": "validation" if self.recipe.data.validation else "test",
            "seconds": round(self.seconds_before + seconds, 2),
            "device": _device_name(self.learner.device),
            "torch": torch.__version__,
            "unflip": __version__,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        data = json.dumps(result, indent=1).encode() + b"\n"
        if distributed.rank() == 0:
            checkpoints.write_atomically(self.folder / "result.json", data)
        return result


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def _finite(value: Any) -> Any:
    """JSON knows no NaN: what is not a number is null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

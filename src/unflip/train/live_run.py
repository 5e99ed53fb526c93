"""A run while it is trained: its files and its learner."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from unflip.freeze import pack_signs, unpack_signs
from unflip.layers import state_restored
from unflip.recipes.command import train_command
from unflip.runs import checkpoint as checkpoints
from unflip.runs.checkpoint import Checkpoint
from unflip.runs.files import RunError
from unflip.runs.provenance import unflip_version
from unflip.runs.run import differences
from unflip.train import distributed
from unflip.train.flips import Flips
from unflip.train.health import Health, TrainingStopped
from unflip.train.job import Job
from unflip.train.learner import Accuracy, Learner

Position = tuple[int, int]  # epoch and step of a checkpoint


class LiveRun:
    """Writes a line per epoch, checkpoints and the result; looks at the health of each epoch."""

    def __init__(self, job: Job, learner: Learner) -> None:
        self.recipe, self.seed, self.run, self.learner = job.recipe, job.seed, job.run, learner
        self.command = train_command(job.recipe, job.start, job.teacher)
        self.health = Health(job.recipe, len(learner.source.spec.classes))
        self.version = unflip_version()  # now: the checkout may change while the run is trained
        self.board: Any = None
        self.flips = Flips(learner.model)
        self.seconds_before = 0.0  # of epochs that an earlier process trained

    # ------------------------------------------------------------------------------ beginning and resuming

    def resume(self, at: Position | None) -> list[int]:
        """Bring learner and files to a checkpoint; returns the epochs whose metrics were lost.

        A new run (``at`` None) begins with a checkpoint: a preparation is not repeated, and a disk that cannot be
        written is found before training, not after it.
        """
        saved = checkpoints.load_at(self.run.folder, *at) if at else None
        if saved is not None:
            self._refuse_other_recipe(saved)
        spec = self.learner.source.spec
        self.run.begin(self.recipe.plain(), self.seed, self.command, spec)
        checkpoints.drop_after(self.run.folder, at)
        epochs = at[0] if at else 0
        kept, lost = self.run.cut_metrics(epochs)
        if epochs:  # without any line, nobody knows the loss of the first epoch
            self.health.start_loss = kept[0]["loss"] if kept else math.inf
        self.seconds_before = sum(line["seconds"] for line in kept)
        if saved is None:
            self.run.save_checkpoint(self.checkpoint(0, 0))
        else:
            self.restore(saved)
        return lost

    def _refuse_other_recipe(self, saved: Checkpoint) -> None:
        """The recipe.json that would tell may have been deleted."""
        differs = differences(saved.info.get("recipe", {}), self.recipe.plain())
        if differs or saved.info.get("seed") != self.seed:
            what = "; ".join(differs) or f"its seed is {saved.info.get('seed')}, not {self.seed}"
            raise RunError(
                f"the checkpoints in {self.run} are of another recipe or seed: {what}. "
                "Choose another --out, or delete that folder."
            )

    def checkpoint(self, epoch: int, step: int) -> Checkpoint:
        tensors = self.learner.state()
        for name, values in self.flips.signs.items():
            tensors[f"signs.{name}"] = pack_signs(values)
        for name, values in self.flips.latent.items():
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
        state_restored(self.learner.model)
        for name, now in self.flips.signs.items():
            packed = parts["signs"][name].to(now.device)
            now.copy_(unpack_signs(packed, tuple(now.shape), now.dtype))
        for name, latent in self.flips.latent.items():
            latent.copy_(parts["latent"][name])

    def save(self, epoch: int, step: int) -> None:
        self.run.sync_metrics()
        self.run.save_checkpoint(self.checkpoint(epoch, step))

    # ---------------------------------------------------------------------------------------------- an epoch

    def end_epoch(self, epoch: int, seconds: float, evaluate: bool = True) -> dict[str, Any]:
        """Write the epoch's line, and stop the run if something is wrong with it."""
        line = {
            "epoch": epoch + 1,
            **self._figures(epoch, evaluate),
            **self._flips(),
            "seconds": round(seconds, 4),
        }
        if distributed.rank() == 0:
            self.run.add_metrics(line)
            self._to_tensorboard(line)
        moved = None if "latent_change" not in line else line["latent_change"] != 0
        problem = self.health.problem(epoch, line["loss"], line.get("flip_rate"), moved)
        # Rank 0 decides: after a restart, it alone knows the loss of the first epoch.
        problem = distributed.from_rank_0(problem)
        if problem:
            raise TrainingStopped(problem, self.run)
        return line

    def _figures(self, epoch: int, evaluate: bool) -> dict[str, Any]:
        learner = self.learner
        last = epoch + 1 == self.recipe.epochs
        auxiliary = (learner.auxiliary_sum / learner.steps).tolist()
        accuracy = learner.evaluate(exact=last) if evaluate else Accuracy()
        return {
            "loss": learner.loss_sum.item() / learner.steps,
            "auxiliary_loss": dict(zip(learner.auxiliary_layers, auxiliary, strict=True)),
            "accuracy": accuracy.top1,
            "top5": accuracy.top5,
            "lr": float(learner.optimizers[0].param_groups[-1]["lr"]),
        }

    def _flips(self) -> dict[str, Any]:
        """How signs and latent weights moved in the epoch; empty for a float network."""
        counts = self.flips.since_the_start()
        if counts is None:
            return {}
        return {
            "flips": counts.flips,
            "flip_rate": counts.flips / counts.weights,
            "differs_from_sign": counts.off_sign / counts.weights,
            "latent_change": counts.latent_change,
        }

    def open_tensorboard(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard needs the tensorboard package: pip install 'unflip[tensorboard]'"
            ) from None
        self.board = SummaryWriter(str(self.run.folder))

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

    # ------------------------------------------------------------------------------------------------ the end

    def last_line(self) -> dict[str, Any]:
        """The metrics of the last epoch, which are the run's result."""
        for line in self.run.metrics:
            if line["epoch"] == self.recipe.epochs:
                return line
        raise RunError(
            f"metrics.jsonl in {self.run} has no line of epoch {self.recipe.epochs}, whose accuracy is the run's "
            "result. Delete the last checkpoint in that folder: the run then resumes from the one before."
        )

    def finish(self, last: dict[str, Any], seconds: float) -> dict[str, Any]:
        device = self.learner.device
        result = {
            "recipe": self.recipe.name,
            "seed": self.seed,
            "epochs": self.recipe.epochs,
            "accuracy": last["accuracy"],
            "top5": last.get("top5"),
            "loss": last["loss"],
            "evaluated_on": "validation" if self.recipe.data.validation else "test",
            "seconds": round(self.seconds_before + seconds, 2),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "precision": "float16" if self.learner.half else "float32",
            "torch": torch.__version__,
            **self.version,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if distributed.rank() == 0:
            self.run.finish(result)
        return result

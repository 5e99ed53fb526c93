"""The loop watches itself: a run that has stopped learning says so instead of finishing quietly."""

from __future__ import annotations

import math
from pathlib import Path

from unflip.train.recipe import Recipe


class TrainingStopped(RuntimeError):
    """Training cannot usefully go on; the message says what was seen and what to try."""

    folder: Path | None = None  # of the run that stopped, where that is known


class Watch:
    """Looks at each epoch's figures. ``classes`` sets the loss of guessing, log(classes)."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.recipe, self.classes = recipe, classes
        self.start_loss: float | None = None

    def problem(
        self, epoch: int, loss: float, flips: int | None, latent_moved: bool | None
    ) -> str | None:
        """What is wrong, or None. ``flips`` and ``latent_moved`` are None for a float network."""
        if not math.isfinite(loss):
            return (
                f"epoch {epoch + 1}: the loss is {loss}. Lower optimizer.lr "
                f"(now {self.recipe.optimizer.lr}), or try precision=float32."
            )
        if latent_moved is False:
            return (
                f"epoch {epoch + 1}: not one latent weight changed in a whole epoch at a learning rate "
                "above zero, so no gradient reaches them. If the step is compiled, the compiler may have "
                "dropped the straight-through gradient: try --eager, and please report it."
            )
        if flips == 0 and self._high_rate(epoch) and not self.recipe.allow_no_flips:
            return (
                f"epoch {epoch + 1}: not one binary weight flipped in a whole epoch, near the highest "
                "learning rate of the schedule. Raise optimizer.latent_lr (now "
                f"{self.recipe.optimizer.latent_lr or self.recipe.optimizer.lr}), or set "
                "allow_no_flips=true if that is what you want."
            )
        return self._no_progress(epoch, loss)

    def _high_rate(self, epoch: int) -> bool:
        return self.recipe.schedule.factor_at(epoch, self.recipe.epochs) >= 0.5

    def _no_progress(self, epoch: int, loss: float) -> str | None:
        """A fine-tuned network starts in a minimum and is shaken out of it: there the bar is guessing, which has a
        known loss unless a teacher is part of it."""
        if self.start_loss is None:
            self.start_loss = loss
        guessing = self.recipe.start is not None and self.recipe.distill is None
        limit = math.log(self.classes) if guessing else self.start_loss
        warmed_up = epoch >= max(5, self.recipe.epochs // 20)
        if not warmed_up or loss <= limit:
            return None
        return (
            f"epoch {epoch + 1}: the loss is {loss:.4g}, above {limit:.4g}, where it "
            f"{'would be by guessing' if guessing else 'started'}: the network "
            f"unlearns. Lower optimizer.lr (now {self.recipe.optimizer.lr})."
        )

"""The loop watches itself: a run that has stopped learning says so instead of finishing quietly."""

from __future__ import annotations

import math
from pathlib import Path

from unflip.hints import Foreseen
from unflip.train.recipe import Recipe


class TrainingStopped(Foreseen, RuntimeError):
    """Training cannot usefully go on; the message says what was seen and what to try."""

    folder: Path | None = None  # of the run that stopped, where that is known


EXPLODED = 10.0  # times the loss of guessing: no network that learns is there
THROWN = 0.25  # of the signs in one epoch: a step, not a gradient, decides on those


class Watch:
    """Looks at each epoch's figures. ``classes`` sets the loss of guessing, log(classes)."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.recipe, self.guessing = recipe, math.log(classes)
        self.start_loss: float | None = None
        self.most_flips = 0.0

    def problem(
        self, epoch: int, loss: float, flips: float | None, latent_moved: bool | None
    ) -> str | None:
        """What is wrong, or None. ``flips``, the share of the binary weights that did, and ``latent_moved`` are None
        for a float network."""
        self.most_flips = max(self.most_flips, flips or 0.0)
        still = flips == 0 and self._high_rate(epoch) and not self.recipe.allow_no_flips
        if not math.isfinite(loss):
            return f"epoch {epoch + 1}: the loss is {loss}. Lower {self._rates()}, or try precision=float32."
        if (still or latent_moved is False) and self._thrown(loss):
            return (
                f"epoch {epoch + 1}: not one binary weight flipped in a whole epoch, and the loss is {loss:.4g} "
                f"({self.guessing:.4g} by guessing): steps this large throw latent weights so far from zero that none "
                f"comes back. Lower {self._rates()}."
            )
        if latent_moved is False:
            return (
                f"epoch {epoch + 1}: not one latent weight changed in a whole epoch at a learning rate "
                "above zero, so no gradient reaches them. If the step is compiled, the compiler may have "
                "dropped the straight-through gradient: try --eager, and please report it."
            )
        if still:
            return (
                f"epoch {epoch + 1}: not one binary weight flipped in a whole epoch, near the highest "
                "learning rate of the schedule. Raise optimizer.latent_lr (now "
                f"{self.recipe.optimizer.latent_lr or self.recipe.optimizer.lr}), or set "
                "allow_no_flips=true if that is what you want."
            )
        return self._no_progress(epoch, loss)

    def _high_rate(self, epoch: int) -> bool:
        return self.recipe.schedule.factor_at(epoch, self.recipe.epochs) >= 0.5

    def _thrown(self, loss: float) -> bool:
        """Whether rates that are too high, not too low, keep the signs from flipping."""
        return self._exploded(loss) or self.most_flips > THROWN

    def _exploded(self, loss: float) -> bool:
        """A teacher's loss has no such bar."""
        return self.recipe.distill is None and loss > EXPLODED * self.guessing

    def _rates(self) -> str:
        rates = self.recipe.optimizer
        latent = (
            "" if rates.latent_lr is None else f" or optimizer.latent_lr (now {rates.latent_lr})"
        )
        return f"optimizer.lr (now {rates.lr}){latent}"

    def _no_progress(self, epoch: int, loss: float) -> str | None:
        """A fine-tuned network starts in a minimum and is shaken out of it: there the bar is guessing, which has a
        known loss unless a teacher is part of it."""
        if self.start_loss is None:
            self.start_loss = loss
        guessing = self.recipe.start is not None and self.recipe.distill is None
        limit = self.guessing if guessing else self.start_loss
        warmed_up = epoch >= max(5, self.recipe.epochs // 20)
        if warmed_up and self._exploded(loss):  # it may have begun there
            guessing, limit = True, self.guessing
        if not warmed_up or loss <= limit:
            return None
        return (
            f"epoch {epoch + 1}: the loss is {loss:.4g}, above {limit:.4g}, where it "
            f"{'would be by guessing' if guessing else 'started'}: the network "
            f"unlearns. Lower {self._rates()}."
        )

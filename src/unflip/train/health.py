"""The health of a run: one that has stopped learning ends with a reason instead of finishing silently."""

from __future__ import annotations

import math

from unflip.hints import Foreseen
from unflip.recipes.schema import Recipe
from unflip.runs.run import Run


class TrainingStopped(Foreseen, RuntimeError):
    """Training is useless from here; the message says what was seen and what to try.

    ``run`` is the one that stopped, if it is known.
    """

    def __init__(self, message: str, run: Run | None = None) -> None:
        super().__init__(message)
        self.run = run


EXPLODED = 10.0  # × the loss of guessing: no network that learns has such a loss
THROWN = 0.25  # share of signs that flipped in one epoch: steps this large ignore the gradient


# Test accuracy is far below the expected one if it is lower by 5 points and by 15 % of it. Seeds differ by less.
LEAST_GAP = 5.0
GAP = 0.15


class Health:
    """Checks the figures of each epoch. ``classes`` sets the loss of guessing, log(classes)."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.recipe, self.guessing = recipe, math.log(classes)
        self.start_loss: float | None = None
        self.most_flips = 0.0

    def problem(
        self, epoch: int, loss: float, flips: float | None, latent_moved: bool | None
    ) -> str | None:
        """What is wrong, or None. ``flips`` is the share of binary weights that flipped; it and ``latent_moved`` are
        None for a float network."""
        self.most_flips = max(self.most_flips, flips or 0.0)
        still = flips == 0 and self._high_rate(epoch) and not self.recipe.allow_no_flips
        if not math.isfinite(loss):
            return f"epoch {epoch + 1}: the loss is {loss}. Lower {self._rates()}, or try precision=float32."
        if (still or latent_moved is False) and self._thrown(loss):
            return (
                f"epoch {epoch + 1}: no binary weight flipped in a whole epoch, and the loss is {loss:.4g} "
                f"({self.guessing:.4g} when guessing): steps this large move latent weights so far from zero that none "
                f"returns. Lower {self._rates()}."
            )
        if latent_moved is False:
            return (
                f"epoch {epoch + 1}: no latent weight changed in a whole epoch at a learning rate "
                "above zero, so no gradient reaches them. If the step is compiled, the compiler may have "
                "dropped the straight-through gradient: try --eager, and please report it."
            )
        if still:
            return (
                f"epoch {epoch + 1}: no binary weight flipped in a whole epoch, near the highest "
                "learning rate of the schedule. Raise optimizer.latent_lr (now "
                f"{self.recipe.optimizer.latent_lr or self.recipe.optimizer.lr}), or set "
                "allow_no_flips=true if that is what you want."
            )
        return self._no_progress(epoch, loss)

    def behind(self, epochs: int, accuracy: float | None) -> str | None:
        """What to check if the test accuracy after ``epochs`` is far below the recipe's expectation."""
        expected = self.recipe.expected.get(epochs)
        if expected is None or accuracy is None:
            return None
        if accuracy >= expected - max(LEAST_GAP, GAP * expected):
            return None
        return (
            f"epoch {epochs}: accuracy is {accuracy:.2f} %, far below the {expected:.2f} % that recipe "
            f"{self.recipe.name} expects here. Check that images and labels belong together, how images are "
            f"normalized, and that batch_size={self.recipe.batch_size} and {self._rates()} are what was trained: "
            "batch_size is for all GPUs together."
        )

    def _high_rate(self, epoch: int) -> bool:
        return self.recipe.schedule.factor_at(epoch, self.recipe.epochs) >= 0.5

    def _thrown(self, loss: float) -> bool:
        """Whether learning rates that are too high, not too low, keep the signs from flipping."""
        return self._exploded(loss) or self.most_flips > THROWN

    def _exploded(self, loss: float) -> bool:
        """Not for a loss that a teacher is part of: its value when guessing is not known."""
        return self.recipe.distill is None and loss > EXPLODED * self.guessing

    def _guessing_with_teacher(self) -> float:
        """The most that guessing can cost: the divergence from a teacher who is sure of each image is log(classes)."""
        distill = self.recipe.distill
        if distill is None:
            return self.guessing
        return self.guessing * (1 - distill.weight + distill.weight * distill.temperature**2)

    def _rates(self) -> str:
        rates = self.recipe.optimizer
        latent = (
            "" if rates.latent_lr is None else f" or optimizer.latent_lr (now {rates.latent_lr})"
        )
        return f"optimizer.lr (now {rates.lr}){latent}"

    def _no_progress(self, epoch: int, loss: float) -> str | None:
        """A fine-tuned network starts in a minimum, and the first steps leave it. So its limit is the loss of guessing.
        ReActNet's second step needs that too: the float weights that it starts from have just become bits."""
        if self.start_loss is None:
            self.start_loss = loss
        guessing = self.recipe.start is not None
        limit = self._guessing_with_teacher() if guessing else self.start_loss
        warmed_up = epoch >= max(5, self.recipe.epochs // 20)
        if warmed_up and self._exploded(loss):  # it may have started there
            guessing, limit = True, self.guessing
        if not warmed_up or loss <= limit:
            return None
        return (
            f"epoch {epoch + 1}: the loss is {loss:.4g}, above {limit:.4g}, "
            f"{'the loss of guessing' if guessing else 'where it started'}: the network "
            f"is getting worse. Lower {self._rates()}."
        )

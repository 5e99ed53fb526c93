"""A callback for Lightning's ``Trainer``: the hooks that methods need, at the right moments."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from unflip.layers import after_step, before_step, start_epoch


class BinaryCallback(Callback):
    """``Trainer(callbacks=[BinaryCallback()])`` calls ``start_epoch``, ``before_step`` and ``after_step``.

    The auxiliary loss is not a hook: add ``unflip.auxiliary_loss(self)`` in ``training_step``.
    """

    def __init__(self) -> None:
        self._stepped = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            raise ValueError(
                f"Trainer(max_epochs={trainer.max_epochs}): methods have schedules over all epochs. Set max_epochs"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        start_epoch(pl_module, trainer.current_epoch, trainer.max_epochs)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning calls this where gradients are complete, and no longer scaled by a GradScaler."""
        before_step(pl_module)
        self._stepped = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """With accumulated gradients, only some batches end in a step."""
        if self._stepped:
            after_step(pl_module)
        self._stepped = False

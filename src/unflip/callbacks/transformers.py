"""A callback for Hugging Face's ``Trainer``: the hooks that methods need, at the right moments."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback

from unflip.layers import after_step, before_step, start_epoch


class BinaryCallback(TrainerCallback):
    """``Trainer(callbacks=[BinaryCallback()])`` calls ``start_epoch``, ``before_step`` and ``after_step``.

    The auxiliary loss is not a hook: add ``unflip.auxiliary_loss(self)`` to the loss that the model returns.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.fp16 and not args.max_grad_norm:
            raise ValueError(
                f"TrainingArguments(fp16=True, max_grad_norm={args.max_grad_norm}): Trainer removes the scale of "
                "float16 gradients only if it clips them. Set max_grad_norm, or use bf16=True"
            )

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """``state.epoch`` counts in fractions; a number of steps (``max_steps``) may end within an epoch."""
        epochs = max(1, math.ceil(state.num_train_epochs))
        start_epoch(model, min(round(state.epoch or 0), epochs - 1), epochs)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        before_step(model)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        after_step(model)

"""The callback for Hugging Face's Trainer trains exactly what the loop of the docs trains."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import unflip as package

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
from unflip.callbacks.transformers import BinaryCallback  # noqa: E402


class WithLoss(nn.Module):
    """Trainer expects a model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        loss = nn.functional.cross_entropy(self.model(x), labels)
        return {"loss": loss + package.auxiliary_loss(self)}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(model: nn.Module, task, folder: Path, **options: object):
    rows = [{"x": x, "labels": y} for x, y in zip(task.x, task.y, strict=True)]
    options = {
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0,
    } | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return InOrder(
        WithLoss(model),
        arguments,
        train_dataset=rows,
        optimizers=(optimizer, None),
        callbacks=[BinaryCallback()],
    )


@pytest.mark.parametrize("method", ["irnet", "ovsw", "xnor", "rebnn"])
def test_it_trains_what_the_plain_loop_trains(task, check, method: str, tmp_path: Path) -> None:
    first = task.model(method)
    model = copy.deepcopy(first)
    trainer(model, task, tmp_path).train()
    check(model, task.by_hand(first), first)


def test_steps_may_end_within_an_epoch(task, tmp_path: Path) -> None:
    """Trainer then rounds the number of epochs up."""
    trainer(task.model("irnet"), task, tmp_path, max_steps=3).train()


def test_scaled_gradients_are_refused(task, tmp_path: Path) -> None:
    made = trainer(task.model("ovsw"), task, tmp_path)
    made.args.fp16 = True
    with pytest.raises(ValueError, match="Set max_grad_norm, or use bf16=True"):
        BinaryCallback().on_train_begin(made.args, made.state, made.control)

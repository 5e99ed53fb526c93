"""The callback for Lightning trains exactly what the loop of the docs trains."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unflip as package

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
from unflip.callbacks.lightning import BinaryCallback  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y) + package.auxiliary_loss(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Module, task, **options: object) -> None:
    batches = DataLoader(TensorDataset(task.x, task.y), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers and logging
        lightning.Trainer(
            accelerator="cpu",
            callbacks=[BinaryCallback()],
            enable_model_summary=False,
            **quiet,
            **options,
        ).fit(module, batches)


@pytest.mark.parametrize("method", ["irnet", "ovsw", "xnor", "rebnn"])
def test_it_trains_what_the_plain_loop_trains(task, check, method: str) -> None:
    first = task.model(method)
    module = Module(copy.deepcopy(first))
    fit(module, task, max_epochs=3, accumulate_grad_batches=2)
    check(module.model, task.by_hand(first), first)


def test_epochs_must_be_known(task) -> None:
    with pytest.raises(ValueError, match="Set max_epochs"):
        fit(Module(task.model("irnet")), task, max_epochs=-1, max_steps=1)

"""Two processes under torchrun do what one does with the whole batch, and outlive a killed one."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from unflip.runs import checkpoint as checkpoints
from unflip.train import distributed, load_recipe

RANKS = Path(__file__).with_name("ranks.py")


def torchrun(*arguments: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, f"--max-restarts={restarts}", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def launched(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """What two processes wrote, one of which was killed and restarted."""
    out = tmp_path_factory.mktemp("ranks")
    return out, torchrun(RANKS, out, restarts=2)


@pytest.fixture(scope="module")
def ranks(
    launched: tuple[Path, subprocess.CompletedProcess[str]],
) -> list[dict[str, Tensor]]:
    out, done = launched
    paths = [out / f"rank-{rank}.safetensors" for rank in (0, 1)]
    assert all(path.exists() for path in paths), done.stderr
    return [safetensors.torch.load_file(path) for path in paths]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What this process finds with the whole batch."""
    out = tmp_path_factory.mktemp("alone")
    runpy.run_path(str(RANKS))["gradients"](out)
    return safetensors.torch.load_file(out / "rank-0.safetensors")


def test_gradients_are_those_of_the_whole_batch(
    ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]
) -> None:
    """Of every parameter, latent weights and mapping networks among them."""
    names = [name for name in alone if name.startswith("gradient.")]
    assert any("weight_binarizer.mapping.conv2" in name for name in names)
    for name in names:
        assert alone[name].dtype == torch.float64
        assert alone[name].abs().max() > 1e-6, f"{name} is not tested by zeros"
        for found in ranks:
            torch.testing.assert_close(found[name], alone[name], rtol=1e-10, atol=1e-12)


def test_each_rank_has_its_share_of_the_batch(
    ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]
) -> None:
    """Half the work each: with the whole batch on both, the gradients would be right too."""
    assert [len(found["images"]) for found in ranks] == [16, 16]
    both = torch.cat([found["images"] for found in ranks])
    assert sorted(both.tolist()) == sorted(alone["images"].tolist())


def test_losses_are_those_of_the_whole_batch(
    ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]
) -> None:
    assert alone["auxiliary"].shape == (2,)
    for found in ranks:
        torch.testing.assert_close(found["auxiliary"], alone["auxiliary"], rtol=1e-12, atol=0)
        torch.testing.assert_close(found["loss"], alone["loss"], rtol=1e-12, atol=0)


def test_ranks_stay_identical(ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]) -> None:
    """Bit for bit, mapping networks too; and they are where one process gets to."""
    names = [name for name in alone if name.startswith("after.")]
    assert any("weight_binarizer.mapping" in name for name in names)
    for name in names:
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], alone[name], rtol=1e-8, atol=1e-10)


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    """A recipe and the one it starts from, end to end: one set of files, one voice."""
    network = {"name": "vgg_small", "width": 4}
    recipe = {
        **load_recipe("digits-dorefa", ["data.validation=1200", "allow_no_flips=true"]).plain(),
        "model": network,
    }
    for name, epochs, start in (("base", 3, None), ("tuned", 2, "base.yaml")):
        values = {**recipe, "name": name, "epochs": epochs, "start": start}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(values))
    runs, out = tmp_path / "runs", tmp_path / "runs" / "tuned"
    done = torchrun("-m", "unflip", "train", tmp_path / "tuned.yaml", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("which is not finished") == 1
    assert done.stdout.count(f"in {out}\n") == 1
    assert sorted(p.name for p in runs.iterdir()) == ["base", "tuned"]
    for name, epochs in (("base", 3), ("tuned", 2)):
        folder = runs / name / "seed-0"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
        assert json.loads((folder / "result.json").read_text())["epochs"] == epochs
        files = [p.name for p in folder.iterdir() if not p.name.startswith("checkpoint-")]
        assert sorted(files) == [
            ".lock",
            "metrics.jsonl",
            "provenance.json",
            "recipe.json",
            "result.json",
        ]
        assert len(checkpoints.available(folder)) == 2


def test_a_killed_rank_is_restarted_and_nothing_is_lost(
    launched: tuple[Path, subprocess.CompletedProcess[str]], weights_hash: Callable[[Path], str]
) -> None:
    out, done = launched
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    assert done.stdout.count("resuming at epoch") == 1
    whole, killed = out / "whole" / "seed-0", out / "killed" / "seed-0"
    assert weights_hash(killed) == weights_hash(whole)
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]


# Without torchrun


def test_without_torchrun_nothing_happens() -> None:
    assert not distributed.launched()
    with distributed.process_group("cpu") as device:
        assert device == "cpu"
        assert (distributed.rank(), distributed.world_size()) == (0, 1)
    plan = torch.arange(12).view(3, 4)
    assert distributed.share(plan) is plan
    assert distributed.average(plan) is plan
    assert distributed.from_rank_0("mine") == "mine"
    model = nn.Linear(2, 2)
    assert distributed.wrap(model, load_recipe("digits-lns"), torch.device("cpu")) is model


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("batch_size=63", "batch_size=63 should be a multiple of the 2 processes"),
        ("sync_batchnorm=true", "sync_batchnorm=true needs GPUs"),
    ],
)
def test_what_two_processes_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch, override: str, says: str
) -> None:
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    recipe = load_recipe("digits-dorefa", [override])
    with pytest.raises(ValueError, match=says):
        distributed.wrap(nn.Linear(2, 2), recipe, torch.device("cpu"))

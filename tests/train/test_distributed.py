"""Two processes under torchrun do what one does with the whole batch, and outlive a killed one."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from unflip.runs import checkpoint as checkpoints
from unflip.train import distributed, load_recipe
from unflip.train.distributed import Ranks

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
    """Rank 0 may save their sum at any step, so the ranks must have the same one."""
    assert len(alone["auxiliary"]) > 10
    for found in ranks:
        for name in ("auxiliary", "loss", "sum of losses"):
            torch.testing.assert_close(found[name], alone[name], rtol=1e-9, atol=0)
    assert torch.equal(ranks[0]["sum of losses"], ranks[1]["sum of losses"])


def test_ranks_stay_identical(ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]) -> None:
    """Bit for bit, mapping networks and running statistics too; and they are where one process gets to."""
    names = [name for name in alone if name.startswith("after.")]
    assert any("weight_binarizer.mapping" in name for name in names)
    assert any("running_var" in name for name in names)
    for name in names:
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], alone[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", range(5))
def test_a_synchronized_norm_is_batchnorm_of_the_whole_batch(
    ranks: list[dict[str, Tensor]], alone: dict[str, Tensor], case: int
) -> None:
    """Output, gradients and running statistics, for values far from zero."""
    names = {name for name in alone if name.startswith(f"norm.{case}.")}
    assert {f"norm.{case}.output", f"norm.{case}.input"} < names
    for name in names:
        one, two = (found[name] for found in ranks)
        whole = name.endswith(("output", "input"))
        both = torch.cat([one, two]) if whole else one + two if name.endswith("gradient") else one
        digits = 1e-5 if alone[name].dtype == torch.float32 else 1e-11
        torch.testing.assert_close(both, alone[name], rtol=digits, atol=digits)


def test_every_test_image_is_counted_once(
    ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]
) -> None:
    """By one of the ranks, with rank 0's network."""
    assert alone["tested"].sum() == 449
    assert [found["tested"].sum().item() for found in ranks] == [224, 225]
    assert ranks[0]["accuracy"] == ranks[1]["accuracy"] == alone["accuracy"]
    assert 0 < alone["accuracy"] < 100


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_is_used_on_none(
    launched: tuple[Path, subprocess.CompletedProcess[str]], rank: int
) -> None:
    """Otherwise the ranks would run different code, and wait for each other."""
    out, done = launched
    assert done.returncode == 0, done.stderr
    found = json.loads((out / f"failures-{rank}.json").read_text())
    assert found["kernels"] == ["fused_product"]
    assert found["mode after a failure"] == "eager"
    assert found["mode"] == "compiled"
    norm, compiler = found["warnings"]
    assert norm.endswith("because our kernels failed: output of 2 is off by 7 (rank 1)")
    assert compiler.endswith("because it failed: output of 2 is off by 7 (rank 1)")


def test_a_whole_training_has_the_metrics_of_one_process(
    launched: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out, done = launched
    runpy.run_path(str(RANKS))["whole_training"](tmp_path)

    def lines(folder: Path) -> list[dict[str, Any]]:
        text = (folder / "seed-0" / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    for found, expected in zip(lines(out / "together"), lines(tmp_path), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4), done.stderr
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.25)


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    """A recipe and the one it starts from, end to end: one set of files, one voice. Rank 0 prepares LNS alone."""
    network = {"name": "vgg_small", "width": 4}
    recipe = {
        **load_recipe("digits-dorefa", ["data.validation=1200", "allow_no_flips=true"]).plain(),
        "model": network,
    }
    lns = {"name": "lns", "base": recipe["method"], "rates": "estimated", "warm_steps": 2}
    tuned = {"start": "base.yaml", "method": lns}
    for name, epochs, changes in (("base", 3, {}), ("tuned", 2, tuned)):
        values = {**recipe, "name": name, "epochs": epochs, **changes}
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
        assert distributed.together() == Ranks()
    assert distributed.from_rank_0("mine") == "mine"
    plan, model = torch.arange(12).view(3, 4), nn.Linear(2, 2)
    assert Ranks().share(plan) is plan
    assert Ranks().average(plan) is plan
    assert Ranks().averaging(model, load_recipe("digits-lns")) is model
    assert Ranks().first_problem("none here") == "none here"


def test_shares_of_a_row_and_of_a_plan_are_the_same() -> None:
    plan = torch.arange(3 * 8 * 2).view(3, 8, 2)
    for world in (1, 2, 4):
        shares = [Ranks(rank, world).share(plan) for rank in range(world)]
        assert torch.equal(torch.cat(shares, dim=1), plan)
        for rank, share in enumerate(shares):
            assert torch.equal(Ranks(rank, world).share(plan[1]), share[1])


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:
    recipe = load_recipe("digits-dorefa", ["batch_size=63"])
    with pytest.raises(ValueError, match=r"batch_size=63 .* should be a multiple of 2"):
        Ranks(0, 2).averaging(nn.Linear(2, 2), recipe)


def test_processes_that_share_a_gpu_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two processes on one GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (distributed._backend(on_gpu=True), distributed._backend(on_gpu=False)) == (
        "nccl",
        "gloo",
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"4 processes share 2 GPU\(s\).*--nproc-per-node 2"):
        assert distributed._backend(on_gpu=True) == "gloo"


class Centered(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean()


def test_a_norm_of_another_kind_is_not_synchronized_silently() -> None:
    with pytest.raises(ValueError, match="1 is a Centered with its own forward"):
        distributed.synchronize_norms(nn.Sequential(nn.Identity(), Centered(2)), Ranks(0, 2))

"""Kernels that have passed their checks are not checked again; everything else about a machine is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unflip.kernels import Kernels, Trial, check, scope, tuning
from unflip.kernels.passed import Passed
from unflip.layers import binary_layers

CPU = torch.device("cpu")
CHECKS = ("check_product", "check_stems", "check_norm", "check_mapping")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of checks that were made, with kernels that can run here and agree with torch."""
    made: list[str] = []
    monkeypatch.setenv("UNFLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "available", lambda: True)
    monkeypatch.setattr(tuning, "runs_on", lambda device: True)
    monkeypatch.setattr(scope, "covered", lambda layer: True)
    for name in CHECKS:
        monkeypatch.setattr(check, name, lambda *_, name=name: made.append(name))
    return made


def files() -> list[Path]:
    path = Passed([], CPU).path
    assert path is not None
    return list(path.parent.glob("*"))


def test_a_second_process_does_not_check_again(
    checked: list[str], make_trial: Callable[..., Trial]
) -> None:
    with Kernels([make_trial()], CPU):
        assert checked == list(CHECKS)
    trial = make_trial(seed=1)
    with Kernels([trial], CPU) as kernels:
        assert kernels.trusted
        assert all(layer.fused_product for _, layer in binary_layers(trial.model))
    assert checked == list(CHECKS)


@pytest.mark.parametrize("what", ["method", "width", "networks", "sources", "machine", "switch"])
def test_whatever_a_check_depends_on_makes_it_necessary_again(
    what: str,
    checked: list[str],
    make_trial: Callable[..., Trial],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Kernels([make_trial()], CPU):
        pass
    width = {"width": 32} if what == "width" else {}
    trials = [make_trial("bireal" if what == "method" else "dorefa", **width)]
    if what == "networks":
        trials.append(make_trial(seed=1))
    if what == "sources":
        monkeypatch.setattr(scope, "_sources", lambda: "changed")
    if what == "machine":
        monkeypatch.setattr(torch, "__version__", "99")
    if what == "switch":
        monkeypatch.setenv("UNFLIP_NORM", "0")
    with Kernels(trials, CPU) as kernels:
        assert not kernels.trusted


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": 1}', '{"rows": [[1, 2]]}'])
def test_a_damaged_file_is_checked_again(
    content: str, checked: list[str], make_trial: Callable[..., Trial]
) -> None:
    with Kernels([make_trial()], CPU):
        pass
    [file] = files()
    file.write_text(content)
    with Kernels([make_trial()], CPU) as kernels:
        assert not kernels.trusted
    assert checked == 2 * list(CHECKS)


@pytest.mark.filterwarnings("ignore:training with")
def test_a_kernel_that_failed_is_tried_again(
    checked: list[str], make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise check.Mismatch("output is off")

    monkeypatch.setattr(check, "check_norm", fails)
    with Kernels([make_trial()], CPU):
        pass
    assert not files()


def test_measured_choices_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNFLIP_CACHE", str(tmp_path))
    measured = {("wgrad", 128, 16, 32, 32, 16, 0, None, 1): 8}
    monkeypatch.setattr(tuning, "chosen_rows", dict(measured))
    Passed(["a network"], CPU).remember()
    monkeypatch.setattr(tuning, "chosen_rows", {})
    assert Passed(["a network"], CPU).recall()
    assert tuning.chosen_rows == measured
    assert not Passed(["another"], CPU).recall()


def test_a_machine_without_a_home_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("UNFLIP_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    passed = Passed(["a network"], CPU)
    passed.remember()
    assert not passed.recall()


def test_a_folder_that_cannot_be_written_is_no_error(
    checked: list[str], make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNFLIP_CACHE", "/proc/nowhere")
    with Kernels([make_trial()], CPU) as kernels:
        assert not kernels.trusted

"""A shared GPU: one process at a time trains, and whatever ends it releases the lock."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import pytest

from unflip.data import load
from unflip.recipes.load import load_recipe
from unflip.train.engine import Engine
from unflip.train.gpu_lock import hold_gpu
from unflip.train.job import RunOptions
from unflip.train.loop import train


def held(path: Path) -> bool:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_lock_is_exclusive(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "gpu.lock", list[int](), list[int]()

    def work() -> None:
        for _ in range(3):
            with hold_gpu(path):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.01)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 9


def test_an_error_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gpu.lock"

    def work() -> None:
        with hold_gpu(path):
            assert held(path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert not held(path)


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    with (
        hold_gpu(path),
        pytest.raises(KeyboardInterrupt, match="stopped while waiting for the GPU"),
        hold_gpu(path, stop=[15]),
    ):
        pass


def test_no_one_to_wait_for() -> None:
    with hold_gpu(None):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_training_holds_the_lock_while_epochs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    path, seen, step = tmp_path / "gpu.lock", list[bool](), Engine.step
    made = Engine.__init__

    def watched_make(engine: Engine, *args: object, **options: object) -> None:
        made(engine, *args, **options)  # type: ignore[arg-type]
        seen.append(path.exists() and held(path))

    def watched_step(engine: Engine) -> None:
        seen.append(held(path))
        if fails:
            raise ZeroDivisionError
        step(engine)

    monkeypatch.setattr(Engine, "__init__", watched_make)
    monkeypatch.setattr(Engine, "step", watched_step)
    small = ["epochs=1", "model.width=2", "data.validation=1200", "allow_no_flips=true"]
    recipe = load_recipe("digits-dorefa", small)
    try:
        train(
            recipe,
            load("digits"),
            tmp_path,
            options=RunOptions(device="cpu", gpu_lock=path, quiet=True),
        )
    except ZeroDivisionError:
        assert fails
    compiled, *steps = seen
    assert not compiled, "compiling needs no lock"
    assert steps
    assert all(steps)
    assert not held(path)

"""Checkpoints survive a kill, a full disk, an unwritable folder and a flipped bit."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unflip.runs import checkpoint as checkpoints
from unflip.runs.checkpoint import Checkpoint, DamagedCheckpoint
from unflip.runs.files import RunError, write_atomically


def made(epoch: int, step: int = 0, size: int = 100) -> Checkpoint:
    tensors = {
        "model.weight": torch.full((size,), epoch + step / 1000),
        "count": torch.tensor(epoch),
    }
    return Checkpoint(epoch, step, tensors, {"seed": 7, "epoch": epoch})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pair(epoch: int, step: int = 0) -> list[str]:
    stem = f"checkpoint-{epoch:05d}-{step:06d}"
    return [f"{stem}.json", f"{stem}.safetensors"]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 4).half(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bits": torch.randint(0, 256, (9,), dtype=torch.uint8),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "none": torch.zeros(0),
        "parameter": torch.nn.Parameter(torch.tensor([float("nan"), float("inf"), -0.0])),
    }
    checkpoints.save(tmp_path, Checkpoint(3, 17, tensors, {"seed": 5}))
    found = checkpoints.load_at(tmp_path, 3, 17)
    assert (found.epoch, found.step, found.info["seed"]) == (3, 17, 5)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert found.tensors[name].numpy().tobytes() == tensor.detach().numpy().tobytes()


def test_a_damaged_checkpoint_prints_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for epoch in (1, 2):
        checkpoints.save(tmp_path, made(epoch))
    path = tmp_path / f"{checkpoints._stem(2, 0)}.json"
    path.write_text(json.dumps({"sha256": "\x1b[2J\u202e\x1b]0;title"}))
    assert checkpoints.load_usable(tmp_path).epoch == 1
    shown = capsys.readouterr().out
    assert r"not \x1b[2J\u202e" in shown
    assert shown.replace("\n", "").isprintable()


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert checkpoints.load_latest(tmp_path) == (None, [])
    assert checkpoints.load_latest(tmp_path / "nowhere") == (None, [])
    assert checkpoints.survey(tmp_path / "nowhere") == ([], [])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for epoch, step in ((0, 0), (0, 5), (1, 0), (9, 0), (10, 0)):
        checkpoints.save(tmp_path, made(epoch, step))
    assert names(tmp_path) == pair(9) + pair(10)
    assert checkpoints.available(tmp_path) == [(9, 0), (10, 0)]
    latest, problems = checkpoints.load_latest(tmp_path)
    assert latest is not None
    assert (latest.epoch, problems) == (10, [])


def test_a_save_clears_up_what_a_kill_left(tmp_path: Path) -> None:
    """A file without its JSON, a temporary file; but nothing that is no checkpoint."""
    checkpoints.save(tmp_path, made(1))
    (tmp_path / pair(2)[1]).write_bytes(b"the JSON was never written")
    (tmp_path / f".{pair(3)[1]}.part").write_bytes(b"half")
    for other in ("metrics.jsonl", ".recipe.json.part", "checkpoint-notes.txt"):
        (tmp_path / other).write_text("mine")
    checkpoints.save(tmp_path, made(4))
    others = [".recipe.json.part", "checkpoint-notes.txt", "metrics.jsonl"]
    assert names(tmp_path) == sorted(others + pair(1) + pair(4))


def test_newer_ones_are_dropped_when_a_run_goes_on_from_an_older_one(tmp_path: Path) -> None:
    """Else the damaged ones would stay, as "the last two", and the good new ones go."""
    checkpoints.save(tmp_path, made(5))
    checkpoints.save(tmp_path, made(6))
    checkpoints.drop_after(tmp_path, (5, 0))
    assert names(tmp_path) == pair(5)
    checkpoints.drop_after(tmp_path, None)
    assert names(tmp_path) == []


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last tensor's values: safetensors itself would not notice
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def wrong_hash(path: Path) -> None:
    info = json.loads(path.read_text())
    path.write_text(json.dumps({**info, "sha256": "0" * 64}))


DAMAGES: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "a flipped bit": (1, flip_a_bit),
    "truncated": (1, cut),
    "emptied": (1, lambda path: path.write_bytes(b"")),
    "the tensors are gone": (1, Path.unlink),
    "JSON cut short": (0, cut),
    "JSON empty": (0, lambda path: path.write_text("")),
    "JSON of something else": (0, lambda path: path.write_text("[1, 2]")),
    "JSON without the hash": (0, lambda path: path.write_text("{}")),
    "a hash that is a number": (0, lambda path: path.write_text('{"sha256": 5}')),
    "binary garbage for JSON": (0, lambda path: path.write_bytes(os.urandom(200))),
    "the hash of another": (0, wrong_hash),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_recognised_and_the_one_before_used(tmp_path: Path, damage: str) -> None:
    checkpoints.save(tmp_path, made(1))
    checkpoints.save(tmp_path, made(2))
    which, inflict = DAMAGES[damage]
    inflict(tmp_path / pair(2)[which])
    found, problems = checkpoints.load_latest(tmp_path)
    assert found is not None
    assert found.epoch == 1
    assert torch.equal(found.tensors["model.weight"], made(1).tensors["model.weight"])
    [problem] = problems
    assert f"{tmp_path / 'checkpoint-00002-000000'} is damaged: " in problem
    with pytest.raises(DamagedCheckpoint):
        checkpoints.load_at(tmp_path, 2, 0)
    assert checkpoints.survey(tmp_path) == ([(1, 0)], problems)


def test_tensors_without_their_json_do_not_count(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, made(1))
    checkpoints.save(tmp_path, made(2))
    (tmp_path / pair(2)[0]).unlink()
    found, problems = checkpoints.load_latest(tmp_path)
    assert found is not None
    assert (found.epoch, problems) == (1, [])


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    for epoch in (1, 2):
        checkpoints.save(tmp_path, made(epoch))
        flip_a_bit(tmp_path / pair(epoch)[1])
    found, problems = checkpoints.load_latest(tmp_path)
    assert found is None
    assert [("-00002-" in p, "-00001-" in p) for p in problems] == [(True, False), (False, True)]


class Failing:
    """Stands in for a function of ``os``: fails at its n-th call."""

    def __init__(self, real: Callable[..., Any], number: int, code: int) -> None:
        self.real, self.number, self.code, self.calls = real, number, code, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.number:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args)


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_in_the_middle_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int, code: int
) -> None:
    checkpoints.save(tmp_path, made(1))
    checkpoints.save(tmp_path, made(2))
    monkeypatch.setattr(os, function, Failing(getattr(os, function), number, code))
    with pytest.raises(RunError) as error:
        checkpoints.save(tmp_path, made(3))
    assert str(tmp_path / "checkpoint-00003-000000") in str(error.value)
    assert os.strerror(code) in str(error.value)
    monkeypatch.undo()
    assert not [name for name in names(tmp_path) if name.endswith(".part")]
    assert {*pair(1), *pair(2)} <= set(names(tmp_path))
    found, problems = checkpoints.load_latest(tmp_path)
    assert found is not None
    assert (found.epoch, problems) == (2, [])
    checkpoints.save(tmp_path, made(3))
    assert names(tmp_path) == pair(2) + pair(3)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, function, Failing(getattr(os, function), 1, errno.EIO))
    with pytest.raises(RunError, match=r"result\.json"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["result.json"]


def test_the_data_are_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name must not stand for a file whose content never arrived."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda *a: (done.append(Path(a[1]).suffix), replace(*a))[1])
    checkpoints.save(tmp_path, made(1))
    assert done == ["fsync", ".safetensors", "fsync", "fsync", ".json", "fsync"]


def mounted(folder: Path, options: str) -> bool:
    """Whether a small file system could be mounted (that needs root)."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    if not mounted(folder, "size=256k"):
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    """A real one: a tmpfs of 256 KB, on which the third checkpoint has no room."""
    checkpoints.save(small_disk, made(1, size=20_000))
    checkpoints.save(small_disk, made(2, size=20_000))
    with pytest.raises(RunError, match="No space left on device") as error:
        checkpoints.save(small_disk, made(3, size=30_000))
    assert str(small_disk / "checkpoint-00003-000000.safetensors") in str(error.value)
    assert names(small_disk) == pair(1) + pair(2)
    found, problems = checkpoints.load_latest(small_disk)
    assert found is not None
    assert (found.epoch, problems) == (2, [])


def test_a_disk_that_became_read_only(small_disk: Path) -> None:
    checkpoints.save(small_disk, made(1))
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    with pytest.raises(RunError, match="Read-only file system"):
        checkpoints.save(small_disk, made(2))
    found, _ = checkpoints.load_latest(small_disk)
    assert found is not None
    assert found.epoch == 1


def test_a_full_disk_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with an ENOSPC made up, for machines that cannot mount."""
    checkpoints.save(tmp_path, made(1))
    monkeypatch.setattr(os, "fsync", Failing(os.fsync, 1, errno.ENOSPC))
    with pytest.raises(RunError, match="No space left on device") as error:
        checkpoints.save(tmp_path, made(2))
    assert str(tmp_path / pair(2)[1]) in str(error.value)
    assert names(tmp_path) == pair(1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, made(1))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunError, match="Permission denied"):
            checkpoints.save(tmp_path, made(2))
        assert names(tmp_path) == pair(1)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_is_a_file_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="Not a directory"):
        checkpoints.save(tmp_path / "file", made(1))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(RunError, match="No such file or directory"):
        checkpoints.save(tmp_path / "nowhere", made(1))

"""What a person sees while training."""

import sys

import pytest

from unflip.train.progress import Progress, _duration


def test_the_bar_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress("[red]mine[/]", 2, [0], "eager", quiet=False) as progress:
        [task] = progress.bar.tasks
        assert str(progress.bar.columns[0].render(task)) == "[red]mine[/]"


def test_a_long_epoch_shows_its_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("mine", 2, [0], "eager", quiet=False) as progress:
        progress.step(0, 1, 9)
        monkeypatch.setattr("unflip.train.progress.STEP_SECONDS", -1.0)
        progress.step(1, 4, 9)
    assert capsys.readouterr().out.splitlines()[1:] == ["mine  epoch 2/2  step 4/9"]


def test_the_step_of_a_long_epoch_does_not_hide_its_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("unflip.train.progress.time.monotonic", lambda: now)
    with Progress("mine", 3, [0], "eager", quiet=False) as progress:
        for epoch in range(3):
            now += 31
            progress.step(epoch, 9, 9)
            progress.epoch(epoch, [{"loss": 1, "accuracy": None, "seconds": 31}])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "epoch 2/3" in line] == [
        "mine  epoch 2/3  step 9/9",
        "mine  epoch 2/3  loss 1.0000  31.00 s/epoch  31 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2.0 min"),
        (3000, "50 min"),
        (7200, "2.0 h"),
        (2e5, "56 h"),
    ],
)
def test_the_time_left_is_in_a_unit_that_people_use(seconds: float, shown: str) -> None:
    assert _duration(seconds) == shown

"""What a person sees while training."""

import sys

import pytest

from unflip.train.progress import Progress


def test_the_bar_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress("[red]mine[/]", 2, [0], "eager", quiet=False) as progress:
        [task] = progress.bar.tasks
        assert str(progress.bar.columns[0].render(task)) == "[red]mine[/]"

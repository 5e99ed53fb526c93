"""At night, what takes long in Triton's interpreter; see ``at_length`` in pyproject.toml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from unflip.kernels.tuning import INTERPRETED, available

HERE = Path(__file__).parent
FILES = sorted(
    p.name for p in HERE.glob("test_*.py") if "@pytest.mark.at_length\n" in p.read_text()
)


@pytest.mark.nightly
@pytest.mark.skipif(available() or INTERPRETED, reason="the kernels run in this process")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str, in_the_interpreter: Callable[..., None]) -> None:
    in_the_interpreter(str(HERE / file), "nightly")

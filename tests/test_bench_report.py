"""``unflip bench --report``: a block for an issue, and the table that collects such blocks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "results" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tables"] = module  # a dataclass asks for the module that it is in
    spec.loader.exec_module(module)
    return module


def test_a_block_that_is_pasted_becomes_a_row(unflip, tables: ModuleType, tmp_path: Path) -> None:
    done = unflip("bench", "--runs", 3, "--report")
    assert done.code == 0, done.err
    assert str(Path.home()) not in done.out
    pasted = f"My laptop:\n\n{done.out}\nThanks!\n".replace("\n", "\r\n")
    (tmp_path / "mine.txt").write_bytes(pasted.encode())
    found = tables.read_block(tmp_path / "mine.txt")
    [row] = tables.community_table(tmp_path).splitlines()[2:]
    assert f"| {found['least'].removesuffix(' ms')} |" in row
    assert found["cpu"] in row


@pytest.mark.parametrize("words", [["resnet20-dorefa-cifar10"], ["resnet20-cifar10", "--batch", 2]])
def test_times_of_something_else_are_refused(unflip, tables, tmp_path, words) -> None:
    (tmp_path / "mine.txt").write_text(unflip("bench", *words, "--runs", 1, "--report").out)
    with pytest.raises(SystemExit, match=r"mine\.txt: .* but the table is for"):
        tables.community_table(tmp_path)


def test_a_report_has_one_form(unflip) -> None:
    done = unflip("bench", "resnet20-cifar10", "--report", "--json")
    assert "give one of them" in done.err


def test_the_template_and_the_page_name_the_same_command() -> None:
    command = "    unflip bench --report\n"
    assert command in (ROOT / "docs" / "community.md").read_text()
    assert command in (ROOT / ".github" / "ISSUE_TEMPLATE" / "benchmark.yml").read_text()

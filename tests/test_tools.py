"""The programs of a release: tools/ is not part of the package."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import unflip

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_has_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    [place] = [project["tool"]["scikit-build"]["metadata"]["version"]["input"]]
    assert f'__version__ = "{unflip.__version__}"\n' in (ROOT / place).read_text()
    assert f"## {unflip.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("text", "ready"),
    [
        ("# Changelog\n\n## 1.2.3 (2026-11-30)\n\n## 1.2.2 (2026-01-01)\n", True),
        ("# Changelog\n\n## 1.2.3 (not released yet)\n", False),
        ("# Changelog\n\n## 1.2.2 (2026-01-01)\n", False),
        ("# Changelog\n", False),
    ],
)
def test_a_release_needs_its_section_of_the_changelog(text: str, ready: bool) -> None:
    assert (tool("release").changelog("1.2.3", text) == []) is ready


def test_the_workflow_says_that_nobody_has_run_it() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "not run this file yet" in text


def test_every_wheel_of_the_workflow_has_the_modules_for_browsers() -> None:
    """They are not part of git."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    built = [step.get("run") for step in jobs["web"]["steps"]]
    assert "python tools/web.py" in built
    for name in ("wheels", "sdist"):
        assert jobs[name]["needs"] == "web"
        fetched = [step["with"] for step in jobs[name]["steps"] if "download" in str(step)]
        assert fetched == [{"name": "web", "path": "src/unflip/export/web"}]


def test_pinned_tools_are_those_that_make_installs() -> None:
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {"build", "ziglang", "auditwheel"} <= set(pinned)


def test_docstrings_are_laid_out_for_the_site() -> None:
    pytest.importorskip("griffe")
    laid_out = tool("docstrings").laid_out
    assert laid_out(":class:`~unflip.methods.Carry` joins.") == "`unflip.methods.Carry` joins."
    assert laid_out("of 2**30 and 10**10 bytes") == r"of 2\*\*30 and 10\*\*10 bytes"
    assert laid_out("a     ``b``\nlong  c") == "```text\na     b\nlong  c\n```"
    points = "- one\n  goes on\n- two"
    assert laid_out(f"Two:\n\n{points}") == f"Two:\n\n{points}"

"""Checks what must be true before a version is tagged: ``make release``, after ``make test``. Uploads nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    version = re.search(
        r'^__version__ = "(.*)"$', (ROOT / "src/unflip/__init__.py").read_text(), re.MULTILINE
    )
    problems = [] if version is None else check(version[1])
    if version is None:
        problems = ['src/unflip/__init__.py has no line __version__ = "..."']
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    assert version is not None
    print(f"{version[1]} is ready: git tag v{version[1]}, and push the tag")


def check(version: str) -> list[str]:
    problems = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        problems.append(f"the version {version!r} should look like 1.2.3")
    problems += changelog(version, (ROOT / "CHANGELOG.md").read_text())
    if git("status", "--porcelain"):
        problems.append("there are changes that are not committed; commit them first")
    if git("tag", "--list", f"v{version}"):
        problems.append(f"the tag v{version} exists; raise __version__ in src/unflip/__init__.py")
    return problems


def changelog(version: str, text: str) -> list[str]:
    """The newest section must be of this version, with its date."""
    heading = re.search(r"^## (.*)$", text, re.MULTILINE)
    newest = heading[1] if heading else ""
    if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", newest):
        return []
    return [f"CHANGELOG.md begins with {newest!r}; it should begin with '{version} (YYYY-MM-DD)'"]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()

"""Hooks of mkdocs: pages link to files of the repository, which the site does not have.

``README.md`` becomes the first page and ``results/README.md`` another one; figures are copied. Other links become
plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ON_THE_SITE = (".md", ".svg")


def on_files(files: Any, config: Any) -> Any:
    for place, source in (("index.md", "README.md"), ("results.md", "results/README.md")):
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    for figure in sorted((ROOT / "results").rglob("*.svg")):
        place = figure.relative_to(ROOT).as_posix()
        files.append(File.generated(config, place, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return LINK.sub(_link, markdown)


def _link(found: re.Match[str]) -> str:
    bang, label, target = found.groups()
    path, hash_sign, anchor = target.partition("#")
    if path.startswith(("docs/", "../docs/")):
        inside = path.removeprefix("../").removeprefix("docs/")
        return f"{bang}[{label}]({inside}{hash_sign}{anchor})"
    if path == "../results/README.md":
        return f"[{label}](results.md{hash_sign}{anchor})"
    if bang and path.startswith("../results/"):
        return f"![{label}]({path.removeprefix('../')})"
    elsewhere = "://" in target or not path  # another site, or a place on this page
    inside = path.endswith(ON_THE_SITE) and not path.startswith(
        ("../", "CONTRIBUTING", "CHANGELOG")
    )
    return found[0] if elsewhere or inside else label

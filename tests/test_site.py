"""The site builds without a warning, and every link in it leads to a page and a heading of it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
    pytest.skip("needs mkdocs-material and mkdocstrings: the extra docs", allow_module_level=True)


class Links(HTMLParser):
    """What a page links to, the files it loads, and the places in it."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.places.add(found["id"])
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        if tag in ("img", "script") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") == "stylesheet":
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Links]:
    found = {}
    for path in site.rglob("*.html"):
        found[path.relative_to(site).as_posix()] = links = Links()
        links.feed(path.read_text(encoding="utf-8"))
    return found


def inside(pages: dict[str, Links]) -> Iterator[tuple[str, str, str]]:
    """Page, path and place of each link to another page of the site."""
    for name, links in pages.items():
        if name == "404.html":
            continue
        for target in links.targets:
            parts = urlsplit(target)
            if not parts.scheme and not parts.netloc:
                yield name, parts.path, unquote(parts.fragment)


def test_every_page_is_in_the_site(pages: dict[str, Links]) -> None:
    expected = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert expected | {"index.html", "results.html", "404.html"} == set(pages)


def test_links_lead_to_pages_and_headings(pages: dict[str, Links], site: Path) -> None:
    dead = []
    for page, path, place in inside(pages):
        target = (Path(page).parent / unquote(path)).as_posix() if path not in ("", ".") else page
        if target not in pages:
            if not (site / target).is_file():
                dead.append(f"{page}: {path}")
        elif place and place not in pages[target].places:
            dead.append(f"{page}: {path}#{place}")
    assert not dead


def test_pages_load_only_files_of_the_site(pages: dict[str, Links], site: Path) -> None:
    """They open without a network."""
    for page, links in pages.items():
        if page == "404.html":  # its paths begin at the root of a server
            continue
        for source in links.loaded:
            assert not urlsplit(source).netloc, f"{page} loads {source}"
            assert (site / Path(page).parent / source).is_file(), f"{page} loads {source}"


def test_every_method_is_explained(site: Path) -> None:
    text = (site / "methods.html").read_text(encoding="utf-8")
    assert len(re.findall(r'id="unflip\.methods\.\w+"', text)) == text.count(
        'class="doc doc-object doc-module"'
    )
    assert "Differences" in text or "difference" in text


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tab of a real browser."""
    path = ROOT / "tests" / "report" / "browser.py"
    spec = importlib.util.spec_from_file_location("site_browser", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.CHROMIUM is None:
        pytest.skip("needs chromium")
    with module.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


PHONE, DESKTOP = (390, 800), (1280, 900)
# Elements that reach beyond the screen, although nothing around them scrolls.
TOO_WIDE = """
[...document.querySelectorAll('article *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (box.width === 0 || box.right <= WIDTH + 1) return false;
  for (let p = e; p && p.tagName !== 'ARTICLE'; p = p.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false;
  return true;
}).map(e => e.tagName + ' ' + e.textContent.slice(0, 60))
"""
BROKEN_IMAGES = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"


def check(tab: Any, path: Path, size: tuple[int, int]) -> list[str]:
    """What is wrong with a page in a real browser."""
    before = len(tab.problems)
    tab.open(path, *size)
    wrong = [f"console: {text}" for text in tab.problems[before:]]
    wrong += [f"too wide: {text}" for text in tab.js(TOO_WIDE.replace("WIDTH", str(size[0])))]
    wrong += [f"image: {source}" for source in tab.js(BROKEN_IMAGES)]
    if not tab.js("document.querySelector('h1')?.textContent"):
        wrong.append("no heading")
    if tab.js("document.documentElement.scrollWidth") > size[0]:
        wrong.append("scrolls sideways")
    return [f"{path.name} at {size[0]} pixels: {text}" for text in wrong]


def test_every_page_opens_in_a_browser(tab: Any, site: Path) -> None:
    """Without errors, and without scrolling sideways on a phone."""
    wrong = []
    for path in sorted(site.glob("*.html")):
        if path.name != "404.html":
            wrong += check(tab, path, PHONE)
    for name in ("index.html", "methods.html", "networks.html"):
        wrong += check(tab, site / name, DESKTOP)
    assert not wrong, "\n".join(wrong)
    assert all(url.startswith(("file:", "data:", "blob:")) for url in tab.requests)

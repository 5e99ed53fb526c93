"""How we write: one sentence per line in Markdown, short sentences, one spelling, no private idiom."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
MOST_WORDS = 25  # per sentence

LIST_ITEM = re.compile(r"^\s*([-*]|\d+\.) +")
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|approx|Fig|Eq)\.")
SENTENCE_END = re.compile(r"[.!?:…][)\"'*_]*$")
NEXT_SENTENCE = re.compile(r"[.!?][)\"'*_]*\s+(?=[\"'(*_]*[A-Z0-9Α-Ωα-ω])")

BRITISH = re.compile(
    r"(?<![.\w])(\w*colour\w*|\w*cent(re|red|res|ring)|gr[e]y\w*|licen[c]e\w*|\w*behaviour\w*|\w*neighbour\w*|\w*favour\w*"
    r"|\w*(normal|general|recogn|optim|standard|initial|quant|binar|summar|serial|special|minim|maxim|vector"
    r"|parallel|real|organ|local|capital|visual|synchron|emphas|character)is(e|es|ed|ing|ation|ations|er|ers)"
    r"|\w*(label|model|cancel|travel)l(ed|ing)|analys(e|ed|es|ing)|artefact\w*|catalogue\w*|misspelt|learnt|whilst)\b",
    re.IGNORECASE,
)
IDIOM = re.compile(r"\b(is there|anew|goes on|without a word|of one's own)\b")


class Line(NamedTuple):
    number: int
    text: str  # without the marker of a list item
    item: bool
    follows: bool  # the line before belongs to the same paragraph or list item


def markdown_files() -> list[Path]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in sorted(set(done.stdout.splitlines())) if (ROOT / name).exists()]


def prose(text: str) -> Iterator[Line]:
    """The lines of a page that are sentences: not code, tables, headings, comments or pictures."""
    fenced, blank, follows, in_list = False, True, False, False
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            fenced, follows = not fenced, False
            continue
        if fenced:
            continue
        if not bare:
            blank, follows = True, False
            continue
        item = LIST_ITEM.match(line) is not None
        indent = len(line) - len(line.lstrip())
        in_list = item or (in_list and indent > 0)
        if not item and indent >= 4 and (blank or not in_list):
            continue  # an indented block of code
        blank = False
        if bare.startswith(("|", "#", "<!--", "![", ":::")):  # the last is a docstring on the site
            follows = False
            continue
        yield Line(number, LIST_ITEM.sub("", line).strip(), item, follows and not item)
        follows = True


def plain(text: str) -> str:
    """Code as one word, links as their text, abbreviations without their point."""
    text = LINK.sub(lambda link: link[1], CODE.sub("X", text))
    return ABBREVIATION.sub("X", text)


def problems(page: str) -> list[str]:
    lines = list(prose(page))
    found = []
    for line, after in zip_longest(lines, lines[1:]):
        text = plain(line.text)
        continues = after is not None and after.follows
        fragment = line.item and not continues  # a list item may be a name or a phrase
        if not SENTENCE_END.search(text) and not fragment:
            found.append(f"{line.number}: the line ends inside a sentence: {line.text}")
        if NEXT_SENTENCE.search(text):
            found.append(f"{line.number}: more than one sentence: {line.text}")
        words = [word for word in text.split() if re.search(r"\w", word)]
        if len(words) > MOST_WORDS:
            found.append(f"{line.number}: {len(words)} words: {line.text}")
    return found


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_one_short_sentence_per_line(path: Path) -> None:
    found = problems(path.read_text(encoding="utf-8"))
    assert not found, f"{path.relative_to(ROOT)}\n" + "\n".join(found)


@pytest.mark.parametrize(
    "page",
    [
        "One sentence. Another one.",
        "A sentence that goes\non in the next line.",
        "- An item. It has two sentences.",
        "- An item that is\n  wrapped.",
        " ".join(["word"] * 26) + ".",
    ],
)
def test_a_mistake_is_found(page: str) -> None:
    assert problems(page)


@pytest.mark.parametrize(
    "page",
    [
        "One sentence.\nAnother one (with `a. B` in it).",
        "- a phrase\n- An item.\n  It goes with a second sentence.",
        "Han et al. 2020 have 85.06 %, e.g. here:\n\n    code that is not. A sentence\n\n| a. B | c |",
        "```python\nnothing. Here\n```",
    ],
)
def test_good_lines_pass(page: str) -> None:
    assert not problems(page)


def written() -> list[Path]:
    """Everything that a person reads: pages, and the sources with their comments, docstrings and messages."""
    endings = (".py", ".js", ".css", ".html", ".yaml", ".cu")
    sources = [path for path in (ROOT / "src" / "unflip").rglob("*") if path.suffix in endings]
    return [*markdown_files(), *sorted(sources)]


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [(BRITISH, "American spelling"), (IDIOM, "plain words")],
    ids=["spelling", "idiom"],
)
def test_words(pattern: re.Pattern[str], instead: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in: {line.strip()}"
        for path in written()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, f"write {instead}:\n" + "\n".join(found)

"""The readable names of classes, from the files that image sets bring along."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from unflip.data.errors import DataError

# One class per line: its key, white space, its names. The lines of the first two are in the order of the labels.
ORDERED_FILES = ("classes.txt", "LOC_synset_mapping.txt")
FILES = (*ORDERED_FILES, "words.txt")

WNID = re.compile(r"n\d{8}(?=$|[^0-9])")  # WordNet's key of a noun, such as n01440764


def names_of_keys(keys: Sequence[str], places: Iterable[Path]) -> tuple[str, ...]:
    """The name of each class, from the first file in ``places`` that has all keys; else the keys themselves."""
    for path in _files(places, FILES):
        found = dict(_lines(path))
        if all(key in found for key in keys):
            return short_names(keys, [found[key] for key in keys])
    return tuple(keys)


def classes_in_order(count: int, places: Iterable[Path]) -> list[tuple[str, str]] | None:
    """Key and name of the classes 0..count-1, from a file whose lines are in the order of the labels."""
    for path in _files(places, ORDERED_FILES):
        found = _lines(path)
        if len(found) < count:
            raise DataError(
                f"{path} has {len(found)} classes, but there are labels up to {count - 1}. "
                "Write one line per class: its key, a tab, its name."
            )
        return found
    return None


def short_names(keys: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
    """The first of the names in "tench, Tinca tinca"; more where two classes would be called the same."""
    first = [text.partition(",")[0].strip() or key for key, text in zip(keys, texts, strict=True)]
    once = _unique(first, texts)
    return tuple(_unique(once, [f"{name} ({key})" for name, key in zip(once, keys, strict=True)]))


def _unique(names: Sequence[str], longer: Sequence[str]) -> list[str]:
    count = Counter(names)
    return [name if count[name] == 1 else long for name, long in zip(names, longer, strict=True)]


def wnid(name: str) -> str | None:
    """The WNID at the beginning of an image's name, as in n01440764_10026.JPEG."""
    found = WNID.match(name)
    return found[0] if found else None


def _files(places: Iterable[Path], names: Iterable[str]) -> list[Path]:
    there = [place / name for place in places for name in names]
    return [path for path in there if path.is_file()]


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [(key, " ".join(rest[0].split()) if rest else key) for key, *rest in pairs]

"""What ``unflip data show`` tells about images on disk, and the check of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from unflip.data.errors import DamagedImage
from unflip.data.listing import ListedPart, ListedStore, Numbers
from unflip.data.pack import Pack, PackPart
from unflip.data.pack_format import Header
from unflip.data.workers import results
from unflip.pictures import PixelError, decode_rgb
from unflip.printable import printable

SHOWN = 5  # classes, and ignored files

Store = Pack | ListedStore
Row = tuple[str, str]


def rows(store: Store) -> list[Row]:
    """Lines of a table about the images."""
    parts: list[tuple[str, PackPart | ListedPart]]
    parts = [("training images", store.train), ("test images", store.test)]
    classes = len(store.keys)
    found = [("layout", store.kind), ("classes", _classes(store))]
    found += [
        (name, f"{len(part):,}, {_per_class(part.labels, classes)} per class")
        for name, part in parts
    ]
    lengths = [known for _, part in parts if (known := part.lengths()) is not None]
    if lengths:
        found.append(("bytes per image", _spread(np.concatenate(lengths))))
        found.append(("bytes", in_bytes(sum(int(part.sum()) for part in lengths))))
    if isinstance(store, Pack):
        sizes = np.concatenate([store.train.sizes(), store.test.sizes()])
        found += [("width", _spread(sizes[:, 0])), ("height", _spread(sizes[:, 1]))]
        found += _made(store.header)
    if others := ignored(store):
        found.append(("ignored", others))
    return [*found, *((f"fingerprint of {k}", printable(v)) for k, v in store.fingerprint.items())]


def ignored(store: Store) -> str:
    """Number and first names of the files and folders in class folders that are not read; empty if there are none."""
    if isinstance(store, Pack):
        return ""
    names = [*store.train.ignored, *store.test.ignored]
    shown = ", ".join(printable(name.removeprefix(f"{store.path}/")) for name in names[:SHOWN])
    more = ", …" if len(names) > SHOWN else ""
    return f"{len(names):,}: {shown}{more}" if names else ""


def damaged(store: Store, workers: int) -> Iterator[tuple[int, list[str]]]:
    """Read every image, chunk by chunk: how many are read, and what is wrong with the damaged ones of a chunk.

    A pack is compared with its CRCs. Images of other layouts are decoded.
    """
    chunks = [
        (part, numbers)
        for part, images in enumerate((store.train, store.test))
        for numbers in images.reading_chunks()
    ]
    done = 0
    with closing(results(_check_chunk, store, chunks, workers)) as found:
        for (_, numbers), problems in zip(chunks, found, strict=True):
            done += len(numbers)
            yield done, problems


def in_bytes(count: int) -> str:
    """For people: 140.2 GB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _check_chunk(store: Store, chunk: tuple[int, Numbers]) -> list[str]:
    """In a worker process."""
    part, numbers = chunk
    images = (store.train, store.test)[part]
    problems = []
    for number in numbers.tolist():
        try:
            data = images.read(number)
            if not isinstance(store, Pack):
                decode_rgb(data, images.name(number))
        except (DamagedImage, PixelError) as error:
            problems.append(printable(str(error).rstrip(".")))
    return problems


def _classes(store: Store) -> str:
    pairs = list(zip(store.keys, store.classes, strict=True))[:SHOWN]
    shown = ", ".join(key if key == name else f"{name} ({key})" for key, name in pairs)
    more = ", …" if len(store.keys) > SHOWN else ""
    return f"{len(store.keys):,}: {printable(shown)}{more}"


def _per_class(labels: Numbers, classes: int) -> str:
    counts = np.bincount(labels, minlength=classes)
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _spread(values: Numbers) -> str:
    low, middle, high = (int(value) for value in np.percentile(values, [0, 50, 100]))
    return f"{low:,} to {high:,}, median {middle:,}"


def _made(header: Header) -> list[Row]:
    how = "as they were"
    if header.size is not None:
        how = (
            f"short side at most {header.size} px, JPEG quality {header.quality} ({header.encoder})"
        )
    found = [("made from", header.layout), ("stored", how)]
    if header.skipped:
        names = ", ".join(header.skipped_names)
        more = ", …" if header.skipped > len(header.skipped_names) else ""
        found.append(("skipped as damaged", f"{header.skipped:,}: {names}{more}"))
    return [(field, printable(text)) for field, text in found]

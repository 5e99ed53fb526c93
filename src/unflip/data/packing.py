"""``unflip data pack``: images of any layout, checked, and written as one pack.

The pack depends on the images and options alone: not on the number of worker processes, nor on interruptions.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unflip.data.errors import DamagedImage, DataError
from unflip.data.hashes import short_hash
from unflip.data.listing import Labels, Names, Numbers
from unflip.data.pack import Pack
from unflip.data.pack_format import (
    PACK_MAGIC,
    RECORD,
    SUFFIX,
    Header,
    Records,
    content_hash,
    index_path,
)
from unflip.data.partial_pack import Encoded, Job, Marks, PartialPack
from unflip.data.workers import results
from unflip.pictures import PixelError, decode_rgb
from unflip.printable import printable

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_QUALITY = 90
MOST_BYTES = 2**32 - 1  # of one image
NAMED = 20  # skipped images that an index names

Report = Callable[[int, int], None]  # is told how many images of how many are packed


class PartToPack(Protocol):
    @property
    def labels(self) -> Labels: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes: ...

    def name(self, index: int) -> str: ...

    def marks(self) -> Marks: ...

    def reading_chunks(self) -> list[Numbers]: ...


class StoreToPack(Protocol):
    """What can be packed: a folder in one of the layouts, or another pack."""

    @property
    def kind(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def train(self) -> PartToPack: ...

    @property
    def test(self) -> PartToPack: ...


@dataclass(frozen=True)
class Encoding:
    """How images are stored: as they are, or with their short side resized to ``size`` and encoded as JPEG."""

    size: int | None = None
    quality: int = DEFAULT_QUALITY

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise DataError(f"size={self.size} must be at least 1 pixel.")
        if not 1 <= self.quality <= 100:
            raise DataError(f"quality={self.quality} must be from 1 to 100.")

    def encode(self, data: bytes, name: str) -> Encoded:
        """Every image is decoded: a damaged one must be noticed now, not in the middle of training."""
        if len(data) > MOST_BYTES:
            raise PixelError(
                f"{name} has {len(data):,} bytes, more than a pack can hold; remove it"
            )
        picture = decode_rgb(data, name)
        if self.size is None:
            return Encoded(data, picture.width, picture.height)
        small = _shrunk(picture, self.size)
        file = io.BytesIO()
        try:
            small.save(file, "JPEG", quality=self.quality)
        except (OSError, ValueError) as error:  # JPEG has at most 65,500 pixels per side
            raise PixelError(
                f"{name} cannot be encoded as a JPEG of {small.width} × {small.height} pixels: {error}; "
                "crop or remove it, or give a smaller --size"
            ) from error
        return Encoded(file.getvalue(), small.width, small.height)

    def plain(self) -> dict[str, Any]:
        """For the index. The bytes of resized images depend on the version of Pillow too."""
        if self.size is None:
            return {"size": None, "quality": None, "encoder": None}
        return {"size": self.size, "quality": self.quality, "encoder": _encoder()}


def pack_images(
    store: StoreToPack,
    out: Path,
    encoding: Encoding,
    *,
    skip_damaged: bool = False,
    workers: int = 1,
    report: Report = lambda done, total: None,
) -> Pack:
    """Write the images of ``store`` as the pack ``out``. Resumes a call that was interrupted.

    A damaged image is an error that names it; with ``skip_damaged`` it is left out.
    """
    if out.suffix != SUFFIX:
        raise DataError(f"{out} should end in {SUFFIX}, such as {out.with_suffix(SUFFIX)}.")
    if out.is_dir():
        raise DataError(f"{out} is a folder. Give the pack to write: {out / out.name}")
    names = [_relative_names(store, part) for part in (store.train, store.test)]
    job = _job(store, encoding, names)
    marks = np.concatenate([store.train.marks(), store.test.marks()])
    if out.exists():
        return _complete(out, job, marks)
    _make_folder(out.parent)
    plan = _Plan(store)
    with PartialPack(out, job, marks[plan.numbers]) as partial:
        _refuse_changed(partial, plan, names)
        _refuse_skipped(partial, plan, names, skip_damaged)
        chunks = plan.chunks_from(partial.done)
        report(partial.done, len(plan))
        # Closed also when a damaged image stops the loop: that ends the worker processes.
        with closing(results(_encode_chunk, (store, encoding), chunks, workers)) as encoded:
            for images in encoded:
                _append(partial, images, skip_damaged)
                report(partial.done, len(plan))
        header, records, block = _index(store, partial, plan, names, job, encoding)
        partial.finish(header, records, block)
    return Pack(out)


class _Plan:
    """The order in which the images are read: training images first, each part as it is on the disk."""

    def __init__(self, store: StoreToPack) -> None:
        self.chunks = [
            (part, numbers)
            for part, images in enumerate((store.train, store.test))
            for numbers in images.reading_chunks()
        ]
        # The number of each image in the pack, in the order of reading: test images after training images.
        self.numbers = np.concatenate(
            [numbers + part * len(store.train) for part, numbers in self.chunks]
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def chunks_from(self, done: int) -> Iterator[tuple[int, Numbers]]:
        begin = 0
        for part, numbers in self.chunks:
            left = numbers[max(0, done - begin) :]
            begin += len(numbers)
            if len(left):
                yield part, left


def _encode_chunk(
    shared: tuple[StoreToPack, Encoding], chunk: tuple[int, Numbers]
) -> list[Encoded]:
    """In a worker process."""
    (store, encoding), (part, numbers) = shared, chunk
    images = (store.train, store.test)[part]
    encoded = []
    for number in numbers.tolist():
        try:
            data, name = images.read(number), images.name(number)
            encoded.append(encoding.encode(data, name))
        except (DamagedImage, PixelError) as error:
            encoded.append(Encoded(b"", 0, 0, str(error).rstrip(".")))
    return encoded


def _append(partial: PartialPack, images: list[Encoded], skip_damaged: bool) -> None:
    """All images before a damaged one are kept, so that packing resumes there."""
    damaged = next((n for n, image in enumerate(images) if image.problem), None)
    if damaged is None or skip_damaged:
        partial.append(images)
        return
    partial.append(images[:damaged])
    raise DataError(
        f"{images[damaged].problem}. {partial.done:,} images are packed; the same command resumes. "
        "To leave out damaged images, add --skip-damaged."
    )


def _refuse_changed(partial: PartialPack, plan: _Plan, names: list[list[str]]) -> None:
    """Images of two sources must not be mixed. A skipped image that has changed may be repaired: resume there."""
    changed, skipped = partial.changed(), partial.all_entries()["length"] == 0
    packed = np.flatnonzero(changed & ~skipped)
    if len(packed):
        name = _name(names, int(plan.numbers[packed[0]]))
        raise DataError(
            f"{partial.data_path} was begun with other images: {name} has changed since it was packed "
            f"({len(packed):,} of {partial.done:,} have). Give the same images to resume, or begin again: "
            f"delete {partial.data_path.name} and {partial.journal_path.name}."
        )
    if changed.any():
        partial.keep(int(np.argmax(changed)))


def _refuse_skipped(
    partial: PartialPack, plan: _Plan, names: list[list[str]], skip_damaged: bool
) -> None:
    skipped = np.flatnonzero(partial.all_entries()["length"] == 0)
    if len(skipped) and not skip_damaged:
        name = _name(names, int(plan.numbers[skipped[0]]))
        raise DataError(
            f"{partial.data_path} was begun with --skip-damaged and has skipped {len(skipped)} as damaged ({name}, …). "
            f"Give --skip-damaged again, or delete {partial.data_path.name} and {partial.journal_path.name}."
        )


def _index(
    store: StoreToPack,
    partial: PartialPack,
    plan: _Plan,
    names: list[list[str]],
    job: Job,
    encoding: Encoding,
) -> tuple[Header, Records, bytes]:
    entries, labels = partial.all_entries(), np.concatenate([store.train.labels, store.test.labels])
    lengths = entries["length"].astype(np.int64)
    records = np.zeros(len(plan), dtype=RECORD)
    for column in ("length", "width", "height", "crc"):
        records[column][plan.numbers] = entries[column]
    records["offset"][plan.numbers] = len(PACK_MAGIC) + np.cumsum(lengths) - lengths
    records["label"] = labels
    marks = np.zeros(len(plan), np.uint64)
    marks[plan.numbers] = entries["mark"]
    kept = records["length"] > 0
    for part, count in (("training", kept[: len(store.train)]), ("test", kept[len(store.train) :])):
        if not count.any():
            raise DataError(
                f"{store.path} has no {part} image that can be decoded. Repair the images."
            )
    left = np.bincount(
        labels[: len(store.train)][kept[: len(store.train)]], minlength=len(store.keys)
    )
    if not left.all():
        raise DataError(
            f"{store.path} has no training image of class {store.keys[int(np.argmin(left))]} that can be decoded. "
            "Repair some, or remove the class."
        )
    block = Names.of(_name(names, number) for number in np.flatnonzero(kept).tolist())
    skipped = [printable(_name(names, number)) for number in np.flatnonzero(~kept)[:NAMED].tolist()]
    records = records[kept]
    records["name_end"] = block.ends
    header = Header(
        images=len(records),
        train=int(kept[: len(store.train)].sum()),
        names=len(block.block),
        classes=store.classes,
        keys=store.keys,
        pack_length=partial.length(),
        pack_hash=content_hash(records).hex(),
        layout=store.kind,
        job=_job_hash(job, marks),
        skipped=int((~kept).sum()),
        skipped_names=tuple(skipped),
        **encoding.plain(),
    )
    return header, records, bytes(block.block)


def _complete(out: Path, job: Job, marks: Marks) -> Pack:
    """The existing pack, if it was made from these images with these options."""
    try:
        pack = Pack(out)
    except DataError as error:
        raise DataError(
            f"{out} exists, but cannot be opened. {error} To pack again, delete {out.name} first."
        ) from error
    if pack.header.job != _job_hash(job, marks):
        raise DataError(
            f"{out} exists, and was made from other images or with other options. Give another OUT, or delete "
            f"{out.name} and {index_path(out).name}."
        )
    return pack


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{path} cannot be made: {error.strerror} ({error.filename}). Choose another OUT."
        ) from error


def _job(store: StoreToPack, encoding: Encoding, names: list[list[str]]) -> Job:
    """What must be the same to resume. Marks are not part of it: a damaged image may be repaired in between."""
    text = "\0".join((*names[0], *names[1], *store.keys, *store.classes))
    return {
        "layout": store.kind,
        "training images": len(store.train),
        "test images": len(store.test),
        "names": short_hash(
            text.encode("utf-8", "surrogatepass"), store.train.labels, store.test.labels
        ),
        **encoding.plain(),
    }


def _job_hash(job: Job, marks: Marks) -> str:
    """By which a finished pack is recognized: options, names, and what the images were when they were packed."""
    return short_hash(json.dumps(job, sort_keys=True).encode(), marks)


def _relative_names(store: StoreToPack, part: PartToPack) -> list[str]:
    prefix = f"{store.path}/"
    return [part.name(index).removeprefix(prefix) for index in range(len(part))]


def _name(names: list[list[str]], number: int) -> str:
    train, test = names
    return train[number] if number < len(train) else test[number - len(train)]


def _shrunk(picture: Image, size: int) -> Image:
    """The short side resized to ``size``; never enlarged."""
    from PIL.Image import Resampling

    short = min(picture.size)
    if short <= size:
        return picture
    width, height = (max(1, round(side * size / short)) for side in picture.size)
    return picture.resize((width, height), Resampling.BICUBIC)


def _encoder() -> str:
    from PIL import __version__, features

    return f"Pillow {__version__}, libjpeg {features.version('libjpeg_turbo') or features.version('jpg')}"

"""``unflip data pack`` and ``unflip data show``: large image sets on disk."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unflip.cli.app import app, print_table
from unflip.printable import printable
from unflip.tables import Table

if TYPE_CHECKING:
    from unflip.data.pack import Pack

SECONDS = 5  # between two lines of progress

data = typer.Typer(
    help="Pack large image sets into one file, and show what is in them.",
    epilog="Example: unflip data pack imagenet imagenet.pack",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(data, name="data")

Workers = Annotated[
    int | None, typer.Option(min=1, help="Worker processes. Default: one per core.")
]


@data.command("pack", epilog="Example: unflip data pack imagenet imagenet.pack --size 256")
def pack_data(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder of the images, or another pack.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The pack to write: NAME.pack.")],
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Resize the short side to this many pixels; never enlarge."),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="JPEG quality of resized images. Default: 90."),
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out images that cannot be decoded.")
    ] = False,
    workers: Workers = None,
) -> None:
    """Pack an image set into one file that training reads quickly.

    SRC is a folder in one of three layouts. Class folders: train/CLASS/*.jpg and val/CLASS/*.jpg. WebDataset tars:
    *train*.tar and *val*.tar, with KEY.jpg and KEY.cls. Hugging Face's Parquet files: train-*.parquet and
    validation-*.parquet.

    Every image is decoded once. A damaged one stops the command with its path, unless --skip-damaged is given.

    Without --size the encoded images are stored as they are. --size 256 makes a small copy, which trains faster: about
    35 GB for ImageNet.

    The same command resumes after Ctrl-C, kill or a full disk. OUT and OUT.index belong together: copy both.
    """
    from unflip.data.describe import ignored
    from unflip.data.errors import DataError
    from unflip.data.packing import DEFAULT_QUALITY, Encoding, pack_images
    from unflip.data.store import open_any

    if quality is not None and size is None:
        raise DataError(
            f"--quality {quality} has no effect without --size: images are stored as they are. Add --size 256."
        )
    encoding = Encoding(size, quality or DEFAULT_QUALITY)
    before = out.exists()
    store = open_any(src)
    if others := ignored(store):
        print(f"files and folders that are ignored: {others}")
    with Progress(f"packing {src}") as progress:
        packed = pack_images(
            store,
            out,
            encoding,
            skip_damaged=skip_damaged,
            workers=workers or _cores(),
            report=progress.show,
        )
    _print_packed(packed, before)


def _print_packed(pack: Pack, before: bool) -> None:
    from unflip.data.describe import in_bytes

    print(
        f"{pack.path}{' is complete' if before else ''}: {len(pack.train):,} training and {len(pack.test):,} test "
        f"images of {len(pack.keys):,} classes, {in_bytes(pack.header.pack_length)}"
    )
    if pack.header.skipped:
        print(f"skipped as damaged: {pack.header.skipped:,}")
        for name in pack.header.skipped_names:
            print(f"  {printable(name)}")
        if pack.header.skipped > len(pack.header.skipped_names):
            print("  …")


@data.command("show", epilog="Example: unflip data show imagenet.pack --verify")
def show_data(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A pack, or a folder that could be packed.")
    ],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every image, and name those that are damaged."),
    ] = False,
    workers: Workers = None,
) -> None:
    """Show classes, counts, sizes and hashes of an image set.

    --verify compares the images of a pack with their CRCs, and decodes those of other layouts.
    """
    from unflip.data.describe import rows
    from unflip.data.store import open_any

    store = open_any(path)
    print_table(Table(("image set", printable(str(path))), rows(store)))
    if verify:
        _verify(store, workers or _cores())


def _verify(store: Any, workers: int) -> None:
    from unflip.data.describe import damaged
    from unflip.data.errors import DataError

    total, wrong = len(store.train) + len(store.test), 0
    with Progress(f"reading {store.path}") as progress:
        progress.show(0, total)
        for done, problems in damaged(store, workers):
            progress.show(done, total)
            for problem in problems:
                print(problem)
            wrong += len(problems)
    if wrong:
        raise DataError(f"{wrong:,} of {total:,} images in {store.path} are damaged; see above.")
    print(f"all {total:,} images are intact")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """A bar in a terminal, elsewhere a line every few seconds. For a with block."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.began = self.printed = time.monotonic()
        self.first: int | None = None
        self.bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, done: int, total: int) -> None:
        if self.first is None:
            self._begin(done, total)
        elif self.bar:
            self.bar.update(self.task, completed=done)
        elif time.monotonic() - self.printed > SECONDS:
            self.printed = time.monotonic()
            print(
                f"{self.what}: {done:,} of {total:,} images, {self._left(done, total)}", flush=True
            )

    def _begin(self, done: int, total: int) -> None:
        self.first, self.began = done, time.monotonic()
        resumed = f", resuming after {done:,}" if done else ""
        print(f"{self.what}: {total:,} images{resumed}", flush=True)
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            text = TextColumn("{task.description}", markup=False)  # a path may have brackets
            columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, transient=True)
            self.task = self.bar.add_task(self.what, total=total, completed=done)
            self.bar.start()

    def _left(self, done: int, total: int) -> str:
        speed = (done - (self.first or 0)) / (time.monotonic() - self.began)
        return f"{speed:,.0f} images/s, {(total - done) / max(speed, 1e-9) / 60:.0f} min left"

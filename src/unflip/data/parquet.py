"""Parquet files as Hugging Face publishes image sets: columns image (bytes and path) and label.

Needs pyarrow, which is imported when the files are opened. A file is read in blocks ("row groups") of many images, so
this layout is for packing, which reads the images in the order of the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unflip.data.errors import DamagedImage, DataError
from unflip.data.listing import Labels, ListedPart, ListedStore, Names, Numbers, in_chunks, in_order
from unflip.data.shards import check_test_labels, files_with_suffix, numbered_classes, parts_of
from unflip.hints import NotInstalled

KIND = "Parquet files"
MOST_CHUNK = 128  # images
MOST_BYTES = 4 << 30  # of the images of a block, which is read at once
LONGEST_NAME = 4096  # bytes
ROWS_AT_ONCE = 1024  # of names and labels
COLUMNS = "columns image (a struct of bytes and path) and label (an integer)"


class Rows:
    """The images of some files in their order; image i is row ``i - starts[b]`` of block b."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.blocks: list[tuple[int, int]] = []  # file and row group
        self.sizes: list[int] = []  # of the blocks in bytes
        rows: list[int] = []
        labels: list[Labels] = []
        self.names: list[str] = []
        for number, file in enumerate(files):
            for group, size, block_labels, names in _blocks(file):
                self.blocks.append((number, group))
                self.sizes.append(size)
                rows.append(len(block_labels))
                labels.append(block_labels)
                self.names += names
        self.starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        if not self.names:
            raise DataError(f"{files[0]} holds no images. Download it again, or remove it.")
        self.labels = np.concatenate(labels)

    def file_of(self, row: int) -> Path:
        return self.files[self.blocks[self._block(row)][0]]

    def read_block(self, row: int) -> tuple[int, list[bytes | None]]:
        """All images of the block of ``row``, and the number of its first."""
        block = self._block(row)
        number, group = self.blocks[block]
        with _opened(self.files[number]) as file:
            return int(self.starts[block]), _images(self.files[number], file, group)

    def _block(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1


class ParquetPart(ListedPart):
    def __init__(self, rows: Rows, keys: tuple[str, ...]) -> None:
        self.order = in_order(rows.labels, rows.names, keys)
        super().__init__(rows.labels[self.order], Names.of(rows.names[i] for i in self.order))
        self.rows = rows
        rows.names = []  # kept in this part's order, in less memory
        self._read: tuple[int, list[bytes | None]] = (0, [])  # the last block

    def read(self, index: int) -> bytes:
        row = int(self.order[index])
        if not 0 <= row - self._read[0] < len(self._read[1]):
            self._read = self.rows.read_block(row)
        data = self._read[1][row - self._read[0]]
        if data is None:
            raise DamagedImage(
                f"{self.name(index)} has no bytes: the file holds only its path. Download the data set with its images."
            )
        return data

    def name(self, index: int) -> str:
        return f"{self.rows.file_of(int(self.order[index]))}/{self.names[index]}"

    def lengths(self) -> None:
        return None

    def marks(self) -> npt.NDArray[np.uint64]:
        """The size of each image's block, which is known without reading the images."""
        sizes = np.repeat(np.array(self.rows.sizes, np.uint64), np.diff(self.rows.starts))
        return sizes[self.order]

    def reading_chunks(self) -> list[Numbers]:
        """Whole blocks, since a part of one takes as long to read."""
        on_disk = np.argsort(self.order, kind="stable").astype(np.int64)
        blocks = np.split(on_disk, self.rows.starts[1:-1])
        return [chunk for block in blocks for chunk in in_chunks(block, MOST_CHUNK)]


def find_parquet(folder: Path) -> list[Path]:
    return files_with_suffix(folder, ".parquet")


def open_parquet(folder: Path, files: list[Path]) -> ListedStore:
    train_files, test_files = parts_of(folder, files, _has_labels)
    train, test = Rows(train_files), Rows(test_files)
    texts = _class_names(train_files[0])
    keys, classes = numbered_classes(folder, train.labels, train.names, texts)
    check_test_labels(test.labels, len(keys), lambda row: f"{test.file_of(row)}/{test.names[row]}")
    return ListedStore(
        kind=KIND,
        path=folder,
        classes=classes,
        keys=keys,
        train=ParquetPart(train, keys),
        test=ParquetPart(test, keys),
    )


@contextmanager
def _opened(path: Path, indexed: list[str] | None = None) -> Iterator[Any]:
    """The file. Columns ``indexed`` are read as numbers of a dictionary. Errors become a DataError that names the
    file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise NotInstalled("reading Parquet files", "pyarrow") from error
    try:
        with ParquetFile(path, read_dictionary=indexed) as file:
            yield file
    except (ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet with {COLUMNS}: {error}. Download it again."
        ) from error


def _images(path: Path, file: Any, group: int) -> list[bytes | None]:
    """The images of a block, read one by one: in a larger batch, a dictionary could repeat a large image often."""
    images: list[bytes | None] = []
    left = MOST_BYTES
    for batch in file.iter_batches(1, row_groups=[group], columns=["image.bytes"]):
        [image] = batch.column("image").to_pylist()
        images.append((image or {}).get("bytes"))
        left -= len(images[-1] or b"")
        if left < 0:
            raise DataError(_too_large(path, group, f"images of more than {MOST_BYTES:,} bytes"))
    return images


def _too_large(path: Path, group: int, what: str) -> str:
    return (
        f"{path}: row group {group} has {what}; at most {MOST_BYTES:,} bytes are read at once. Write the file with "
        "smaller row groups."
    )


def _blocks(path: Path) -> Iterator[tuple[int, int, Labels, list[str]]]:
    """Number, bytes, labels and names of each block; the images themselves are not read."""
    with _opened(path) as file:
        _check_columns(path, file.schema_arrow)
        one_by_one = _has_delta_names(file)
    # Names are read as numbers of a dictionary, because a small file may repeat a long one in every row.
    with _opened(path, None if one_by_one else ["image.path"]) as file:
        at_once = 1 if one_by_one else ROWS_AT_ONCE
        first, bytes_on_disk = 0, path.stat().st_size
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).total_byte_size
            if size > MOST_BYTES:
                raise DataError(_too_large(path, group, f"{size:,} bytes"))
            labels: list[Labels] = [np.zeros(0, np.int64)]
            names: list[str] = []
            columns = ["label", "image.path"]
            for batch in file.iter_batches(at_once, row_groups=[group], columns=columns):
                labels.append(_labels(path, batch.column("label")))
                found = _names(path, batch.column("image"))
                names += [name or f"row-{first + row:08d}" for row, name in enumerate(found)]
                first += len(found)
                if first > bytes_on_disk:
                    raise DataError(
                        f"{path} lists more than {bytes_on_disk:,} images, but has only that many bytes. Download it "
                        "again."
                    )
            yield group, size, np.concatenate(labels), names


def _has_delta_names(file: Any) -> bool:
    """Whether names are encoded as differences: Arrow cannot read these as numbers of a dictionary."""
    groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    return any(
        column.path_in_schema == "image.path"
        and any(encoding.startswith("DELTA") for encoding in column.encodings)
        for column in columns
    )


def _labels(path: Path, column: Any) -> Labels:
    if column.null_count:
        raise DataError(f"{path} has an image without label. Remove the row.")
    return column.to_numpy(zero_copy_only=False).astype(np.int64)


def _names(path: Path, column: Any) -> list[str | None]:
    from pyarrow import DictionaryArray, compute

    paths = column.field("path")
    texts = paths.dictionary if isinstance(paths, DictionaryArray) else paths
    lengths = compute.binary_length(texts.cast("large_binary"))  # views have no lengths
    longest = compute.max(lengths).as_py() or 0
    if longest > LONGEST_NAME:
        raise DataError(
            f"{path} has an image name of {longest:,} bytes; at most {LONGEST_NAME:,} are supported. Shorten "
            "image.path."
        )
    return [(image or {}).get("path") for image in column.to_pylist()]


def _check_columns(path: Path, schema: Any) -> None:
    from pyarrow.types import is_integer, is_null, is_struct

    def is_bytes(kind: Any) -> bool:
        return str(kind) in ("binary", "large_binary", "binary_view")

    def is_text(kind: Any) -> bool:
        return str(kind) in ("string", "large_string", "string_view")

    there = {field.name: field.type for field in schema}
    image, label = there.get("image"), there.get("label")
    fields = {field.name for field in image} if image is not None and is_struct(image) else set()
    right = {"bytes", "path"} <= fields and label is not None and is_integer(label)
    if right and image is not None:
        types = image.field("bytes").type, image.field("path").type
        right = is_bytes(types[0]) and (is_text(types[1]) or is_null(types[1]))
    if not right:
        raise DataError(
            f"{path} has the columns {', '.join(there)}. It should have the {COLUMNS}, as Hugging Face writes them."
        )


def _has_labels(path: Path) -> bool:
    """Hugging Face writes -1 where there is no label."""
    _, _, labels, _ = next(_blocks(path), (0, 0, np.zeros(0), []))
    return len(labels) > 0 and int(labels[0]) >= 0


def _class_names(path: Path) -> list[str] | None:
    """From the note that Hugging Face's library leaves in the schema."""
    with _opened(path) as file:
        note = (file.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        names = json.loads(note or b"")["info"]["features"]["label"]["names"]
    except (TypeError, ValueError, KeyError, RecursionError):
        return None
    right = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if right else None

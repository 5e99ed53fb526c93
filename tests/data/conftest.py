"""A small image set, written in each of the layouts that can be packed."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

KEYS = ("n01440764", "n02102040", "n03028079")
NAMES = (
    "tench, Tinca tinca",
    "English springer, English springer spaniel",
    "church, church building",
)


@dataclass(frozen=True)
class Sample:
    part: str
    label: int
    name: str  # of the file
    data: bytes

    @property
    def stem(self) -> str:
        return self.name.partition(".")[0]


def encoded(seed: int, width: int, height: int, mode: str = "RGB", kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def make_samples() -> list[Sample]:
    """In the order in which every layout numbers them, with some of ImageNet's peculiarities."""
    found = []
    for label, key in enumerate(KEYS):
        for number in range(9 - label):
            width, height = 20 + 3 * number, 30 - number
            data = encoded(100 * label + number, width, height)
            if number == 3:
                data = encoded(number, width, height, "CMYK")
            if number == 4:
                data = encoded(number, width, height, "L")
            if number == 5:
                data = encoded(number, width, height, kind="PNG")  # though it is called .JPEG
            found.append(Sample("train", label, f"{key}_{number:03d}.JPEG", data))
    for number in range(6):
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        found.append(Sample("val", number // 2, name, encoded(900 + number, 40, 24)))
    return found


def write_folders(root: Path, samples: list[Sample]) -> Path:
    for sample in samples:
        path = root / sample.part / KEYS[sample.label] / sample.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.data)
    lines = [f"{key} {name}\n" for key, name in zip(KEYS, NAMES, strict=True)]
    (root / "LOC_synset_mapping.txt").write_text("".join(lines))
    return root


def shuffled(samples: list[Sample]) -> list[Sample]:
    return [samples[i] for i in np.random.default_rng(7).permutation(len(samples))]


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_tars(root: Path, samples: list[Sample]) -> Path:
    """Shuffled over two tars of training images and one of test images."""
    root.mkdir(parents=True, exist_ok=True)
    for part, names in (("train", ("train-0000", "train-0001")), ("val", ("validation-00",))):
        chosen = shuffled([sample for sample in samples if sample.part == part])
        for number, name in enumerate(names):
            with tarfile.open(root / f"imagenet1k-{name}.tar", "w") as tar:
                for sample in chosen[number :: len(names)]:
                    add(tar, f"{sample.stem}.cls", str(sample.label).encode())
                    add(tar, f"{sample.stem}.jpg", sample.data)
                    add(tar, f"{sample.stem}.json", b"{}")
    lines = [f"{key}\t{name}\n" for key, name in zip(KEYS, NAMES, strict=True)]
    (root / "classes.txt").write_text("".join(lines))
    return root


def write_parquet(root: Path, samples: list[Sample]) -> Path:
    """As Hugging Face does: shuffled, in row groups, the key of the class after the name."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root.mkdir(parents=True, exist_ok=True)
    note = {"info": {"features": {"label": {"names": list(NAMES), "_type": "ClassLabel"}}}}
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", image_type), ("label", pa.int64())], metadata={"huggingface": json.dumps(note)}
    )
    for part, name in (("train", "train"), ("val", "validation")):
        chosen = shuffled([sample for sample in samples if sample.part == part])
        for number in range(2):
            mine = chosen[number::2]
            images = [{"bytes": s.data, "path": f"{s.stem}_{KEYS[s.label]}.JPEG"} for s in mine]
            table = pa.Table.from_pydict(
                {"image": images, "label": [sample.label for sample in mine]}, schema=schema
            )
            path = root / f"{name}-{number:05d}-of-00002.parquet"
            parquet.write_table(table, path, row_group_size=4)
    return root


LAYOUTS: dict[str, Callable[[Path, list[Sample]], Path]] = {
    "folders": write_folders,
    "tars": write_tars,
    "parquet": write_parquet,
}


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return make_samples()


@pytest.fixture
def write(tmp_path: Path, samples: list[Sample]) -> Callable[..., Path]:
    """``write("tars")`` writes the image set in that layout, and returns its folder."""

    def written(layout: str, chosen: list[Sample] | None = None) -> Path:
        return LAYOUTS[layout](tmp_path / layout, samples if chosen is None else chosen)

    return written

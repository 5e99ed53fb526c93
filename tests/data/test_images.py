"""The data set ``images``: the same batches from every layout, number of workers and rank, and from any step on."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from unflip.data import DataError, load
from unflip.data.images import ImagesDataset, load_images
from unflip.data.source import StreamedSource
from unflip.train import RunOptions, load_recipe, train

Image = pytest.importorskip("PIL.Image")
Unflip = Callable[..., Any]
CPU = torch.device("cpu")
CLASSES = ("ant", "bee", "cat")
BATCH = 12


def encoded(number: int) -> bytes:
    """JPEG and PNG, RGB and gray, of different sizes: stripes whose direction tells odd from even."""
    random = np.random.default_rng(number)
    width, height = (int(side) for side in random.integers(20, 60, 2))
    pixels = random.integers(0, 120, (height, width, 3), dtype=np.uint8)
    striped = pixels.transpose(1, 0, 2) if number % 2 else pixels
    striped[np.arange(len(striped)) % 8 < 4] += 130
    image = Image.fromarray(pixels).convert("L" if number % 7 == 3 else "RGB")
    file = io.BytesIO()
    image.save(file, "PNG" if number % 5 == 4 else "JPEG")
    return file.getvalue()


def write_folders(root: Path) -> None:
    for part, count, first in (("train", 50, 0), ("val", 11, 1000)):
        for number in range(count):
            path = root / part / CLASSES[number % 3] / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(first + number))


def write_tars(folders: Path, root: Path) -> None:
    """The same images in WebDataset's layout, in another order."""
    root.mkdir()
    for part in ("train", "val"):
        with tarfile.open(root / f"set-{part}-0000.tar", "w") as tar:
            for path in sorted((folders / part).rglob("*.jpg"), key=lambda path: path.name):
                label = str(CLASSES.index(path.parent.name)).encode()
                for name, data in ((path.name, path.read_bytes()), (f"{path.stem}.cls", label)):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from unflip.data.packing import Encoding, pack_images
    from unflip.data.store import open_any

    root = tmp_path_factory.mktemp("layouts")
    write_folders(root / "folders")
    write_tars(root / "folders", root / "tars")
    pack_images(open_any(root / "folders"), root / "images.pack", Encoding())
    return {name: root / name for name in ("folders", "tars", "images.pack")}


def loaded(path: Path, **options: Any) -> ImagesDataset:
    return load_images(path, size=16, resize=18, **options)


@pytest.mark.parametrize(("workers", "layout"), [(1, "folders"), (2, "tars"), (4, "images.pack")])
def test_batches_are_the_same_bytes_however_they_are_made(
    layouts: dict[str, Path], workers: int, layout: str
) -> None:
    """Expected: what this process decodes from the folders, one image at a time."""
    plain = loaded(layouts["folders"], jitter=0.4, lighting=0.1).source(CPU)
    source = loaded(layouts[layout], jitter=0.4, lighting=0.1).source(CPU, workers)
    assert isinstance(source, StreamedSource)
    plan = source.plan(1, 2, BATCH)
    assert torch.equal(plan, plain.plan(1, 2, BATCH))
    assert plan.shape == (4, BATCH, 2)
    images, labels = zip(*map(plain.batch, plan), strict=True)
    expected = torch.stack(images), torch.stack(labels)
    for ranks in (1, 2):
        for rank in range(ranks):
            mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
            for first in range(5):  # resuming at a step is a slice
                with source.stream(plan[:, mine], first) as batches:
                    found = [(source.normalize(x), y.clone()) for x, y in batches]
                assert len(found) == 4 - first
                for step, (x, y) in enumerate(found, first):
                    assert torch.equal(x, expected[0][step, mine])
                    assert torch.equal(y, expected[1][step, mine])
    tested = [source.test_batches(size, (r, 3)) for r in range(3) for size in (2,)]
    shown, classes = zip(*(batch for part in tested for batch in part), strict=True)
    whole = [*plain.test_batches(100)]
    assert torch.equal(torch.cat(shown), whole[0][0])
    assert torch.equal(torch.cat(classes), whole[0][1])
    source.close()
    plain.close()


def test_several_streams_may_be_open(layouts: dict[str, Path]) -> None:
    """The next epoch's stream is opened while this one is read, and a stream may be left in the middle."""
    with_one = loaded(layouts["folders"]).source(CPU, 1)
    assert isinstance(with_one, StreamedSource)
    plans = [with_one.plan(0, epoch, 5) for epoch in range(3)]
    expected = [with_one.batch(plan[0])[0] for plan in plans]
    with with_one.stream(plans[0]) as first, with_one.stream(plans[1]) as second:
        assert torch.equal(with_one.normalize(next(second)[0]), expected[1])
        assert sum(len(labels) for _, labels in with_one.test_batches(4)) == 11
        assert torch.equal(with_one.normalize(next(first)[0]), expected[0])
        assert len([*second]) == 9
    assert [*first] == [], "a closed stream is over"
    with with_one.stream(plans[2]) as third:
        assert torch.equal(with_one.normalize(next(third)[0]), expected[2])
        kept, after = next(third)[0], None
        copy = kept.clone()
        after = next(third)[0]
        assert torch.equal(kept, copy), "valid until the next but one"
        assert not torch.equal(after, kept)
    with_one.close()


def test_a_plan_has_every_image_once_and_its_own_key(layouts: dict[str, Path]) -> None:
    source = loaded(layouts["folders"]).source(CPU)
    plan = source.plan(0, 0, 50)[0]
    assert sorted(plan[:, 0].tolist()) == list(range(50))
    keys = {int(i): int(k) for i, k in plan.tolist()}
    again = source.plan(0, 1, 50)[0]
    assert not set(keys.values()) & set(again[:, 1].tolist())
    assert plan[:, 0].tolist() != again[:, 0].tolist()


def test_with_an_order_all_seeds_see_the_same_batches(layouts: dict[str, Path]) -> None:
    free, fixed = (loaded(layouts["folders"], order=order).source(CPU) for order in (None, 5))
    assert not torch.equal(free.plan(0, 3, 8), free.plan(1, 3, 8))
    assert torch.equal(fixed.plan(0, 3, 8), fixed.plan(1, 3, 8))
    assert torch.equal(fixed.plan(0, 3, 8), free.plan(5, 3, 8))


def test_held_out_images_have_all_classes_and_the_test_transform(layouts: dict[str, Path]) -> None:
    data = loaded(layouts["folders"])
    held = data.split(9)
    assert (len(held), held.test_count) == (41, 9)
    source = held.source(CPU, 1)
    [(images, labels)] = source.test_batches(100)
    assert torch.bincount(labels).tolist() == [3, 3, 3]
    numbers = held._split[1]
    assert not set(numbers.tolist()) & set(held._split[0].tolist())
    whole = data.transform.for_testing(
        np.asarray(Image.open(io.BytesIO(data.store.train.read(numbers[4]))).convert("RGB"))
    )
    expected = source.normalize(torch.from_numpy(whole)[None])[0]  # type: ignore[attr-defined]
    assert torch.equal(images[4], expected)
    trained = held.train_rows(held.plan(0, 0))[:, 0]
    assert sorted(trained.tolist()) == held._split[0].tolist()
    assert held.fingerprint["training images"] != data.fingerprint["training images"]
    assert held.fingerprint["test images"] != data.split(8).fingerprint["test images"]
    with pytest.raises(DataError, match="validation=50 must be a whole number from 1 to 49"):
        data.split(50)


def test_options_are_checked_before_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a pack"):
        load("images", None)
    with pytest.raises(DataError, match="order=-1 must be a whole number, 0 or more"):
        load("images", tmp_path, order=-1)
    with pytest.raises(
        DataError, match="resize=100 must be a whole number of pixels, at least 224"
    ):
        load("images", tmp_path, resize=100)


def test_a_run_is_trained_packed_and_evaluated(
    layouts: dict[str, Path], tmp_path: Path, unflip: Unflip
) -> None:
    recipe = {
        "data": {"name": "images", "size": 16, "resize": 18},
        "model": {"name": "resnet20", "width": 4},
        "method": "dorefa",
        "epochs": 1,
        "batch_size": 10,
        "optimizer": {"lr": 0.1},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    small = load_recipe(str(tmp_path / "small.yaml"))
    options = RunOptions(device="cpu", quiet=True, workers=1)
    [result] = train(small, small.data.load(layouts["folders"]), tmp_path / "run", options=options)
    done = unflip("pack", tmp_path / "run", "-o", tmp_path / "a.unflip")
    assert done.code == 0, done.err
    command = ("evaluate", tmp_path / "a.unflip", "images", "--data", layouts["images.pack"])
    done = unflip(*command, "--resize", 18)
    assert done.code == 0, done.err
    assert f"{result['accuracy']:.2f} % of 11 test images of images are right" in done.out
    assert "resized to 18 pixels, and the center of 16 was cropped" in done.out
    assert json.loads(unflip(*command, "--json").out)["resize"] == 18  # 8/7 of the network's input

"""Trees of images, written here with Pillow."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from unflip.data import DataError, load
from unflip.data.folders import load_folder

Image = pytest.importorskip("PIL.Image")


def noise(seed: int, width: int = 16, height: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Six cats and three dogs to train on, one of each to test on."""
    for index in range(6):
        save(tmp_path / f"train/cat/{index}.png", noise(index))
    for index in range(3):
        save(tmp_path / f"train/dog/{index}.png", noise(10 + index))
    save(tmp_path / "test/cat/a.png", noise(20))
    save(tmp_path / "test/dog/a.png", noise(21))
    return tmp_path


def test_a_tree_is_read_pixel_by_pixel(tree: Path) -> None:
    found = load_folder(tree)
    assert found.classes == ("cat", "dog")
    assert found.train_images.shape == (9, 3, 16, 16)
    expected = np.stack([noise(20), noise(21)]).transpose(0, 3, 1, 2)
    assert np.array_equal(found.test_images, expected)
    assert found.test_labels.tolist() == [0, 1]
    assert (found.crop_padding, found.flip) == (2, True)
    assert np.array_equal(load("folder", tree).train_images, found.train_images)  # type: ignore[attr-defined]


def test_every_label_belongs_to_its_image_and_classes_interleave(tree: Path) -> None:
    found = load_folder(tree)
    assert found.train_labels.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    cats = found.train_images[found.train_labels == 0]
    expected = np.stack([noise(index) for index in range(6)]).transpose(0, 3, 1, 2)
    assert np.array_equal(cats, expected)
    assert found.split(3).test_labels.tolist() == [0, 1, 0]


def test_statistics_are_those_of_the_training_images(tree: Path) -> None:
    found = load_folder(tree)
    scaled = found.train_images.astype(np.float64) / 255
    assert found.mean == pytest.approx(scaled.mean((0, 2, 3)))
    assert found.std == pytest.approx(scaled.std((0, 2, 3)))


def test_val_stands_in_for_test(tree: Path) -> None:
    (tree / "test").rename(tree / "val")
    assert len(load_folder(tree).test_images) == 2


@pytest.mark.parametrize("suffix", ["png", "jpg", "JPEG", "bmp", "webp"])
def test_every_suffix_is_read(tree: Path, suffix: str) -> None:
    save(tree / f"test/dog/b.{suffix}", noise(30))
    assert sorted(load_folder(tree).test_labels.tolist()) == [0, 1, 1]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_other_modes_become_rgb(tree: Path, mode: str) -> None:
    save(tree / "test/cat/a.png", noise(20), mode)
    assert load_folder(tree).test_images.shape == (2, 3, 16, 16)


def test_what_is_no_image_is_passed_over(tree: Path) -> None:
    (tree / "train/cat/notes.txt").write_text("cats")
    (tree / "train/cat/._0.png").write_bytes(b"left by macOS")
    (tree / "train/.cache").mkdir()
    (tree / "train/labels.csv").write_text("")
    assert len(load_folder(tree).train_images) == 9


def test_sizes_must_agree(tree: Path) -> None:
    save(tree / "train/dog/1.png", noise(1, width=20, height=12))
    with pytest.raises(DataError, match=r"dog/1\.png is 20×12 .* 16×16\. Give size="):
        load_folder(tree)


def test_size_brings_all_images_to_one_size(tree: Path) -> None:
    save(tree / "train/dog/1.png", noise(1, width=31, height=17))
    save(tree / "train/dog/2.png", noise(1, width=3, height=50))
    found = load_folder(tree, size=8)
    assert found.train_images.shape == (9, 3, 8, 8)
    assert found.crop_padding == 1


@pytest.mark.parametrize(("width", "height"), [(24, 8), (8, 24)])
def test_the_center_is_kept(tree: Path, width: int, height: int) -> None:
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    center = (slice(8, 16), slice(None)) if height > width else (slice(None), slice(8, 16))
    pixels[center] = 200
    save(tree / "test/cat/a.png", pixels)
    found = load_folder(tree, size=8)
    assert (found.test_images[0] == 200).all()


def test_size_must_be_positive(tree: Path) -> None:
    for size in (0, "8", 8.5, True):
        with pytest.raises(DataError, match=f"size={size!r} must be a whole number"):
            load_folder(tree, size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [0, 20, 100, 400])
def test_a_damaged_image_is_named(tree: Path, cut: int) -> None:
    path = tree / "train/dog/2.png"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"train/dog/2\.png (cannot be decoded as|is not) an image"):
        load_folder(tree)


def test_sixteen_bits_are_scaled_rather_than_clipped(tree: Path) -> None:
    gray = noise(30)[..., 0]
    Image.fromarray(gray.astype(np.uint16) * 257).save(tree / "test/cat/a.png")
    pixels = load_folder(tree).test_images[0]
    assert np.array_equal(pixels, np.broadcast_to(gray, (3, 16, 16)))


def test_other_formats_are_refused_by_name(tree: Path) -> None:
    deep = Image.fromarray(np.full((16, 16), 5000, dtype=np.float32))
    deep.save(tree / "test/cat/a.png", format="TIFF")  # Pillow goes by content, not by suffix
    with pytest.raises(DataError, match=r"cat/a\.png is not an image of a known format"):
        load_folder(tree)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_rotated_as_exif_says(tree: Path, orientation: int) -> None:
    """The same pixels as predict sees; a camera's portrait lies on its side in the file."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[274] = orientation
    path = tree / "test/cat/a.png"
    Image.fromarray(noise(31)).save(path, exif=exif)
    expected = np.array(ImageOps.exif_transpose(Image.open(path)))
    assert np.array_equal(expected, noise(31)) == (orientation == 1)
    assert np.array_equal(load_folder(tree).test_images[0].transpose(1, 2, 0), expected)


def test_a_class_without_training_images_is_refused(tree: Path) -> None:
    save(tree / "test/eel/a.png", noise(0))
    with pytest.raises(DataError, match=r"eel is a class without training.*cat, dog"):
        load_folder(tree)


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_empty_class_is_refused(tree: Path, part: str) -> None:
    for path in (tree / part / "dog").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=rf"{part}/dog is a class without images.*\.png"):
        load_folder(tree)


def test_a_missing_folder_shows_the_layout(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train/CLASS/\*\.png.*no folder .*absent/train"):
        load_folder(tmp_path / "absent")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"no folder .*test \(or val\)"):
        load_folder(tmp_path)
    (tmp_path / "test").mkdir()
    with pytest.raises(
        DataError,
        match=r"train holds no folders\. Put the images of each class into a folder there",
    ):
        load_folder(tmp_path)


def test_one_class_alone_is_refused(tree: Path) -> None:
    for part in ("train", "test"):
        shutil.rmtree(tree / part / "dog")
    with pytest.raises(DataError, match=r"train has only one class, 'cat'.*needs two or more"):
        load_folder(tree)


def test_images_of_one_color_are_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            save(tmp_path / part / name / "a.png", np.zeros((4, 4, 3), dtype=np.uint8))
    with pytest.raises(DataError, match=r"std=.* must be positive"):
        load_folder(tmp_path)


def test_without_pillow_it_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"needs Pillow.*pip install Pillow"):
        load_folder(tree)

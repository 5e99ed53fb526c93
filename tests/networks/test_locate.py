"""A network is found by its path, its folder or its name; and what cannot be found is refused with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import unflip as package
from unflip.networks import NotPublished, catalog, entries, locate
from unflip.networks.folder import WrongHash
from unflip.recipes.load import load_recipe
from unflip.runtime.images import normalized

ROOT = Path(__file__).parents[2]
SHIPPED = "resnet20-cifar10"


@pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: entry.name)
def test_the_catalog_is_true(entry: catalog.Entry) -> None:
    """About a file that ships, everything that the file itself tells."""
    words = entry.train.split()
    assert words[:3] == ["unflip", "train", entry.recipe]
    recipe = load_recipe(entry.recipe, [word for word in words if "=" in word])
    assert recipe.data.name == entry.data
    assert 0 < entry.accuracy < 100
    if entry.found is None:
        assert entry.bytes is None
        assert entry.sha256 is None
        with pytest.raises(NotPublished, match=f"{entry.train}; then pack it"):
            package.load(entry.name)
        return
    path = locate(entry.name)
    assert path.stat().st_size == entry.bytes
    network = package.load(entry.name)
    assert list(network.input_shape) == entry.input


def test_accuracies_are_those_of_the_results() -> None:
    """As the native kernels have it: the sixth cell of a network's row."""
    lines = (ROOT / "results" / "README.md").read_text(encoding="utf-8").splitlines()
    for entry in entries().values():
        if entry.found is not None:
            name = entry.found.removeprefix("package:")
            [row] = [line for line in lines if f"network/{name}) |" in line]
            assert row.split(" | ")[5] == f"{entry.accuracy:.2f}"


def test_a_shipped_network_sees() -> None:
    """A gray bar in a blue picture is a plane or a ship rather than a frog: the weights are trained ones."""
    network = package.load(SHIPPED)
    assert network.labels is not None
    rows = np.linspace(0, 1, 32, dtype=np.float32)[None, :, None]
    sky = np.broadcast_to(np.array([110, 160, 230], np.float32)[:, None, None], (3, 32, 32))
    image = sky - 40 * rows * np.ones((3, 1, 32), np.float32)
    image = image.copy()
    image[:, 14:18, 4:28] = 210
    scores = dict(zip(network.labels, network(normalized(image, network)), strict=True))
    assert max(scores["airplane"], scores["ship"]) > max(scores["frog"], scores["deer"])


def test_the_commands_take_a_name(unflip, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (40, 30), "blue").save(tmp_path / "blue.png")
    shown = unflip("predict", SHIPPED, tmp_path / "blue.png", "--top", "2")
    assert shown.code == 0, shown.err
    assert len(shown.out.splitlines()) == 3
    assert "72,312 bytes" in unflip("show", SHIPPED).out
    listed = unflip("networks").out
    assert all(name in listed for name in entries())
    assert "not published" in listed
    told = unflip("networks", SHIPPED).out
    assert entries()[SHIPPED].train in told
    everything = json.loads(unflip("networks", "--json").out)
    assert [row["name"] for row in everything] == list(entries())


def test_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(locate("resnet20-dorefa-cifar10"), tmp_path / SHIPPED)
    assert locate(SHIPPED) == Path(SHIPPED)
    assert locate(Path("anything")) == Path("anything"), "a Path is never looked up"


def test_unknown_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="Did you mean 'resnet20-cifar10'"):
        package.load("resnet20-cifar")
    for path in ("nothing.unflip", "folder/nothing", "../resnet20-cifar10"):
        with pytest.raises(FileNotFoundError, match=f"{path}: the file does not exist"):
            package.load(path)


def test_a_folder_of_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no packed network"):
        locate(tmp_path)
    shutil.copy(locate(SHIPPED), tmp_path / "a.unflip")
    assert locate(str(tmp_path)) == tmp_path / "a.unflip"
    shutil.copy(locate(SHIPPED), tmp_path / "b.unflip")
    with pytest.raises(ValueError, match="2 packed networks"):
        locate(tmp_path)


def test_a_changed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with a valid checksum of its own: another network."""
    shutil.copy(locate("resnet20-dorefa-cifar10"), tmp_path / "resnet20-strongest.unflip")
    monkeypatch.setattr("unflip.networks.find.HOME", tmp_path)
    with pytest.raises(WrongHash, match="the catalog"):
        package.load(SHIPPED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"files": {}}',
        '{"files": {"model.unflip": {"sha256": 1}}}',
        "[" * 9999,
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "network.json").write_text(text)
    (tmp_path / "model.unflip").touch()
    with pytest.raises(ValueError, match=r"network\.json does not state"):
        locate(tmp_path)


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "network.json").write_text('{"files": {"model.unflip": {"sha256": "0"}}}')
    with pytest.raises(FileNotFoundError, match="copy the whole folder"):
        locate(tmp_path)

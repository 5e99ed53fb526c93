"""``unflip push`` writes a folder that others can use; the Hugging Face Hub gets and gives the same files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import unflip as package
from unflip.networks import hub
from unflip.networks.folder import WrongHash
from unflip.packing.images import pack_for
from unflip.publish import card, publish
from unflip.recipes.load import load_recipe
from unflip.runs import Run

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location(
    "hub_server", Path(__file__).with_name("hub_server.py")
)
assert spec is not None
assert spec.loader is not None
server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(server)

needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None,
    reason="needs huggingface_hub: the extra hub",
)


def test_the_folder_has_everything(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    files = publish(run, "ada/tiny", folder, "cc-by-4.0")
    assert sorted(files) == sorted(path.name for path in folder.iterdir())
    model = package.load_run(run.folder)
    pack_for(run.inputs, model, tmp_path / "packed.unflip")
    assert (folder / "model.unflip").read_bytes() == (tmp_path / "packed.unflip").read_bytes()
    assert package.load(str(folder)).labels == list(run.inputs.classes)
    weights = load_file(folder / "weights.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert load_recipe(folder / "recipe.yaml").plain() == run.recipe
    assert [json.loads(line) for line in (folder / "metrics.jsonl").open()] == run.metrics


def test_the_card_is_about_this_network(run: Run, tmp_path: Path) -> None:
    publish(run, "ada/tiny", tmp_path / "out", "cc-by-4.0")
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, rest = text.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["license"] == "cc-by-4.0"
    assert about["model-index"][0]["results"][0]["metrics"] == [{"type": "accuracy", "value": 12.5}]
    assert "12.50 % on the test images" in rest
    size = (tmp_path / "out" / "model.unflip").stat().st_size
    assert f"| packed file | {size:,} bytes |" in rest
    assert 'unflip.load("hub:ada/tiny")' in rest
    for words in re.findall(r"^    (.*)$", rest, re.MULTILINE):
        assert words.startswith(("pip install", "unflip "))
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "out").iterdir())
    assert "/home/ada" not in everything
    assert "secret" not in everything


def test_the_card_of_a_folder_of_images_says_what_they_are(run: Run, tmp_path: Path) -> None:
    publish(run, "ada/tiny", tmp_path / "out", "mit")
    about = json.loads((tmp_path / "out" / "network.json").read_text())
    assert "trained on digits with" in card(about, "ada/tiny")
    assert "| 8-bit layers | none |" in card(about, "ada/tiny")
    both = {**about, "int8": ["first and last", "shortcuts"]}
    assert "| 8-bit layers | first and last, shortcuts |" in card(both, "ada/tiny")
    text = card({**about, "data": "folder", "classes": ["cat", "dog"]}, "ada/tiny")
    assert "trained on images of 2 classes with" in text
    assert '"dataset": {"name": "images of 2 classes", "type": "imagefolder"}' in text


def test_a_second_time_replaces_and_other_folders_are_left_alone(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    first = publish(run, "ada/tiny", folder, "mit")
    before = {name: (folder / name).read_bytes() for name in first}
    assert publish(run, "ada/tiny", folder, "mit") == first
    assert before == {name: (folder / name).read_bytes() for name in first}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("precious")
    for taken in ("mine", "mine/README.md"):
        with pytest.raises(FileExistsError, match="--out"):
            publish(run, "ada/tiny", tmp_path / taken, "mit")
    assert (tmp_path / "mine" / "README.md").read_text() == "precious"


def test_a_changed_file_of_the_folder_is_refused(run: Run, tmp_path: Path) -> None:
    publish(run, "ada/tiny", tmp_path / "out", "mit")
    path = tmp_path / "out" / "model.unflip"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(WrongHash, match=r"network\.json"):
        package.load(tmp_path / "out")


def test_a_run_that_is_not_finished_is_not_published(run: Run, tmp_path: Path) -> None:
    (run.folder / "result.json").unlink()
    with pytest.raises(ValueError, match="is not finished"):
        publish(run, "ada/tiny", tmp_path / "out", "mit")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    ["", "name", "a/b/c", "../b", "a/..", "a/b@", "a/b@../c", "a b/c", "a/b\n", "/a/b", "a/.b"],
)
def test_names_that_are_no_repository(text: str) -> None:
    with pytest.raises(ValueError, match="should look like hub:OWNER/NAME"):
        hub.parse(f"hub:{text}")


def test_names_of_repositories() -> None:
    assert hub.parse("hub:ada/my-net.v2") == ("ada/my-net.v2", None)
    assert hub.parse("ada/n@v1.0") == ("ada/n", "v1.0")


def test_without_the_library_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'unflip\[hub\]'"):
        package.load("hub:ada/tiny")


UPLOAD = """
import sys
from pathlib import Path
from unflip.networks import hub

print(hub.upload(Path("tiny"), hub.parse("ada/tiny"), sys.argv[1:], private=False))
"""
TRY_EACH = """
import sys
from unflip.networks import locate

for name in sys.argv[1:]:
    try:
        locate(name)
    except (OSError, ValueError) as error:
        print(error)
"""
Do = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def served() -> Iterator[tuple[Any, str]]:
    with server.hub_server() as both:
        yield both


@pytest.fixture
def do(served: tuple[Any, str], tmp_path: Path) -> Do:
    """``unflip`` in a process whose Hub is our server: huggingface_hub reads its address when it is imported."""
    settings = {
        "HF_ENDPOINT": served[1],
        "HF_HOME": str(tmp_path / "hub-cache"),
        "HF_TOKEN": "hf_none",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }

    def call(
        *words: object, program: str | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        start = ["-m", "unflip"] if program is None else ["-c", program]
        command = [sys.executable, *start, *map(str, words)]
        env = {**os.environ, **settings, **more}
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return call


@needs_hub
def test_to_the_hub_and_back(run: Run, do: Do, served: tuple[Any, str], tmp_path: Path) -> None:
    there, _ = served
    files = publish(run, "ada/tiny", tmp_path / "tiny", "mit")
    done = do(*files, program=UPLOAD)
    assert done.returncode == 0, done.stderr
    [found] = there.commits["ada/tiny"].values()
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    loaded = do("bench", "hub:ada/tiny", "--runs", 1, "--report")
    assert loaded.returncode == 0, loaded.stderr
    digest = json.loads(found["network.json"])["files"]["model.unflip"]["sha256"]
    assert digest in loaded.stdout
    read = {path.rpartition("/")[2] for path in there.asked if "/resolve/" in path}
    assert read == {"network.json", "model.unflip"}, "nothing else is downloaded"
    offline = do("bench", "hub:ada/tiny", "--runs", 1, HF_ENDPOINT="http://127.0.0.1:1")
    assert offline.returncode == 0, "from the cache: " + offline.stderr


@needs_hub
def test_what_the_hub_refuses_is_named(run: Run, do: Do, served: tuple[Any, str]) -> None:
    there, _ = served
    network = (run.folder / "recipe.json").read_bytes()
    stated = {"files": {"model.unflip": {"bytes": 3, "sha256": "0" * 64}}}
    there.commit("ada/other", {"README.md": b"", "model.unflip": network})
    there.commit(
        "ada/wrong", {"network.json": json.dumps(stated).encode(), "model.unflip": network}
    )
    there.commit("ada/large", {"network.json": b" " * (2**20 + 1)})
    expected = {
        "hub:ada/nothing": "is not on the Hugging Face Hub",
        "hub:ada/other@v9": "RevisionNotFoundError",
        "hub:ada/other": "has no network.json: it was not written by 'unflip push'",
        "hub:ada/wrong": "network.json of hub:ada/wrong states 000",
        "hub:ada/large": "1,048,577 bytes; the limit is 1,048,576",
    }
    done = do(*expected, program=TRY_EACH)
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stdout.splitlines(), expected.values(), strict=True):
        assert message in line
    gone = do("show", "hub:ada/new", HF_ENDPOINT="http://127.0.0.1:1").stderr
    assert "cannot be downloaded" in gone
    assert gone.count("\n") == 1


@needs_hub
def test_an_upload_that_is_refused_is_named(
    do: Do, served: tuple[Any, str], tmp_path: Path
) -> None:
    served[0].refuses_writes = True
    (tmp_path / "tiny").mkdir()
    done = do("a", program=UPLOAD)
    assert done.returncode == 1
    assert "hf auth login" in done.stderr
    assert "The files are in tiny" in done.stderr


def test_a_dry_run_uploads_nothing(unflip, run: Run, tmp_path: Path) -> None:
    done = unflip("push", run.folder, "ada/tiny", "--dry-run", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert "nothing was uploaded" in done.out
    assert (tmp_path / "out" / "model.unflip").is_file()
    pinned = unflip("push", run.folder, "ada/tiny@v1", "--dry-run")
    assert "leave out @" in pinned.err

"""``unflip data show``, and what ``unflip data pack`` prints."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from unflip.cli import app
from unflip.cli.data import Progress, pack_data, show_data
from unflip.data.errors import DataError
from unflip.hints import NotInstalled


@pytest.fixture
def pack(write, tmp_path: Path, capsys) -> Path:
    out = tmp_path / "set.pack"
    pack_data(write("folders"), out, size=20, workers=1)
    return out


def test_packing_prints_what_was_packed(write, tmp_path, capsys):
    source, out = write("folders"), tmp_path / "set.pack"
    (source / "val/n02102040/ILSVRC2012_val_00000003.JPEG").write_bytes(b"damaged")
    pack_data(source, out, skip_damaged=True, workers=1)
    printed = capsys.readouterr().out
    assert "30 images\n" in printed
    assert "set.pack: 24 training and 5 test images of 3 classes" in printed
    assert "skipped as damaged: 1\n  val/n02102040/ILSVRC2012_val_00000003" in printed
    pack_data(source, out, skip_damaged=True, workers=1)
    assert "set.pack is complete: 24 training" in capsys.readouterr().out


def test_files_that_are_left_out_are_counted(write, tmp_path, capsys):
    source = write("folders")
    (source / "train/n01440764/y.tif").write_bytes(b"")
    (source / "train/n02102040/more.jpg").mkdir()
    (source / "train/n01440764/.hidden.jpg").write_bytes(b"")
    (source / "val/n02102040/z.txt").write_bytes(b"")
    expected = "3: train/n01440764/y.tif, train/n02102040/more.jpg/, val/n02102040/z.txt"
    show_data(source)
    printed = capsys.readouterr().out
    assert expected in printed
    assert "24, 7 to 9 per class" in printed
    pack_data(source, tmp_path / "set.pack", workers=1)
    assert f"files and folders that are ignored: {expected}\n" in capsys.readouterr().out


def test_a_class_without_test_images_is_shown(write, samples, capsys):
    show_data(write("folders", [s for s in samples if s.part == "train" or s.label]))
    assert "4, 0 to 2 per class" in capsys.readouterr().out


def test_commands_and_code_of_the_page_run(write, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    commands = [
        *re.findall(r"^    unflip (data [^#\n]+)", page, re.MULTILINE),
        *re.findall(r"`unflip (data pack [^`]*\.pack [^`]+)`", page),
    ]
    assert len(commands) == 5
    write("folders").rename(tmp_path / "imagenet")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        get_command(app).main(shlex.split(command), standalone_mode=False)
    [snippet] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(snippet, {})
    assert capsys.readouterr().out.splitlines()[-1] == "tench (20, 30)"


def test_quality_without_size_is_refused(write, tmp_path):
    with pytest.raises(DataError, match="--quality 80 has no effect without --size"):
        pack_data(write("folders"), tmp_path / "set.pack", quality=80)


def test_a_pack_is_shown_with_all_that_is_known(pack, capsys):
    capsys.readouterr()
    show_data(pack)
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[2:])
    shown = {name: value.strip() for name, value in lines.items()}
    assert shown["classes"] == (
        "3: tench (n01440764), English springer (n02102040), church (n03028079)"
    )
    assert shown["training images"] == "24, 7 to 9 per class"
    assert shown["test images"] == "6, 2 per class"
    assert shown["height"].startswith("20 to ")
    assert shown["made from"] == "class folders"
    assert shown["stored"].startswith("short side at most 20 px, JPEG quality 90 (Pillow")
    assert shown["fingerprint of training images"].startswith("24 (")


@pytest.mark.parametrize("layout", ["folders", "tars", "parquet"])
def test_layouts_are_shown_and_verified(write, capsys, layout):
    root = write(layout)
    show_data(root, verify=True, workers=1)
    printed = capsys.readouterr().out
    assert "24, 7 to 9 per class" in printed
    assert "all 30 images are intact" in printed


def test_verify_names_every_wrong_image_of_a_pack(pack, capsys):
    data = bytearray(pack.read_bytes())
    data[50] ^= 1
    data[-50] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DataError, match=r"2 of 30 images in .* are damaged"):
        show_data(pack, verify=True, workers=2)
    printed = capsys.readouterr().out
    assert f"train/n01440764/n01440764_000.JPEG in {pack} (image 0) is damaged" in printed
    assert "ILSVRC2012_val_00000005.JPEG" in printed


def test_verify_decodes_the_images_of_a_folder(write, capsys):
    root = write("folders")
    path = root / "train/n03028079/n03028079_001.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match="1 of 30 images"):
        show_data(root, verify=True, workers=1)
    assert f"{path} cannot be decoded" in capsys.readouterr().out


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    for name in ("train", "validation"):
        (tmp_path / f"{name}-00000.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NotInstalled, match=r"pip install 'unflip\[parquet\]'"):
        show_data(tmp_path)


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress("packing [x]") as progress:
        progress.show(16, 100)
        progress.show(32, 100)
        assert progress.bar.tasks[0].completed == 32
    assert "packing [x]: 100 images, resuming after 16" in capsys.readouterr().out


def test_elsewhere_a_line_every_few_seconds(capsys, monkeypatch):
    monkeypatch.setattr("unflip.cli.data.SECONDS", -1)
    with Progress("packing a") as progress:
        progress.show(0, 100)
        progress.show(50, 100)
    assert "packing a: 50 of 100 images, " in capsys.readouterr().out

"""Checkpoints whose pickle asks for any time or memory: a process with limits reads them first."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch

from unflip.imports import CannotImport
from unflip.imports.checkpoints import read_state


def with_pickle(path: Path, content: bytes) -> None:
    """A checkpoint with this pickle."""
    plain = path.with_suffix(".plain")
    torch.save({"a": torch.ones(1)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as target:
        for part in source.infolist():
            own = part.filename.endswith("data.pkl")
            target.writestr(part.filename, content if own else source.read(part))


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits need Linux")
PAIR = b"h\x01\x86q\x01"  # of an object with itself, which becomes the next object
HEX = b"q\x02h\x01h\x02X\3\0\0\0hex\x86R"  # twice as many letters


@LINUX
def test_a_key_that_takes_forever_is_refused(tmp_path, monkeypatch):
    """60 pairs of pairs, whose hash takes 2^60 steps: in a file of 1,200 bytes."""
    path = tmp_path / "model.pth"
    with_pickle(path, b"\x80\2}K\0q\1" + 60 * PAIR + b"K\1s.")
    monkeypatch.setattr("unflip.imports.checkpoints.SECONDS", 1.5)
    with pytest.raises(
        CannotImport, match=r"reading .*model\.pth takes more than 1\.5 seconds; the"
    ):
        read_state(path)


@LINUX
def test_a_text_that_grows_is_refused(tmp_path):
    """A text of 2^40 letters, in a file of 1,600 bytes."""
    path = tmp_path / "model.pth"
    start = b"\x80\2}X\1\0\0\0ac_codecs\nencode\nq\1X\1\0\0\0xX\6\0\0\0latin1\x86R"
    with_pickle(path, start + 40 * HEX + b"s.")
    with pytest.raises(CannotImport, match=r"model\.pth needs more than 1,073,.* bytes of memory"):
        read_state(path)

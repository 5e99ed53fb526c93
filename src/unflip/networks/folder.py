"""A published network: a folder of files, the same on a disk and on the Hugging Face Hub.

network.json names the files with their sizes and SHA-256, so that a download can be checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST = "network.json"
MODEL = "model.unflip"
MOST_MANIFEST = 2**20


class WrongHash(ValueError):
    """A file is not the one that was published; the message names both hashes."""


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, expected: str, where: str) -> Path:
    """``path``, if its SHA-256 is ``expected``, which ``where`` states."""
    found = digest(path)
    if found != expected:
        raise WrongHash(
            f"{path} has the SHA-256 {found}, but {where} states {expected}: the file was changed or is damaged. "
            "Delete it and get it again"
        )
    return path


def model_in(folder: Path) -> Path:
    """The packed network of a folder: the one of its network.json, or the only one in it."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        if not (folder / MODEL).is_file():
            raise FileNotFoundError(
                f"{folder} has {MANIFEST}, but no {MODEL}: copy the whole folder"
            )
        return verify(folder / MODEL, stated_hash(manifest), str(manifest))
    found = sorted(folder.glob("*.unflip"))
    if len(found) != 1:
        how_many = f"{len(found)} packed networks" if found else "no packed network"
        raise ValueError(
            f"{folder} is a folder with {how_many} (*.unflip) and without {MANIFEST}; give the path of a file"
        )
    return found[0]


def stated_hash(manifest: Path) -> str:
    """The SHA-256 of the packed network, as network.json states it."""
    return str(read_manifest(manifest)["files"][MODEL]["sha256"])


def read_manifest(path: Path) -> dict[str, Any]:
    """network.json, with the fields that loading needs."""
    if path.stat().st_size > MOST_MANIFEST:
        raise ValueError(
            f"{path} has more than {MOST_MANIFEST:,} bytes; 'unflip push' writes smaller ones"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        usable = isinstance(content["files"][MODEL]["sha256"], str)
    except (ValueError, KeyError, TypeError, RecursionError):
        usable = False
    if not usable:
        raise ValueError(
            f"{path} does not state the SHA-256 of {MODEL}; 'unflip push' writes such files"
        )
    return content

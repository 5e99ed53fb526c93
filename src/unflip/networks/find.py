"""From whatever a network is called by to the path of its packed file."""

from __future__ import annotations

import os
from pathlib import Path

from unflip.hints import Foreseen, known
from unflip.networks import hub
from unflip.networks.catalog import HOME, Entry, entries
from unflip.networks.download import download
from unflip.networks.folder import model_in, verify


class NotPublished(Foreseen, LookupError):
    """A network of the catalog that can only be trained; the message has the command."""


def locate(source: str | os.PathLike[str]) -> Path:
    """The packed file of a network.

    ``source`` is a file, a folder that ``unflip push`` wrote, a name from ``unflip networks``, a URL or
    ``hub:OWNER/NAME``. A file or folder of that name comes first.
    """
    path = Path(source)
    if path.is_dir():
        return model_in(path)
    if not isinstance(source, str) or path.exists():
        return path
    if "://" in source:
        return download(source)
    if source.startswith(hub.PREFIX):
        return hub.fetch(source)
    if _is_path(source):
        return path
    try:
        entry = entries()[known(source, entries(), "network")]
    except ValueError as error:
        raise FileNotFoundError(f"{source} is not a file, and it is an {error}") from None
    return _from_catalog(entry)


def _is_path(source: str) -> bool:
    return bool(Path(source).suffix) or any(mark and mark in source for mark in (os.sep, os.altsep))


def _from_catalog(entry: Entry) -> Path:
    if entry.found is None or entry.sha256 is None:
        raise NotPublished(
            f"{entry.name} is not published yet. Train it: {entry.train}; then pack it: unflip pack "
            f"runs/{entry.recipe} -o {entry.name}.unflip"
        )
    kind, _, rest = entry.found.partition(":")
    if kind == "package":
        path = HOME / rest
    elif kind == "hub":
        path = hub.fetch(entry.found)
    else:
        path = download(entry.found, entry.sha256)
    return verify(path, entry.sha256, f"the catalog ({entry.name})")

"""Networks from the Hugging Face Hub, and to it, with the library huggingface_hub and its cache.

Only network.json and model.unflip are read. Neither is a pickle, and their names are fixed.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from unflip.hints import Foreseen, NotInstalled
from unflip.networks.download import MOST_BYTES
from unflip.networks.folder import MANIFEST, MODEL, MOST_MANIFEST, stated_hash, verify

PREFIX = "hub:"
NAME = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
REPOSITORY = re.compile(rf"({NAME}/{NAME})(?:@([\w][\w./-]*))?", re.ASCII)


class HubError(Foreseen, OSError):
    """The Hub refused, or cannot be reached; the message says what to do."""


class Place(NamedTuple):
    """A repository on the Hub. ``revision`` is a branch, a tag or a commit; None is the newest."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def parse(text: str) -> Place:
    """``hub:OWNER/NAME`` or ``hub:OWNER/NAME@REVISION``."""
    match = REPOSITORY.fullmatch(text.removeprefix(PREFIX))
    if match is None or ".." in text:
        raise ValueError(f"{text!r} should look like hub:OWNER/NAME or hub:OWNER/NAME@REVISION")
    return Place(match[1], match[2])


def fetch(text: str) -> Path:
    """The packed network of a repository, or the copy in huggingface_hub's cache."""
    place = parse(text)
    hub = library(str(place))
    manifest = _get(hub, place, MANIFEST, MOST_MANIFEST)
    # The cache has one folder per commit: both files must be of the same one.
    same = Place(place.repository, manifest.parent.name)
    model = _get(hub, same, MODEL, MOST_BYTES)
    return verify(model, stated_hash(manifest), f"{MANIFEST} of {place}")


def library(what: str) -> ModuleType:
    """huggingface_hub; if it is missing, the error says that ``what`` needs it."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise NotInstalled(what, "huggingface_hub") from None
    return huggingface_hub


def _get(hub: ModuleType, place: Place, name: str, most: int) -> Path:
    where = {"repo_id": place.repository, "filename": name, "revision": place.revision}
    cached = hub.try_to_load_from_cache(**where)
    pinned = bool(place.revision and re.fullmatch(r"[0-9a-f]{40}", place.revision))
    if pinned and isinstance(cached, str):  # a commit does not change: nothing to ask
        return Path(cached)
    try:
        size = hub.get_hf_file_metadata(hub.hf_hub_url(**where)).size
        if size is None or size > most:
            raise HubError(
                f"{name} of {place} has {'an unknown number of' if size is None else f'{size:,}'} bytes; the limit "
                f"is {most:,}"
            )
        return Path(hub.hf_hub_download(**where))
    except HubError:
        raise
    except (
        Exception
    ) as error:  # its errors have no common class of their own, and change between versions
        if isinstance(cached, str) and not _answered(error):
            return Path(cached)  # offline
        raise HubError(_reason(place, name, error)) from error


def _answered(error: Exception) -> bool:
    """Whether the server said no, rather than nothing."""
    return getattr(error, "response", None) is not None


def _reason(place: Place, name: str, error: Exception) -> str:
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError"):
        return (
            f"{place} is not on the Hugging Face Hub, or not readable for you ({kind}). Check the name; for a private "
            "one, run 'hf auth login' first"
        )
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return f"{place} has no {name}: it was not written by 'unflip push'"
    if _answered(error):
        return f"{place}: the Hub refused {name} ({_first_line(error)})"
    return (
        f"{place} cannot be downloaded ({kind}: {_first_line(error)}). Without a network, copy the repository and give "
        "the path of its folder"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def upload(folder: Path, place: Place, files: list[str], private: bool) -> str:
    """Upload these files of a folder in one commit; returns the page's address."""
    hub = library("unflip push")
    api = hub.HfApi()
    try:
        api.create_repo(place.repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=place.repository,
            folder_path=str(folder),
            allow_patterns=files,
            commit_message="Upload a packed network",
        )
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        how = (
            ". Run 'hf auth login' with a token that may write, and check OWNER"
            if status in (401, 403)
            else ". Check the network, or upload the folder yourself"
        )
        raise HubError(
            f"{place} was not uploaded ({type(error).__name__}: {_first_line(error)}){how}. The files are in {folder}"
        ) from error
    return str(done.commit_url)

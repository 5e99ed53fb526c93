"""Packed networks from a URL: https, a limit on size and time, a hash if the URL has one, and a cache.

The name of a file in the cache is made from a hash of its URL, never from what a server says.
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import io
import os
import re
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit

from unflip import __version__
from unflip.disk import cache_folder
from unflip.hints import Foreseen
from unflip.networks.folder import digest

MOST_BYTES = 2**28
ANSWER_SECONDS = 30.0
WHOLE_SECONDS = 1800.0
CHUNK = 2**16
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
HASH = re.compile(r"sha256=([0-9a-f]{64})")


class DownloadError(Foreseen, OSError):
    """A network could not be downloaded; the message says from where, why, and what to do."""


def download(url: str, sha256: str | None = None) -> Path:
    """The packed network at ``url``, or the copy in the cache.

    ``https://host/model.unflip#sha256=HEX`` states the hash of the file. Plain http is refused, unless the hash is
    stated or the server is this machine.
    """
    parts = urlsplit(url)
    expected = sha256 or _stated(parts, url)
    _refuse_insecure(parts, expected is not None)
    address = parts._replace(fragment="").geturl()
    path = _cached(address)
    if path.is_file() and expected in (None, digest(path)):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        found = _fetch(address, part, expected is not None)
        if expected not in (None, found):
            raise DownloadError(
                f"{address} has the SHA-256 {found}, not {expected}: it is another file, or was damaged on the way. "
                "Ask its publisher for the right hash"
            )
        _refuse_others(part, address)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _stated(parts: SplitResult, url: str) -> str | None:
    if not parts.fragment:
        return None
    match = HASH.fullmatch(parts.fragment)
    if match is None:
        raise ValueError(f"{url}: after # it should have sha256= and 64 digits of 0 .. 9, a .. f")
    return match[1]


def _refuse_insecure(parts: SplitResult, hashed: bool) -> None:
    if parts.scheme not in ("https", "http"):
        raise ValueError(
            f"{parts.geturl()}: networks are read from https:// only, not {parts.scheme}://"
        )
    if not parts.hostname:
        raise ValueError(f"{parts.geturl()} does not name a server")
    if parts.scheme == "http" and not hashed and parts.hostname not in THIS_MACHINE:
        raise ValueError(
            f"{parts.geturl()}: http:// can be changed on its way. Use https://, or append #sha256= and the file's hash"
        )


def _cached(address: str) -> Path:
    folder = cache_folder("networks")
    if folder is None:
        raise ValueError("there is no home folder for downloads: set UNFLIP_CACHE to a folder")
    return folder / f"{hashlib.sha256(address.encode()).hexdigest()[:32]}.unflip"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """At most five, never from https to http, and never to a place that would have been refused at first."""

    max_redirections = 5

    def __init__(self, hashed: bool) -> None:
        self.hashed = hashed

    def redirect_request(
        self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        fp.close()  # urllib would read all of its text
        target = urlsplit(newurl)
        _refuse_insecure(target, self.hashed)
        if req.type == "https" and target.scheme != "https":
            raise DownloadError(
                f"{req.full_url} leads to {newurl}, which is not https. Ask its publisher for another address"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _UntilEnd(io.RawIOBase):
    """The bytes of a connection, until the time is up."""

    def __init__(self, raw: io.RawIOBase, end: float) -> None:
        self.raw, self.end = raw, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self.end:
            raise TimeoutError(f"it takes more than {WHOLE_SECONDS:.0f} seconds")
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer with a time limit. http.client has none for headers, nor for how often it reads "100 Continue"."""

    def __init__(self, *options: Any, end: float, **named: Any) -> None:
        super().__init__(*options, **named)
        self.fp = io.BufferedReader(_UntilEnd(self.fp.detach(), end))


class _Timed(urllib.request.AbstractHTTPHandler):
    def __init__(self, end: float) -> None:
        super().__init__()
        self.end = end

    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        def connect(*args: Any, **named: Any) -> Any:
            connection = http_class(*args, **named)
            connection.response_class = functools.partial(_Answer, end=self.end)
            return connection

        return super().do_open(connect, req, **options)


class _Http(_Timed, urllib.request.HTTPHandler):
    pass


class _Https(_Timed, urllib.request.HTTPSHandler):
    pass


def _fetch(address: str, path: Path, hashed: bool) -> str:
    """Write what the server sends to ``path``; returns its SHA-256."""
    request = urllib.request.Request(address, headers={"User-Agent": f"unflip/{__version__}"})
    end = time.monotonic() + WHOLE_SECONDS
    opener = urllib.request.build_opener(_Redirects(hashed), _Http(end), _Https(end))
    try:
        with opener.open(request, timeout=ANSWER_SECONDS) as answer, path.open("xb") as file:
            return _copy(answer, file, address)
    except urllib.error.HTTPError as error:
        raise DownloadError(
            f"{address}: the server says {error.code} {error.reason}. Check the address"
        ) from None
    except urllib.error.URLError as error:
        raise DownloadError(_unreachable(address, error.reason)) from None
    except (TimeoutError, ConnectionError, http.client.HTTPException, ValueError) as error:
        # ValueError: an address that leads to a text that is not one
        raise DownloadError(_unreachable(address, error)) from None


def _unreachable(address: str, reason: object) -> str:
    return f"{address} cannot be downloaded ({reason}). Without a network, get the file elsewhere and give its path"


def _copy(answer: Any, file: IO[bytes], address: str) -> str:
    stated = _length(answer.headers.get("Content-Length", ""))
    if stated is not None and stated > MOST_BYTES:
        raise DownloadError(_too_large(address))
    total, written = hashlib.sha256(), 0
    while chunk := answer.read1(
        CHUNK
    ):  # not read: it waits for all of them, however slowly they come
        written += len(chunk)
        if written > MOST_BYTES:
            raise DownloadError(_too_large(address))
        total.update(chunk)
        file.write(chunk)
    if stated is not None and written != stated:
        raise DownloadError(_unreachable(address, f"{written:,} of {stated:,} bytes have arrived"))
    return total.hexdigest()


def _length(text: str) -> int | None:
    """None for what is not a number: a server may send ``²``, or thousands of digits."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _too_large(address: str) -> str:
    return (
        f"{address} has more than {MOST_BYTES:,} bytes, the limit for downloads. If you trust it, download it "
        "yourself and give its path"
    )


def _refuse_others(path: Path, address: str) -> None:
    """A page that says "not found" must not stay in the cache. The loader checks the rest."""
    with path.open("rb") as file:
        start = file.read(9)
    header = int.from_bytes(start[:8], "little")
    if start[8:] != b"{" or header > path.stat().st_size:
        raise DownloadError(
            f"{address} is not a packed network (.unflip). Check that the address is that of the file itself"
        )

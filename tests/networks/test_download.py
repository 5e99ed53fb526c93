"""Networks from URLs: the cache, hashes, limits, redirects, and errors with a name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

import unflip as package
from unflip.networks import download as module
from unflip.networks import locate
from unflip.networks.download import DownloadError, download

NETWORK = locate("resnet20-cifar10").read_bytes()
HASH = hashlib.sha256(NETWORK).hexdigest()


def cached() -> list[Path]:
    folder = module.cache_folder("networks")
    assert folder is not None
    return sorted(folder.glob("*")) if folder.exists() else []


def test_a_network_is_downloaded_once(serve) -> None:
    answers = {"/a/x.unflip": (200, {}, NETWORK)}
    url = serve(answers) + "/a/x.unflip"
    assert package.load(url).input_shape == (3, 32, 32)
    answers.clear()
    assert package.load(url).input_shape == (3, 32, 32), "from the cache"
    assert package.load(f"{url}#sha256={HASH}").input_shape == (3, 32, 32)
    assert len(cached()) == 1


def test_a_damaged_cache_is_replaced_if_the_hash_is_known(serve) -> None:
    url = f"{serve({'/x': (200, {}, NETWORK)})}/x#sha256={HASH}"
    path = download(url)
    path.write_bytes(b"damaged")
    assert download(url).read_bytes() == NETWORK


def test_another_hash_is_refused_and_not_kept(serve) -> None:
    url = f"{serve({'/x': (200, {}, NETWORK)})}/x#sha256={'0' * 64}"
    with pytest.raises(DownloadError, match=f"has the SHA-256 {HASH}, not 000"):
        download(url)
    assert not cached()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.com/x.unflip", "http:// can be changed on its way"),
        ("file:///etc/passwd", "https:// only, not file"),
        ("ftp://example.com/x", "https:// only, not ftp"),
        ("data://x", "https:// only, not data"),
        ("https:///x", "does not name a server"),
        ("https://example.com/x#md5=1", "it should have sha256="),
        ("https://example.com/x#sha256=ABC", "it should have sha256="),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        package.load(url)


@pytest.mark.parametrize("target", ["http://example.com/x", "file:///etc/passwd", "ftp://a/b"])
def test_redirects_to_other_places_are_refused(serve, target: str) -> None:
    url = serve({"/x": (302, {"Location": target}, b"")}) + "/x"
    with pytest.raises((ValueError, DownloadError)):
        download(url)
    assert not cached()


@pytest.mark.parametrize("hashed", [False, True])
def test_https_never_leads_to_http(hashed: bool) -> None:
    """Also not to this machine, whose servers may trust what comes from it."""
    request = urllib.request.Request("https://example.com/x")
    with pytest.raises(DownloadError, match="which is not https"):
        module._Redirects(hashed).redirect_request(
            request, io.BytesIO(), 302, "", {}, "http://127.0.0.1/x"
        )


def test_redirects_end(serve) -> None:
    around = serve({"/x": (302, {"Location": "/x"}, b"")}) + "/x"
    with pytest.raises(DownloadError, match="redirect"):
        download(around)


def test_one_redirect_is_followed(serve) -> None:
    answers = {"/x": (302, {"Location": "/y"}, b""), "/y": (200, {}, NETWORK)}
    assert download(serve(answers) + "/x").read_bytes() == NETWORK


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "2000"}])
def test_a_file_over_the_limit_is_refused(serve, monkeypatch, headers: dict[str, str]) -> None:
    """Also if the server does not say how long it is."""
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    with pytest.raises(DownloadError, match="more than 1,000 bytes, the limit"):
        download(serve({"/x": (200, headers, b"{" * 2000)}) + "/x")
    assert not cached()


@pytest.mark.parametrize("length", ["²", "1" * 5000, "many"])
def test_a_length_that_is_no_number_is_ignored(serve, length: str) -> None:
    """Python's int() fails for the first two, although they are digits."""
    assert module._length(length) is None
    assert module._length("2000") == 2000


def test_a_download_that_takes_too_long_is_ended(serve, monkeypatch) -> None:
    monkeypatch.setattr(module, "WHOLE_SECONDS", -1.0)
    with pytest.raises(DownloadError, match="takes more than"):
        download(serve({"/x": (200, {}, NETWORK)}) + "/x")


def test_a_server_that_sends_byte_by_byte(monkeypatch) -> None:
    """The time was looked at only after 65,536 bytes: a byte every 29 seconds took weeks."""

    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n")
            for _ in range(100):
                connection.sendall(b"x")
                time.sleep(0.05)

    monkeypatch.setattr(module, "WHOLE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(DownloadError, match="takes more than"):
            download(f"http://127.0.0.1:{server.getsockname()[1]}/x")
    assert time.monotonic() - began < 3


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    "answer", [CONTINUE, b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 302 Found\r\nX:"]
)
def test_an_answer_that_never_begins(monkeypatch, answer: bytes) -> None:
    """http.client waits for the end of the headers without a time limit."""

    def stream() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            connection.sendall(answer)
            for _ in range(100):
                connection.sendall(answer if answer == CONTINUE else b"x")
                time.sleep(0.05)

    monkeypatch.setattr(module, "WHOLE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=stream, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(DownloadError, match="takes more than"):
            download(f"http://127.0.0.1:{server.getsockname()[1]}/x")
    assert time.monotonic() - began < 3


def test_a_file_that_is_cut_off_is_refused(serve) -> None:
    headers = {"Content-Length": str(len(NETWORK))}
    with pytest.raises(DownloadError, match=r"of 72,312 bytes have arrived|IncompleteRead"):
        download(serve({"/x": (200, headers, NETWORK[:50000])}) + "/x")
    assert not cached()


@pytest.mark.parametrize("body", [b"", b"<html>not found</html>", NETWORK[:100]])
def test_what_is_not_a_network_is_not_kept(serve, body: bytes) -> None:
    with pytest.raises(DownloadError, match="is not a packed network"):
        download(serve({"/x": (200, {}, body)}) + "/x")
    assert not cached()


def test_errors_have_a_name(serve, monkeypatch) -> None:
    with pytest.raises(DownloadError, match="the server says 404 Not Found"):
        download(serve({}) + "/x")
    with pytest.raises(DownloadError, match="Without a network, get the file elsewhere"):
        download("https://127.0.0.1:1/x")
    monkeypatch.delenv("UNFLIP_CACHE")
    monkeypatch.setattr(module, "cache_folder", lambda part: None)
    with pytest.raises(ValueError, match="set UNFLIP_CACHE"):
        download("https://127.0.0.1:1/x")


def test_names_of_servers_never_become_paths(serve) -> None:
    """The cache names files by a hash."""
    headers = {"Content-Disposition": "attachment; filename=../../evil"}
    path = download(serve({"/../../evil.unflip": (200, headers, NETWORK)}) + "/../../evil.unflip")
    assert [path] == cached()
    assert path.name.removesuffix(".unflip").isalnum()

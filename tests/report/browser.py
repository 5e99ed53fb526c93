"""Headless Chromium for the tests, controlled through the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 30.0


class WebSocket:
    """The part of RFC 6455 that a DevTools client needs: sends masked text frames, receives messages."""

    def __init__(self, url: str) -> None:
        match = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", url)
        assert match, url
        self.socket = socket.create_connection((match[1], int(match[2])), timeout=SECONDS)
        self.buffer = b""
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {match[3]} HTTP/1.1\r\nHost: {match[1]}:{match[2]}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self._more()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        assert b" 101 " in head.splitlines()[0], head

    def _more(self) -> bytes:
        data = self.socket.recv(1 << 16)
        assert data, "the browser closed the connection"
        return data

    def _take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            self.buffer += self._more()
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x81, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(head + mask + masked)

    def receive(self) -> str:
        message = b""
        while True:
            first, second = self._take(2)
            size = second & 0x7F
            if size == 126:
                [size] = struct.unpack("!H", self._take(2))
            elif size == 127:
                [size] = struct.unpack("!Q", self._take(8))
            data = self._take(size)
            if first & 0x0F in (0x0, 0x1):  # a text frame, not a ping
                message += data
                if first & 0x80:
                    return message.decode()


class Page:
    """A tab: its errors and warnings, its network requests, and user input."""

    def __init__(self, socket_: WebSocket) -> None:
        self.socket, self.number = socket_, 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") == self.number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])

    def open(self, path: Path, width: int, height: int, dark: bool = False) -> None:
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        self.frame()

    def js(self, expression: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.js(condition):
            assert time.monotonic() < end, f"{condition} did not become true within {SECONDS} s"
            time.sleep(0.02)

    def frame(self) -> None:
        """Wait for two frames: the first observes sizes, the second draws."""
        self.js("new Promise(d => requestAnimationFrame(() => requestAnimationFrame(() => d(1))))")

    def place(self, expression: str) -> tuple[float, float, float, float]:
        """Scroll an element into view and return its left, top, width and height."""
        box = self.js(
            f"(() => {{ const e = {expression}; e.scrollIntoView({{block: 'center', behavior: 'instant'}}); "
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        return tuple(box)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, expression: str) -> None:
        left, top, width, height = self.place(expression)
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=left + width / 2, y=top + height / 2, button="left", clickCount=1,
            )  # fmt: skip

    def tap(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path) -> Path:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A new Chromium with one tab, terminated at the end of the block."""
    assert CHROMIUM is not None
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-extensions",
        "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}",
    ]  # fmt: skip
    process = subprocess.Popen(
        [CHROMIUM, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield Page(WebSocket(_first_tab(profile / "DevToolsActivePort", process)))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first_tab(note: Path, process: subprocess.Popen[bytes]) -> str:
    """The tab's address. Chromium writes its port into a file when it is ready."""
    import urllib.request

    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        if note.exists() and note.read_text().count("\n"):
            port = note.read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                tabs = [tab for tab in json.loads(answer.read()) if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("chromium did not start")

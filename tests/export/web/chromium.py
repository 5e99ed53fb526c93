"""A headless Chromium for tests, controlled through pipes by its own protocol: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions")
TIMEOUT = 60
# The protocol reads from 3 and writes to 4. Both are copied to high numbers first: one may be where the other must go.
START = """
import os, sys
read, write = (os.dup2(int(number), 100 + i) for i, number in enumerate(sys.argv[1:3]))
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. ``evaluate`` runs JavaScript there; console messages and requests are kept."""

    def __init__(self, *flags: str) -> None:
        program = find()
        assert program is not None
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        read, to_write = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", START, str(to_read), str(to_write), program),
                *(*FLAGS, *flags),
                *(f"--user-data-dir={self.folder.name}", "--remote-debugging-pipe"),
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._read = os.fdopen(read, "rb")
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(10)
        self._read.close()
        self.folder.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = self._read.read1(1 << 16)
            assert part, "the browser has ended"
            self._pending += part
        text, _, self._pending = self._pending.partition(b"\0")
        message = json.loads(text)
        self._keep(message.get("method", ""), message.get("params", {}))
        return message

    def _keep(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            if not (url := params["request"]["url"]).startswith(("data:", "blob:")):
                self.requests.append(url)
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str([one.get("value") for one in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(
                params["exceptionDetails"].get("exception", {}).get("description", "?")
            )
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])

    def open(self, address: str) -> None:
        """Until its scripts have run, except for what they do later."""
        self.send("Page.navigate", url=address)
        self.wait_for(
            f"location.href === {json.dumps(address)} && document.readyState === 'complete'"
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression, or of the promise that it gives."""
        answer = self.send(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            timeout=1000 * TIMEOUT,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until a condition is true; asked every 50 ms."""
        self.evaluate(
            "new Promise((done, fail) => {"
            f"  const end = Date.now() + {1000 * TIMEOUT};"
            "  const ask = () => {"
            f"    if ({condition}) done(true);"
            "    else if (Date.now() > end) fail(new Error('not in time'));"
            "    else setTimeout(ask, 50); };"
            "  ask(); })"
        )

    def give_file(self, selector: str, file: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def drag(self, kind: str, *files: Path, text: str | None = None) -> None:
        """One event of a drag from outside the page: dragEnter, dragOver, dragCancel or drop."""
        items = [] if text is None else [{"mimeType": "text/plain", "data": text}]
        data = {"items": items, "files": [str(file) for file in files], "dragOperationsMask": 1}
        self.send("Input.dispatchDragEvent", type=kind, x=50, y=50, data=data)

    def paste(self) -> None:
        """The key of the browser's own command, with what the clipboard contains."""
        key = {"key": "v", "code": "KeyV", "windowsVirtualKeyCode": 86, "modifiers": 2}
        self.send("Input.dispatchKeyEvent", type="keyDown", commands=["paste"], **key)
        self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def screenshot(self, file: Path) -> None:
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

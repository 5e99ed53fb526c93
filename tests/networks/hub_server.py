"""A small server that speaks the part of the Hugging Face Hub's protocol that uploads and downloads of a model need."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]


class Hub:
    """Repositories in memory: the files of each commit, oldest first. ``asked`` are the requests."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.large: Files = {}
        self.asked: list[str] = []
        self.refuses_writes = False

    def commit(self, repository: str, files: Files) -> str:
        commits = self.commits.setdefault(repository, {})
        before = list(commits.values())[-1] if commits else {}
        name = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[name] = {**before, **files}
        return name

    def find(self, repository: str, revision: str) -> tuple[str, Files] | None:
        commits = self.commits[repository]
        name = list(commits)[-1] if revision == "main" and commits else revision
        return (name, commits[name]) if name in commits else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(
        self, code: int, body: bytes = b"", headers: dict[str, str] | None = None, size: int = -1
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size < 0 else size))
        self.end_headers()
        self.wfile.write(body)

    def say(self, content: Any) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def missing(self, code: str) -> None:
        self.answer(404, headers={"X-Error-Code": code})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self) -> None:
        self.resolve(with_body=False)

    def do_GET(self) -> None:
        self.resolve(with_body=True)

    def resolve(self, with_body: bool) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^/?]+)", self.path)
        if match is None:
            return self.missing("EntryNotFound")
        repository, revision, name = match.groups()
        if repository not in self.hub.commits:
            return self.missing("RepoNotFound")
        found = self.hub.find(repository, revision)
        if found is None:
            return self.missing("RevisionNotFound")
        commit, files = found
        if name not in files:
            return self.missing("EntryNotFound")
        data = files[name]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        about = {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes"}
        return self.answer(200, data if with_body else b"", about, len(data))

    def do_POST(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        body = self.body()
        if self.hub.refuses_writes or not self.headers.get("Authorization"):
            return self.answer(401, b"{}")
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            repository = f"{wanted['organization']}/{wanted['name']}"
            self.hub.commits.setdefault(repository, {})
            return self.say({"url": f"http://{self.headers['Host']}/{repository}"})
        if self.path == "/api/validate-yaml":
            return self.say({"errors": [], "warnings": []})
        if self.path.endswith("/info/lfs/objects/batch"):
            return self.say({"transfer": "basic", "objects": self.places(json.loads(body))})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main(\?.*)?", self.path)
        if match is None:
            return self.answer(404, b"{}")
        if match[2] == "preupload":
            asked = json.loads(body)["files"]
            return self.say({"files": [upload_mode(file["path"]) for file in asked]})
        name = self.hub.commit(match[1], self.committed(body))
        url = f"http://{self.headers['Host']}/{match[1]}/commit/{name}"
        return self.say({"commitUrl": url, "commitOid": name, "success": True})

    def places(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        home = f"http://{self.headers['Host']}/large"
        return [
            {**one, "actions": {"upload": {"href": f"{home}/{one['oid']}"}}}
            for one in asked["objects"]
        ]

    def do_PUT(self) -> None:
        data = self.body()
        assert self.path == f"/large/{hashlib.sha256(data).hexdigest()}"
        self.hub.large[self.path.rpartition("/")[2]] = data
        self.answer(200)

    def committed(self, body: bytes) -> Files:
        files = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        return files


def upload_mode(path: str) -> dict[str, Any]:
    """As the real one: some kinds of files are stored as large ones."""
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def hub_server() -> Iterator[tuple[Hub, str]]:
    """The hub and its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HandlerOfHub", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

"""What these tests share: a finished run that nobody had to train, and a server of files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from unflip.data import ImageSet
from unflip.recipes.build import build_model
from unflip.recipes.load import load_recipe
from unflip.runs import Run
from unflip.runs.checkpoint import Checkpoint

TINY = ["model={name: vgg_small, width: 4}", "epochs=1"]
LINE = {"epoch": 1, "loss": 2.0, "accuracy": 12.5, "seconds": 1.0}
RESULT = {"accuracy": 12.5, "top5": 50.0, "epochs": 1, "seconds": 1.0, "seed": 0}


@pytest.fixture
def run(tmp_path: Path, digits: ImageSet) -> Run:
    """With random weights."""
    recipe = load_recipe("digits-dorefa", TINY)
    made = Run.of_seed(tmp_path / "runs" / "tiny", 0)
    made.folder.mkdir(parents=True)
    command = "unflip train tiny.yaml --start /home/ada/secret/first"
    made.begin(recipe.plain(), 0, command, digits.spec)
    state = build_model(recipe, digits.spec, seed=3).state_dict()
    made.save_checkpoint(Checkpoint(1, 0, {f"model.{k}": v for k, v in state.items()}, {}))
    made.add_metrics(LINE)
    made.finish(RESULT)
    return made


Answer = tuple[int, dict[str, str], bytes]
Serve = Callable[[dict[str, Answer]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve({"/path": (status, headers, body)})`` is the address of a server that answers so."""
    servers: list[ThreadingHTTPServer] = []

    def begin(answers: dict[str, Answer]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                status, headers, body = answers.get(self.path, (404, {}, b""))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()

"""The notebook runs, cell by cell, with fewer epochs; and it is stored without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

NOTEBOOK = Path(__file__).parent.parent / "examples" / "digits.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_the_notebook_learns(cells, tmp_path, monkeypatch, capsys) -> None:
    import matplotlib

    matplotlib.use("agg")  # shows nothing
    monkeypatch.chdir(tmp_path)  # it writes a file
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    short = re.sub(r"^EPOCHS = 20$", "EPOCHS = 2", code, flags=re.MULTILINE)
    assert short != code
    exec(compile(short, str(NOTEBOOK), "exec", dont_inherit=True), {})
    matplotlib.pyplot.close("all")
    shown = capsys.readouterr().out
    assert float(re.search(r"([\d.]+)% of 397 test images", shown)[1]) > 50
    assert float(re.search(r"the same class as in PyTorch for ([\d.]+)%", shown)[1]) > 99
    assert re.search(r"PyTorch [\d.]+ ms, unflip [\d.]+ ms", shown)
    assert torch.is_grad_enabled()


def test_the_notebook_has_no_outputs(cells) -> None:
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)


def test_the_links_of_the_notebook_lead_somewhere(cells) -> None:
    text = "".join("".join(cell["source"]) for cell in cells)
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert len(links) >= 2
    assert all((NOTEBOOK.parent / link).exists() for link in links)

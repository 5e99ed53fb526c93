"""Tables as a person meets them: printed, in a notebook and by rich."""

from __future__ import annotations

import io
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from torch import nn

import unflip
from unflip.tables import Table

TABLE = Table(
    ("layer", "bits"), [("a", "1"), ("[red]<b>&", "1,024")], ("bits",), "A title", ["end"]
)


def printed_by_rich(shown: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_text_is_aligned() -> None:
    assert str(TABLE).splitlines() == [
        "A title",
        "layer       bits",
        "─────────  ─────",
        "a              1",
        "[red]<b>&  1,024",
        "end",
    ]


def test_a_table_without_rows() -> None:
    assert str(Table(("layer", "bits"), [])) == "layer  bits\n─────  ────"


def test_html_is_escaped() -> None:
    html = TABLE._repr_html_()
    page = ElementTree.fromstring(f"<div>{html}</div>")  # every tag is closed
    assert [cell.text for cell in page.iter("td")] == ["a", "1", "[red]<b>&", "1,024"]
    assert "<b>" not in html
    sides = [cell.get("style") for cell in page.iter("td")]
    assert sides[:2] == ["text-align: left", "text-align: right"]


def test_rich_takes_no_cell_for_markup() -> None:
    shown = printed_by_rich(TABLE)
    for part in ("A title", "[red]<b>&", "1,024", "end"):
        assert part in shown


def test_a_row_with_a_cell_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row \('a', 'b'\) should have 1 cells"):
        Table(("layer",), [("a", "b")])


def net() -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 8, 3, padding=1, bias=False))
    model.add_module("<b>", nn.Conv2d(8, 8, 3, padding=1, bias=False))
    model.add_module("pool", nn.Flatten())
    model.add_module("last", nn.Linear(8 * 64, 4))
    return unflip.binarize(model, "dorefa", quiet=True)


def test_cost_prints_as_a_table() -> None:
    cost = unflip.cost(net(), torch.randn(1, 3, 8, 8))
    lines = str(cost).splitlines()
    assert lines[0].split() == [
        "layer",
        "kind",
        "weight",
        "bits",
        "input",
        "bits",
        "Kbit",
        "M",
        "MACs",
        "M",
        "FLOPs",
    ]
    assert lines[2].split() == ["stem", "Conv2d", "32", "32", "6.9", "0.01", "0.01"]
    assert lines[3].split() == ["<b>", "BinaryConv2d", "1", "1", "0.6", "0.04", "0.00"]
    assert lines[-1] == "memory 0.07 Mbit (0.1 Mibit, 0.01 MB)   FLOPs 0.0 M"
    assert len({len(line) for line in lines[:-1]}) == 1, "aligned"
    assert '<td style="text-align: left">&lt;b&gt;</td>' in cost._repr_html_()
    assert "BinaryConv2d" in printed_by_rich(cost)


def test_summary_prints_as_a_table_and_is_still_a_list() -> None:
    summary = unflip.summary(net())
    lines = str(summary).splitlines()
    assert lines[0].split() == ["layer", "kind", "weights", "method"]
    assert lines[2].split() == ["stem", "Conv2d", "216", "float"]
    assert lines[3].split() == ["<b>", "BinaryConv2d", "576", "dorefa"]
    assert lines[-1] == "1 of 3 layers are binary: 576 of 2,840 weights"
    assert "&lt;b&gt;" in summary._repr_html_()
    assert "dorefa" in printed_by_rich(summary)
    assert [layer.name for layer in summary if layer.binary] == ["<b>"]


def test_printing_needs_no_rich() -> None:
    program = "import sys, unflip.tables as t; print(t.Table(('a',), [('b',)])); print('rich' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["a", "─", "b", "False"]

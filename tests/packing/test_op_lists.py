"""All lists of ops agree: docs/format.md, packer, references, loader, engine, ONNX export and fuzzing seeds.

docs/format.md is the specification. A new op must be in every list; each test names the list that lacks it.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unflip.export.onnx  # noqa: F401  (registers the export's ops)
from unflip.export import activations, exporter
from unflip.export.plain_c import source as plain_c
from unflip.packing import describe, reference

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
COMMON = {"op", "name", "inputs"}  # fields of every op
Fields = dict[str, set[str]]


# docs/format.md


def section(title: str) -> str:
    """The text under a heading that starts with this title."""
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {title}.*?$(.*?)(?=^##)", text, re.M | re.S)
    assert found is not None, f"docs/format.md has no section {title!r}"
    return found[1]


def rows(title: str) -> Iterator[tuple[list[str], str]]:
    """(names in the first cell, the other cells) of each row of a section's table."""
    for line in section(title).splitlines():
        first, _, rest = line.strip("| ").partition(" | ")
        if line.startswith("| `"):
            yield names_in(first), rest


def names_in(text: str) -> list[str]:
    return re.findall(r"`(?!null`)([a-z_]+)`", text)


def documented_ops() -> Fields:
    """op -> its fields."""
    ops = {
        op: {name for names, _ in rows(op) for name in names} - COMMON
        for op in ("quantize", "to_bytes", "conv")
    }
    ops["map"] = {"steps"}
    for names, text in rows("The rest"):
        mentioned = set(names_in(text))
        fields = mentioned - COMMON - set(ops)
        for other in mentioned & set(ops):  # "the fields of `max_pool`"
            fields |= ops[other]
        ops |= dict.fromkeys(names, fields)
    return ops


def documented_steps() -> Fields:
    return {name: set(names_in(text)) for [name], text in rows("steps")}


def documented_activations() -> set[str]:
    [text] = [text for names, text in rows("The rest") if names == ["curve"]]
    return set(re.findall(r'`"([a-z_]+)"`', text))


OPS, STEPS, ACTIVATIONS = documented_ops(), documented_steps(), documented_activations()


def test_the_documentation_was_understood() -> None:
    assert len(OPS) >= 19
    assert OPS["avg_pool"] == {"kernel", "stride", "padding", "ceil", "count_padding"}
    assert OPS["concat"] == set()
    assert STEPS["clamp"] == {"low", "high"}
    assert {"sigmoid", "mish"} <= ACTIVATIONS


# Python


def emitted() -> set[str]:
    """The ops that the packer writes: ``c.emit("conv", ...)`` and ``Op("map", ...)``."""
    found = set()
    for path in (ROOT / "src" / "unflip" / "packing").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("emit", "Op") and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    return found - {"gone"}  # a place holder while ops are fused


def test_the_packer_writes_every_op() -> None:
    assert emitted() == set(OPS)


def test_the_reference_runs_every_op() -> None:
    assert set(reference.OPS) == set(OPS)
    assert set(reference.ACTIVATIONS) == ACTIVATIONS


def test_describe_knows_every_ops_shape() -> None:
    assert set(describe.SHAPES) == set(OPS)


def arguments(function: Any) -> set[str]:
    """The keyword-only arguments of an export function: the fields of its op or step."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"name", "exact"}


def test_the_export_has_every_op_step_and_field() -> None:
    assert {name: arguments(function) for name, function in exporter.OPS.items()} == OPS
    assert {name: arguments(function) for name, function in exporter.STEPS.items()} == STEPS
    assert set(activations.ACTIVATIONS) == ACTIVATIONS


def test_plain_c_has_every_op() -> None:
    assert set(plain_c.MAKERS) == set(OPS) - {"to_bytes"}  # part of the convolutions that read it
    curves = (Path(plain_c.__file__).parent / "kernels" / "curve.c").read_text()
    assert {name for name in ACTIVATIONS if f"float u_{name}(float x)" in curves} == ACTIVATIONS


def test_the_fuzzing_seeds_have_every_op_step_and_field() -> None:
    seeds = runpy.run_path(str(NATIVE / "fuzz" / "seeds.py"))["seeds"]()
    ops, steps = dict[str, set[str]](), dict[str, set[str]]()
    functions = set()
    for packed in seeds.values():
        for op in packed.graph["ops"]:
            ops.setdefault(op["op"], set()).update(set(op) - COMMON)
            functions |= {op["function"]} if "function" in op else set()
            for step in op.get("steps", []):
                steps.setdefault(step["step"], set()).update(set(step) - {"step"})
    assert ops == OPS
    assert steps == STEPS
    assert functions == ACTIVATIONS


# C++


def code(path: str) -> str:
    """A source file without comments."""
    return re.sub(r"//.*", "", (NATIVE / path).read_text(encoding="utf-8"))


def listed(path: str, macro: str) -> dict[str, str]:
    """kind -> name in the file, from a list such as UNFLIP_OPS."""
    found = re.search(rf"#define {macro}\(\w+\)((?:.*\\\n)*.*)", code(path))
    assert found is not None, f"native/{path} has no {macro}"
    return dict(re.findall(r'\((\w+), "(\w+)"\)', found[1]))


KINDS = listed("src/graph.h", "UNFLIP_OPS")


def functions_of_the_loader() -> dict[str, str]:
    """Function -> body, for the member functions of graph.cpp's loader."""
    pattern = r"^  [^\s/][^;{}]*?\b(\w+)\([^;{}]*\)(?: const)? \{\n(.*?)^  \}"
    return dict(re.findall(pattern, code("src/graph.cpp"), re.M | re.S))


LOADER = functions_of_the_loader()
KEY = re.compile(
    r"(?:fields\.(?:optional|required|string|boolean|list|integers?|pair|numbers?)\(|"
    r"\b(?:tensor|floats|channel_floats)\(fields, )\"(\w+)\""
)


def fields_read(text: str, kind: str) -> set[str]:
    """The fields that this code reads, itself or by calling read_...(fields, ...)."""
    found = set()
    for line in text.splitlines():
        only = re.search(r"if \(op\.kind == OpKind::(\w+)", line)
        if only and only[1] != kind:
            continue
        found |= set(KEY.findall(line))
        for called in re.findall(r"\b(read_\w+)\(fields\b", line):
            found |= fields_read(LOADER[called], kind)
    return found - COMMON


def cases(body: str, enum: str) -> dict[str, str]:
    """kind -> the code of its case; a case without code shares that of the next."""
    parts = re.split(rf"case {enum}::(\w+):", body)[1:]
    found, waiting = dict[str, str](), list[str]()
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        waiting.append(kind)
        if text.strip():
            found |= dict.fromkeys(waiting, text.partition("break;")[0])
            waiting = []
    return found


def test_the_loader_has_every_op_and_activation() -> None:
    assert set(KINDS.values()) == set(OPS)
    assert set(listed("src/activation.h", "UNFLIP_ACTIVATIONS").values()) == ACTIVATIONS


def test_the_loader_reads_every_field() -> None:
    read = cases(LOADER["read_kind"], "OpKind")
    assert set(read) == set(KINDS)
    found = {KINDS[kind]: fields_read(text, kind) for kind, text in read.items()}
    for op in ("conv", "map"):
        found[op] |= {"steps"}  # read after the switch
    assert found == OPS


def test_the_loader_reads_every_step() -> None:
    names = re.search(r"kSteps\[\] = \{(.*?)\};", code("src/graph.cpp"), re.S)
    assert names is not None
    assert set(re.findall(r'"(\w+)"', names[1])) == set(STEPS)
    found = cases(LOADER["read_step"], "StepKind")
    assert {k.lower(): fields_read(text, k) for k, text in found.items()} == STEPS


def test_the_engine_runs_every_op() -> None:
    sources = [NATIVE / "src" / "engine.cpp", *(NATIVE / "src" / "engine").glob("*.cpp")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert set(KINDS) <= set(re.findall(r"OpKind::(\w+)", text))
    computed = re.findall(r"case Activation::(\w+):", code("src/kernels/activations.h"))
    assert set(computed) == set(listed("src/activation.h", "UNFLIP_ACTIVATIONS"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_engines_own_reference_has_every_op(kind: str) -> None:
    assert f"case OpKind::{kind}:" in code("tests/engine_test.cpp")

"""Python calls the C API with ctypes, which checks nothing: the signatures must be those of unflip.h."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from unflip.runtime._native import SIGNATURES, Limits

NUMBERS = {
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
    "void": None,
}


def declared(header: str) -> dict[str, list[str]]:
    """Return type and argument types of each function, as C writes them, without names."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    found = {}
    for result, name, arguments in re.findall(
        r"UNFLIP_API ([\w ]+\*?) ?unflip_(\w+)\(([^)]*)\);", text
    ):
        types = [] if arguments == "void" else arguments.split(",")
        found[name] = [result.strip(), *(kind(argument.strip()) for argument in types)]
    return found


def kind(argument: str) -> str:
    if argument.endswith("]"):
        return re.sub(r"\w+\[\d*\]$", "*", argument)
    return re.sub(r"\w+$", "", argument).strip()


def fits(c: str, python: object) -> bool:
    if c in NUMBERS:
        return python is NUMBERS[c]
    if c == "const char*":
        return python is ctypes.c_char_p
    if "unflip_limits" in c:
        return python is ctypes.POINTER(Limits)
    pointers = {"int *": ctypes.c_int, "double*": ctypes.c_double, "float* const*": ctypes.c_void_p}
    if c in pointers:
        return python is ctypes.POINTER(pointers[c])
    return python in (ctypes.c_void_p, ctypes.c_char_p)  # a model, samples or a file's bytes


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_that_of_the_header(name: str, root: Path) -> None:
    header = declared((root / "native/include/unflip.h").read_text())
    assert len(header[name]) == len(SIGNATURES[name])
    for c, python in zip(header[name], SIGNATURES[name], strict=True):
        assert fits(c, python), f"{name}: {c} is not {python}"


def test_the_limits_are_those_of_the_header(root: Path) -> None:
    header = (root / "native/include/unflip.h").read_text()
    struct = re.search(r"typedef struct unflip_limits \{(.*?)\}", header, re.DOTALL)
    assert struct is not None
    assert re.findall(r"uint64_t (\w+);", struct[1]) == [name for name, _ in Limits._fields_]

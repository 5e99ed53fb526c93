"""The import graph of src/unflip: its order, no cycles, what works without torch. docs/architecture.md shows the same.

Imports under ``if TYPE_CHECKING`` do not count. Imports inside functions count for the order and for cycles, but not
for what importing a module needs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"

# A package imports only packages before it. The longest name that fits a module counts: methods.base is not methods.
ORDER = [
    "disk",
    "hints",
    "uses",
    "tables",
    "printable",
    "pictures",
    "resize",
    "vectorized",
    "ste",
    "unflip",  # the names that a user sees; imported when they are first used
    "networks",
    "methods.base",
    "methods.registry",
    "layers",
    "methods",
    "kernels",
    "ends",
    "freeze",
    "binarize",
    "cost",
    "models",
    "data",
    "recipes",
    "runs",
    "train",
    "study",
    "report",
    "packing",
    "runtime",
    "export",
    "imports",
    "publish",
    "callbacks",
    "demo",
    "cli",
    "__main__",
]

# Importing these does not import torch: they read runs, reports and packed files, and declare what is to be trained.
TORCH_FREE = [
    "unflip",
    "unflip.__main__",
    "unflip.hints",
    "unflip.uses",
    "unflip.tables",
    "unflip.printable",
    "unflip.pictures",
    "unflip.resize",
    "unflip.cli.*",
    "unflip.data.*",
    "unflip.export.*",
    "unflip.networks.*",
    "unflip.packing",
    "unflip.packing.describe",
    "unflip.packing.file",
    "unflip.recipes.*",
    "unflip.report.*",
    "unflip.runs.*",
    "unflip.runtime.*",
    "unflip.study",
    "unflip.study.arm",
    "unflip.study.comparison",
    "unflip.study.paper",
    "unflip.study.study",
    "unflip.study.summary",
    "unflip.study.table",
    "unflip.train",
    "unflip.train.job",
]
NEEDS_TORCH = [
    "unflip.data.images_source",
    "unflip.data.source",
    "unflip.data.feed",
    "unflip.recipes.build",
    "unflip.report.signs",
    "unflip.runs.load",
]

# One method among others. These may name it: its own code, its kernels, its paper's experiments, and the demo.
LNS = re.compile(r"\b(LNS|lns|MappedSign)\b")
MAY_NAME_LNS = (
    *("methods/", "kernels/", "recipes/", "study/paper.py", "study/imagenet.py"),
    "demo.py",
)

MOST_FILES_OF_TRAIN = 14
MOST_LINES = 400
# A longer file says why, in its first lines, in a sentence with these words.
REASON = re.compile(r"[Mm]ore than 400 lines(:|,? because) \w+")
REASON_WITHIN = 30
SOURCES = (".py", ".c", ".cpp", ".h", ".cu", ".js")


class Import(NamedTuple):
    target: str
    at_import: bool  # False inside a function, which runs later


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """With the stub of the native extension, which is not written in Python."""
    paths = [*SRC.rglob("unflip/**/*.py"), *SRC.rglob("unflip/**/*.pyi")]
    return {module_name(path): path for path in sorted(paths)}


@cache
def imports_of(module: str) -> frozenset[Import]:
    return frozenset(found_in(ast.parse(modules()[module].read_text(encoding="utf-8")), True))


def found_in(node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: write the whole name of the module"
            for alias in child.names:
                inside = f"{child.module}.{alias.name}"
                yield Import(inside if inside in modules() else str(child.module), at_import)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from found_in(other, at_import)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from found_in(child, at_import and not function)


def own_imports(module: str) -> set[str]:
    return {i.target for i in imports_of(module) if i.target in modules()} - {module}


def package_of(module: str) -> str:
    if module == "unflip":
        return module
    name = module.removeprefix("unflip.")
    fits = [package for package in ORDER if f"{name}.".startswith(f"{package}.")]
    assert fits, f"{module} is in no package of ORDER: add it, or move it into a package"
    return max(fits, key=len)


def package_graph() -> dict[str, list[str]]:
    """The packages that each package imports, both in ORDER."""
    edges: dict[str, set[str]] = {package: set() for package in ORDER}
    for module in modules():
        mine = package_of(module)
        edges[mine] |= {package_of(target) for target in own_imports(module)} - {mine}
    return {package: sorted(found, key=ORDER.index) for package, found in edges.items()}


def test_every_package_of_the_order_exists() -> None:
    assert {package_of(module) for module in modules()} == set(ORDER)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_packages_before_its_own(module: str) -> None:
    place = ORDER.index(package_of(module))
    later = [t for t in own_imports(module) if ORDER.index(package_of(t)) > place]
    assert not later, f"{module} imports {later}, which come later in ORDER"


def test_there_are_no_cycles() -> None:
    left = {module: own_imports(module) for module in modules()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    on_a_cycle = {m: sorted(targets & left.keys()) for m, targets in left.items()}
    assert not on_a_cycle, f"modules on a cycle, or that import one: {on_a_cycle}"


def test_kernels_and_runtime_know_only_their_neighbors() -> None:
    graph = package_graph()
    assert set(graph["kernels"]) <= {
        "disk",
        "vectorized",
        "methods.base",
        "methods.registry",
        "layers",
        "methods",
    }
    assert set(graph["runtime"]) <= {"hints", "printable", "pictures", "networks"}
    assert set(graph["export"]) <= {"hints", "packing", "runtime"}


def needed(module: str) -> dict[str, str]:
    """All modules that importing ``module`` imports, each with the one that imports it."""
    found: dict[str, str] = {}
    waiting = [(module, "")]
    while waiting:
        name, by = waiting.pop()
        if name in found:
            continue
        found[name] = by
        if name in modules():
            parents = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]
            targets = [i.target for i in imports_of(name) if i.at_import]
            waiting += [(target, name) for target in (*parents, *targets)]
    return found


def torch_free() -> list[str]:
    names = []
    for entry in TORCH_FREE:
        package = entry.removesuffix(".*")
        names += (
            [package]
            if entry == package
            else [m for m in modules() if f"{m}.".startswith(f"{package}.")]
        )
    return [name for name in names if name not in NEEDS_TORCH and modules()[name].suffix == ".py"]


@pytest.mark.parametrize("module", torch_free())
def test_importing_a_module_that_reads_files_does_not_import_torch(module: str) -> None:
    found = needed(module)
    chain = [name] if (name := next((n for n in found if n.split(".")[0] == "torch"), "")) else []
    while chain and found[chain[-1]]:
        chain.append(found[chain[-1]])
    assert not chain, f"{' <- '.join(chain)}: import it inside the function that needs it"


def test_these_modules_can_be_imported_where_torch_is_not_installed() -> None:
    """The same without reading sources: names may be imported by other means than an import statement."""
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"  # importing it raises
        f"for module in {torch_free()}: importlib.import_module(module)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def text_files() -> list[Path]:
    endings = (".py", ".pyi", ".js", ".html", ".css")
    return [path for path in sorted(SRC.rglob("unflip/**/*")) if path.suffix in endings]


def test_one_method_is_named_only_where_it_is_at_home() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        if not str(path.relative_to(SRC / "unflip")).startswith(MAY_NAME_LNS)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if LNS.search(line)
    ]
    assert not found, "say what a method has, not which method it is:\n" + "\n".join(found)


def test_training_is_a_small_package() -> None:
    assert len(list((SRC / "unflip" / "train").glob("*.py"))) <= MOST_FILES_OF_TRAIN


def tracked_sources() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in done.stdout.splitlines() if name.endswith(SOURCES)]
    return [path for path in paths if path.is_file()]


def test_a_long_file_says_why_it_is_long() -> None:
    unexplained = []
    for path in tracked_sources():
        lines = path.read_text(encoding="utf-8").splitlines()
        head = re.sub(r"[\s/*#]+", " ", " ".join(lines[:REASON_WITHIN]))
        if len(lines) > MOST_LINES and not REASON.search(head):
            unexplained.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    assert not unexplained, (
        f"split these, or write 'more than {MOST_LINES} lines, because ...' into the first {REASON_WITHIN} lines:\n"
        + "\n".join(unexplained)
    )


def test_the_architecture_page_shows_this_graph() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- import graph -->\n(.*?)\n<!-- import graph ends -->", text, re.S)
    assert shown is not None
    assert shown[1] == graph_table(), f"docs/architecture.md should show:\n{graph_table()}"


def graph_table() -> str:
    rows = [
        f"| `{package}` | {', '.join(f'`{target}`' for target in targets) or '–'} |"
        for package, targets in package_graph().items()
    ]
    return "\n".join(["| package | imports |", "|---|---|", *rows])

"""The ``unflip`` command. Each file holds one group of commands, and each command is one public function.

Commands import what they need when they run: ``unflip show`` works where torch is not installed.
"""

# ruff: noqa: I001  'unflip --help' lists the commands in the order of these imports
from unflip.cli import doctor, catalog, networks, data, train, study, report, pack, imports, packed
from unflip.cli.app import app, run

__all__ = [
    "app",
    "catalog",
    "data",
    "doctor",
    "imports",
    "networks",
    "pack",
    "packed",
    "report",
    "run",
    "study",
    "train",
]

"""Importing networks that others trained: one file per format, each giving a packed network.

An importer reads a file without running code from it. It builds a torch module and packs that like any other model; the
one for QONNX builds the graph of the packed file itself.
"""

from unflip.imports.errors import CannotImport

__all__ = ["CannotImport"]

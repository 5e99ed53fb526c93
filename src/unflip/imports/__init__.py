"""Importing networks that others trained: one file per format, each giving a packed network.

An importer reads a file without running code from it, builds a torch module, and packs that like any other model.
"""

from unflip.imports.errors import CannotImport

__all__ = ["CannotImport"]

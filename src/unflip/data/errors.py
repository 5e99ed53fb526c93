"""The error of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Data that is missing, damaged or of the wrong form. The message says what to do."""


def missing_package(package: str, purpose: str) -> DataError:
    """The error for an optional package that is not installed; the caller raises it."""
    return DataError(f"{purpose} needs {package}. Install it with: pip install {package}")

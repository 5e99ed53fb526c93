"""The error of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Data that is missing, damaged or of the wrong form. The message says what to do."""

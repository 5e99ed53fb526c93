"""The error of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Data that is missing, damaged or of the wrong form. The message says what to do."""


class DamagedImage(DataError):
    """One image whose bytes are wrong. The others can be used without it."""

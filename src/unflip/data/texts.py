"""Texts from files that others made, which may hold anything."""

from __future__ import annotations

import re

# Control characters, with which a text can command a terminal, and surrogates: bytes that are not UTF-8.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

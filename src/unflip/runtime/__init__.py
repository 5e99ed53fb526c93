"""Runs packed networks (``.unflip`` files) with the native library. numpy is needed, torch is not."""

from unflip.runtime.model import Model, NativePartMissing, load
from unflip.runtime.profile import Profile, Row

__all__ = ["Model", "NativePartMissing", "Profile", "Row", "load"]

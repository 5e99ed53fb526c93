"""Runs packed networks (``.unflip`` files) with the native library. Needs numpy, not torch."""

from unflip.runtime.model import Model, NativePartMissing, c_folder, load
from unflip.runtime.profile import Profile, Row

__all__ = ["Model", "NativePartMissing", "Profile", "Row", "c_folder", "load"]

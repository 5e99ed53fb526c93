"""The hooks of :mod:`unflip.layers` as callbacks of other training loops: one file per library."""

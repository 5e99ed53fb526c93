"""Packed networks as plain C: ``unflip.export.plain_c.export.export_c("model.unflip", "folder", "name")``."""

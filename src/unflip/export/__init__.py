"""Exports packed networks to other formats: ``unflip.export.onnx``, ``unflip.export.qonnx`` and ``export.plain_c``."""

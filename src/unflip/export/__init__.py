"""A packed network in other people's formats: ``unflip.export.onnx.export("model.unflip", "model.onnx")``."""

"""Exports packed networks to other formats: ``unflip.export.onnx.export("model.unflip", "model.onnx")``, likewise qonnx."""

"""Settings and networks that several tests of the import of Larq's networks use."""

from __future__ import annotations

import json
from typing import Any

from keras_writer import Net

from unflip.imports import larq
from unflip.imports.keras_config import parse_config
from unflip.imports.keras_h5 import KerasFile

SIGN = {"input_quantizer": "ste_sign", "kernel_quantizer": "ste_sign"}
DEPTHWISE = {"input_quantizer": "ste_sign", "depthwise_quantizer": "ste_sign"}
NORM: dict[str, Any] = {"axis": [3], "epsilon": 1e-3}


def conv(filters: int = 8, size: int = 3, **options: Any) -> dict[str, Any]:
    return {"filters": filters, "kernel_size": [size, size], "use_bias": False, **options}


def build(net: Net, config: Any = None) -> Any:
    """The imported network, without a file between."""
    text = json.dumps(config or net.config()).encode()
    return larq.build(parse_config(text, "small.h5"), KerasFile("small.h5", text, net.arrays()))


def small() -> Net:
    net = Net(8, 8, 3)
    net.add("Conv2D", name="stem", **conv(4, strides=[2, 2], padding="same"))
    net.add("BatchNormalization", name="norm", **NORM)
    net.add("QuantConv2D", name="binary", **conv(4, padding="same", pad_values=1.0, **SIGN))
    net.add("GlobalAveragePooling2D", name="mean")
    net.add("Dense", name="logits", units=3, activation="softmax")
    return net

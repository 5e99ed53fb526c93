"""Small Keras models for tests: their HDF5 files as Keras writes them, and what Keras computes, in plain numpy.

The reference keeps Keras's layout (N, H, W, C) and float64, and shares nothing with the importer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Net:
    """A functional model that is written and computed layer by layer."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.x = self.random.normal(size=(5, *shape))
        self.values: dict[str, Array] = {"image": self.x}
        given = {"name": "image", "batch_input_shape": [None, *shape], "dtype": "float32"}
        self.layers = [_entry("InputLayer", given, [])]
        self.weights: dict[str, dict[str, Array]] = {"image": {}}
        self.last = "image"

    def add(self, kind: str, *inputs: str, name: str = "", **config: Any) -> str:
        """Append a layer to the last one, or to ``inputs``, and compute its result."""
        name = name or f"{kind.lower()}_{len(self.layers)}"
        sources = inputs or (self.last,)
        self.layers.append(
            _entry(kind, {"name": name, **config}, [[[s, 0, 0, {}] for s in sources]])
        )
        values = [self.values[s] for s in sources]
        self.weights[name] = {
            k: w.astype(np.float32) for k, w in self._weights(kind, config, values[0]).items()
        }
        self.values[name] = compute(kind, config, self.weights[name], values)
        self.last = name
        return name

    def _weights(self, kind: str, config: Any, x: Array) -> dict[str, Array]:
        normal, channels, found = self.random.normal, x.shape[-1], {}
        size = config.get("kernel_size", [])
        kind = kind.removeprefix("Quant")
        if kind in ("DepthwiseConv2D", "SeparableConv2D"):
            each = config.get("depth_multiplier", 1)
            found["depthwise_kernel"] = normal(size=(*size, channels, each)) / 2
            outputs = channels * each
            if kind == "SeparableConv2D":
                outputs = config["filters"]
                found["pointwise_kernel"] = normal(size=(1, 1, channels * each, outputs)) / 2
        elif kind in ("Conv2D", "Dense"):
            outputs = config["filters"] if kind == "Conv2D" else config["units"]
            found["kernel"] = normal(size=(*size, channels // config.get("groups", 1), outputs)) / 2
        elif kind == "BatchNormalization":
            for part in ("gamma", "beta", "moving_mean", "moving_variance"):
                if config.get({"gamma": "scale", "beta": "center"}.get(part, ""), True):
                    found[part] = self.random.uniform(0.5, 1.5, channels) - (
                        part in ("beta", "moving_mean")
                    )
        elif kind == "PReLU":
            shared = config.get("shared_axes") or []
            shape = [1 if i + 1 in shared else n for i, n in enumerate(x.shape[1:])]
            found["alpha"] = self.random.uniform(0.1, 0.4, shape)
        if kind in ("Conv2D", "Dense", "DepthwiseConv2D", "SeparableConv2D") and config.get(
            "use_bias", True
        ):
            found["bias"] = normal(size=outputs)
        return found

    @property
    def output(self) -> Array:
        return self.values[self.last]

    def config(self) -> dict[str, Any]:
        ends = {"input_layers": [["image", 0, 0]], "output_layers": [[self.last, 0, 0]]}
        inside = {"name": "small", "layers": self.layers, **ends}
        return {
            "class_name": "Functional",
            "config": inside,
            "keras_version": "2.16.0",
            "backend": "tensorflow",
        }

    def arrays(self) -> dict[str, Array]:
        """By the paths that they have in a file."""
        return {
            f"{name}/{name}/{part}:0": array
            for name, arrays in self.weights.items()
            for part, array in arrays.items()
        }

    def write(self, path: Path, config: Any = None, with_config: bool = True) -> Path:
        """As ``model.save`` writes it, or without the config as ``save_weights``."""
        import h5py

        with h5py.File(path, "w") as file:
            root = file.create_group("model_weights") if with_config else file
            if with_config:
                file.attrs["model_config"] = json.dumps(config or self.config()).encode()
            root.attrs["layer_names"] = [name.encode() for name in self.weights]
            for name, arrays in self.weights.items():
                group = root.create_group(name)
                group.attrs["weight_names"] = [f"{name}/{part}:0".encode() for part in arrays]
                for part, array in arrays.items():
                    group[f"{name}/{part}:0"] = array
        return path


def _entry(kind: str, config: dict[str, Any], nodes: list[Any]) -> dict[str, Any]:
    return {"class_name": kind, "config": config, "name": config["name"], "inbound_nodes": nodes}


# --- what Keras computes


def compute(kind: str, config: Any, weights: dict[str, Array], values: list[Array]) -> Array:
    x = values[0]
    kind = kind.removeprefix("Quant")
    if kind in ("Conv2D", "Dense", "DepthwiseConv2D", "SeparableConv2D"):
        return _product(kind, config, weights, x)
    if kind == "BatchNormalization":
        scale = weights.get("gamma", 1) / np.sqrt(
            weights["moving_variance"].astype(float) + config["epsilon"]
        )
        return (x - weights["moving_mean"]) * scale + weights.get("beta", 0)
    if kind in ("MaxPooling2D", "AveragePooling2D"):
        return _pool(kind, config, x)
    if kind == "PReLU":
        return np.where(x >= 0, x, x * weights["alpha"])
    if kind == "ZeroPadding2D":
        return np.pad(x, [(0, 0), *config["padding"], (0, 0)])
    plain = {
        "Activation": lambda: activate(config.get("activation"), x),
        "Add": lambda: sum(values),
        "Average": lambda: sum(values) / len(values),
        "Concatenate": lambda: np.concatenate(values, -1),
        "Dropout": lambda: x,
        "Flatten": lambda: x.reshape(len(x), -1),
        "GlobalAveragePooling2D": lambda: x.mean((1, 2)),
        "GlobalMaxPooling2D": lambda: x.max((1, 2)),
        "LeakyReLU": lambda: np.where(x >= 0, x, x * config["alpha"]),
        "Multiply": lambda: values[0] * values[1],
        "ReLU": lambda: np.clip(x, 0, config.get("max_value")),
        "Rescaling": lambda: x * config["scale"] + config["offset"],
        "Reshape": lambda: x.reshape(len(x), *config["target_shape"]),
        "Subtract": lambda: values[0] - values[1],
    }
    return plain[kind]()


def activate(name: str | None, x: Array) -> Array:
    if name in (None, "linear", "softmax"):  # a softmax at the end is left out
        return x
    if name == "ste_sign":
        return quantize(name, x)
    found: Array = {
        "relu": lambda: np.maximum(x, 0),
        "sigmoid": lambda: 1 / (1 + np.exp(-x)),
        "hard_sigmoid": lambda: np.clip(0.2 * x + 0.5, 0, 1),
        "hard_tanh": lambda: np.clip(x, -1, 1),
        "leaky_tanh": lambda: np.where(np.abs(x) > 1, np.sign(x) + 0.2 * (x - np.sign(x)), x),
    }[name]()
    return found


def quantize(given: Any, x: Array) -> Array:
    """Larq's quantizers; a kernel has its filters last."""
    name, options = (
        (given["class_name"], given["config"]) if isinstance(given, dict) else (given, {})
    )
    name = options if name == "function" else name
    signs = np.where(x >= 0, 1.0, -1.0)
    if name in ("ste_sign", "approx_sign", "swish_sign", "SteSign"):
        return signs
    if name in ("magnitude_aware_sign", "xnor_weight_scale"):
        x = np.clip(x, -1, 1) if name == "xnor_weight_scale" else x
        return np.abs(x).mean(tuple(range(x.ndim - 1))) * signs
    if name == "magnitude_aware_sign_unclipped":
        return np.abs(x).mean() * signs
    if name == "ste_heaviside":
        return np.where(x > 0, 1.0, 0.0)
    if name == "SteTern":
        limit = (
            0.7 * np.abs(x).mean()
            if options.get("ternary_weight_networks")
            else options["threshold_value"]
        )
        return np.where(x >= limit, 1.0, np.where(x <= -limit, -1.0, 0.0))
    if name == "DoReFa":
        n = 2 ** options["k_bit"] - 1
        if options["mode"] == "activations":
            return np.round(np.clip(x, 0, 1) * n) / n
        limited = np.tanh(x)
        return 2 * np.round((limited / (2 * np.abs(limited).max()) + 0.5) * n) / n - 1
    assert name in (None, "NoOp")
    return x


def _product(kind: str, config: Any, weights: dict[str, Array], x: Array) -> Array:
    found = {key: array.astype(float) for key, array in weights.items()}
    for part in ("kernel", "depthwise", "pointwise"):
        key = part if part == "kernel" else f"{part}_kernel"
        if key in found:
            found[key] = quantize(config.get(f"{part}_quantizer"), found[key])
    x = quantize(config.get("input_quantizer"), x)
    if kind == "Dense":
        y = x @ found["kernel"]
    elif kind == "Conv2D":
        groups = config.get("groups", 1)
        parts = zip(np.split(x, groups, -1), np.split(found["kernel"], groups, -1), strict=True)
        y = np.concatenate([convolve(part, kernel, config) for part, kernel in parts], -1)
    else:
        y = depthwise(x, found["depthwise_kernel"], config)
        y = y @ found["pointwise_kernel"][0, 0] if kind == "SeparableConv2D" else y
    return activate(config.get("activation"), y + found.get("bias", 0))


def windows(x: Array, size: Any, config: Any, fill: float) -> Array:
    """(N, out h, out w, kh, kw, C), with TensorFlow's padding."""
    strides = config.get("strides") or size
    rates = config.get("dilation_rate", [1, 1])
    for axis, (k, s, d) in enumerate(zip(size, strides, rates, strict=True), 1):
        n, reach = x.shape[axis], (k - 1) * d + 1
        if config.get("padding") == "same":
            total = max(reach - s if n % s == 0 else reach - n % s, 0)
            sides = [(0, 0)] * x.ndim
            sides[axis] = (total // 2, total - total // 2)
            x = np.pad(x, sides, constant_values=fill)
            n += total
        starts = np.arange(0, n - reach + 1, s)
        places = starts[:, None] + d * np.arange(k)
        x = np.moveaxis(np.take(x, places, axis), axis + 1, -2)
    return x


def convolve(x: Array, kernel: Array, config: Any) -> Array:
    config = {"strides": [1, 1], **config}
    return np.einsum(
        "nhwijc,ijco->nhwo",
        windows(x, kernel.shape[:2], config, config.get("pad_values", 0.0)),
        kernel,
    )


def depthwise(x: Array, kernel: Array, config: Any) -> Array:
    config = {"strides": [1, 1], **config}
    seen = windows(x, kernel.shape[:2], config, config.get("pad_values", 0.0))
    found = np.einsum("nhwijc,ijcm->nhwcm", seen, kernel)
    return found.reshape(*found.shape[:3], -1)


def _pool(kind: str, config: Any, x: Array) -> Array:
    seen = windows(x, config["pool_size"], config, np.nan)
    return np.nanmax(seen, (3, 4)) if kind == "MaxPooling2D" else np.nanmean(seen, (3, 4))

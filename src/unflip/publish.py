"""A run as a folder that others can use: ``unflip push`` uploads it. ``networks/folder.py`` reads it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from unflip import __version__
from unflip.networks.folder import MANIFEST, MODEL, digest
from unflip.packing.images import pack_for
from unflip.printable import printable
from unflip.recipes.command import as_yaml
from unflip.runs import Run
from unflip.runs.files import write_atomically
from unflip.runs.load import model_of

WEIGHTS, RECIPE, METRICS, CARD = "weights.safetensors", "recipe.yaml", "metrics.jsonl", "README.md"
INT8_FIELDS = {"ends": "first and last", "shortcuts": "shortcuts"}  # of a recipe, in words
SHOWN_CLASSES = 20
UNFLIP = "https://pypi.org/project/unflip"


def publish(run: Run, repository: str, folder: Path, license: str) -> list[str]:
    """Write the files of a finished run to ``folder``; returns their names. ``repository`` is OWNER/NAME."""
    result = run.result
    if result is None:
        raise ValueError(f"{run} is not finished: train it to the end before you publish it")
    _refuse_other_files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of(run)
    pack_for(run.inputs, model, folder / MODEL)
    _write_weights(model, folder / WEIGHTS)
    _write(folder / RECIPE, as_yaml(run.recipe))
    _write(folder / METRICS, "".join(f"{json.dumps(line)}\n" for line in run.metrics))
    names = [MODEL, WEIGHTS, RECIPE, METRICS]
    about = _about(run, result, license)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest(folder / name)}
        for name in names
    }
    manifest = {**about, "files": files}
    _write(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    _write(folder / CARD, card(manifest, repository))
    return [*names, MANIFEST, CARD]


def _refuse_other_files(folder: Path) -> None:
    """An older version of the same is replaced; a folder of something else is not touched."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give another folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise FileExistsError(
            f"{folder} exists and has no {MANIFEST}, so 'unflip push' did not write it: give another one with --out"
        )


def _write(path: Path, text: str) -> None:
    write_atomically(path, text.encode())


def _write_weights(model: Any, path: Path) -> None:
    """The latent weights and all else that training needs; ``unflip.load_twin`` takes them."""
    from safetensors.torch import save

    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(path, save(state, metadata={"format": "pt"}))


def _about(run: Run, result: dict[str, Any], license: str) -> dict[str, Any]:
    recipe, inputs = run.recipe, run.inputs
    method = recipe["method"]
    return {
        "unflip": __version__,
        "license": license,
        "recipe": recipe["name"],
        "model": recipe["model"]["name"],
        "method": method["name"] if isinstance(method, dict) else method,
        "int8": [words for field, words in INT8_FIELDS.items() if recipe.get(field) == "int8"],
        "data": recipe["data"]["name"],
        "input": list(inputs.shape),
        "classes": list(inputs.classes),
        "accuracy": result["accuracy"],
        "top5": result.get("top5"),
        "evaluated_on": result.get("evaluated_on", "test"),
        "epochs": result["epochs"],
        "seed": run.seed,
        "command": _without_folders(run.command),
    }


def _without_folders(command: str) -> str:
    """A start or a teacher may be in a folder of this machine, which others need not know."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in shlex.split(command)]
    return shlex.join(words)


def card(about: dict[str, Any], repository: str) -> str:
    """The model card: what the network is, how to run it, how it was made, and what nobody has checked."""
    name = repository.partition("/")[2]
    shape = " × ".join(map(str, about["input"]))
    names = [printable(str(one)).replace("`", "'") for one in about["classes"]]
    shown = ", ".join(f"`{one}`" for one in names[:SHOWN_CLASSES])
    rest = f" and {len(names) - SHOWN_CLASSES} more" if len(names) > SHOWN_CLASSES else ""
    files = "\n".join(
        f"| `{file}` | {facts['bytes']:,} | `{facts['sha256']}` |"
        for file, facts in about["files"].items()
    )
    return f"""---
{_front_matter(about, name)}
---

# {name}

A {about["model"]} with 1-bit weights ({about["method"]}), trained on {_data_set(about)[0]} with [unflip]({UNFLIP}).

| | |
|---|---|
| accuracy | {about["accuracy"]:.2f} % on the {printable(str(about["evaluated_on"]))} images |
| input | {shape} |
| classes | {len(names)}: {shown}{rest} |
| 8-bit layers | {", ".join(about["int8"]) or "none"} |
| packed file | {about["files"][MODEL]["bytes"]:,} bytes |
| license | {about["license"]} |

## Run it

    pip install 'unflip[hub]'
    unflip predict hub:{repository} cat.jpg

```python
import unflip

model = unflip.load("hub:{repository}")  # C++ on the CPU, without torch
scores = model(images)  # float32, N × {shape}, normalized as model.preprocess says
```

## How it was trained

    {printable(about["command"])}

Epochs: {about["epochs"]}; seed: {about["seed"]}; unflip {about["unflip"]}.
`{RECIPE}` has every setting, `{METRICS}` one line per epoch.
`{WEIGHTS}` has the latent float weights, to train further: `unflip.load_twin(model, weights)`.

## Limits

The accuracy is that of one run on one data set.
Nobody has checked how the network behaves on other images.

## Files

| file | bytes | SHA-256 |
|---|---|---|
{files}
"""


def _data_set(about: dict[str, Any]) -> tuple[str, str]:
    """The name of the data set, and what the Hub calls its type. Folders and packs of images have no name."""
    if about["data"] in ("folder", "images"):
        return f"images of {len(about['classes'])} classes", "imagefolder"
    return about["data"], about["data"]


def _front_matter(about: dict[str, Any], name: str) -> str:
    """What the Hub reads, as YAML; JSON is YAML."""
    data, kind = _data_set(about)
    metric = {"type": "accuracy", "value": round(about["accuracy"], 2)}
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": data, "type": kind},
        "metrics": [metric],
    }
    fields = {
        "license": about["license"],
        "library_name": "unflip",
        "pipeline_tag": "image-classification",
        "tags": ["binary-neural-network", "1-bit", about["method"]],
        "model-index": [{"name": name, "results": [result]}],
    }
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in fields.items())

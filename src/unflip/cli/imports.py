"""``unflip import``: networks that others trained, as packed files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unflip.cli.app import app, needs
from unflip.printable import printable

if TYPE_CHECKING:
    from torch import nn

    from unflip.imports.write import Images
    from unflip.packing.file import Packed as PackedNetwork

imports = typer.Typer(
    help="Turn networks that others trained into packed files.",
    epilog="Example: unflip import torch model.th --layout adabin-resnet20 -o adabin.unflip",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(imports, name="import")

Out = Annotated[Path, typer.Option("--out", "-o", help="The file to write.")]
Labels = Annotated[
    Path | None,
    typer.Option(
        help="A text file of class names in the order of the outputs: one line per class, its key and its name."
    ),
]
License = Annotated[
    str | None,
    typer.Option(help="The license of the file, as a note. Default: what its page states."),
]

BMXNET_PAGE = "https://github.com/hpi-xnor/BMXNet"
BMXNET_MEAN = (123.68, 116.779, 103.939)  # RGB, of pixels 0 .. 255


@imports.command(
    epilog="Example: unflip import bmxnet binarized_cifar10-resnet18-64bit-0000.params -o cifar.unflip"
)
def bmxnet(
    params: Annotated[Path, typer.Argument(metavar="FILE.params", help="The arrays.")],
    out: Out,
    symbol: Annotated[
        Path | None,
        typer.Option(help="The graph. Default: NAME-symbol.json beside NAME-0000.params."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=1024,
            help="Height and width of images. Default: 224 for a 7 × 7 stem, else 32.",
        ),
    ] = None,
    labels: Labels = None,
    license: License = None,
) -> None:
    """Import a network of BMXNet: MXNet's .params and symbol files with binary weights."""
    needs("importing networks", "torch")
    import dataclasses

    from unflip.imports import bmxnet as source
    from unflip.imports.write import IMAGENET_ORDER, cifar10, imagenet

    graph = symbol or _symbol_beside(params)
    found = source.load(params, graph)
    mean, std = tuple(value / 255 for value in BMXNET_MEAN), (1 / 255,) * 3
    images = imagenet(mean, std) if found.stem >= 7 else cifar10(mean, std)
    if found.classes != (1000 if images.classes == IMAGENET_ORDER else 10):
        images = dataclasses.replace(
            images, labels=None, classes=f"{found.classes:,} classes; their names are not known"
        )
    if size is not None and size != images.shape[1]:
        images = dataclasses.replace(
            images, shape=(3, size, size), preparation=f"RGB, {size} × {size}"
        )
    origin = {"format": "BMXNet", "page": BMXNET_PAGE, "license": license or "Apache-2.0"}
    changes = [
        f"{found.binary} binary convolutions count equal signs: written as a scale of 1/2 and a shift of K/2",
        "their padding is +1: written as a padding by zeros before the sign",
        f"gamma of {found.fixed} BatchNorm layer{'s' if found.fixed != 1 else ''} is fixed at 1 (fix_gamma)",
        "the softmax at the end is left out: the network returns logits",
    ]
    names = _names(labels, found.classes)
    _write(out, found.model, images, origin, [params, graph], changes, names)


def _symbol_beside(params: Path) -> Path:
    """NAME-symbol.json for NAME-0000.params."""
    from unflip.imports import CannotImport

    name, _, number = params.stem.rpartition("-")
    beside = params.with_name(f"{name if name and number.isdigit() else params.stem}-symbol.json")
    if not params.is_file():
        raise CannotImport(f"{params}: the file does not exist; give the path of a .params file")
    if not beside.is_file():
        raise CannotImport(
            f"{beside} does not exist; name the graph of {params.name} with --symbol"
        )
    return beside


@imports.command(
    epilog="Example: unflip import torch model.th --layout adabin-resnet20 -o adabin.unflip"
)
def torch(
    checkpoint: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint of PyTorch.")],
    layout: Annotated[
        str,
        typer.Option(
            help="Whose network it is: adabin-resnet18, adabin-resnet20, bireal-resnet18, bireal-resnet34, "
            "irnet-resnet20, reactnet-resnet18 or recu-resnet20."
        ),
    ],
    out: Out,
    labels: Labels = None,
    license: License = None,
) -> None:
    """Import a checkpoint that authors of a method released.

    It is loaded with weights_only=True: code in it is never run.
    """
    needs("importing networks", "torch")
    from unflip.imports import checkpoints

    found = checkpoints.load(checkpoint, layout)
    chosen = found.layout
    origin = {
        "format": f"PyTorch checkpoint, layout {layout}",
        "page": chosen.page,
        "license": license or chosen.license,
    }
    changes = [
        "latent weights became signs and scales; they cannot be trained further",
        "sign(0) is +1; in the authors' code it is 0",
    ]
    if found.ignored:
        changes.append(f"not used by the network, left out: {', '.join(found.ignored[:8])}")
    classes = 10 if chosen.images == "cifar10" else 1000
    names = _names(labels, classes)
    _write(out, found.model, found.images, origin, [checkpoint], changes, names)


LARQ_PAGE = "https://github.com/larq/larq"
ZOO_PAGE = "https://github.com/larq/zoo"


@imports.command(epilog="Example: unflip import larq model.h5 -o model.unflip --pixels -1..1")
def larq(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.h5", help="What model.save('model.h5') wrote."),
    ],
    out: Out,
    config: Annotated[
        Path | None,
        typer.Option(help="The text of model.to_json(), for a file of save_weights."),
    ] = None,
    pixels: Annotated[
        str | None,
        typer.Option(
            help="What the network was trained on: 0..1, -1..1, 0..255 or imagenet (its mean and standard "
            "deviation). Default: imagenet for the networks of larq-zoo, else not stated in the file."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=8, max=1024, help="Height and width, if the model leaves them open."),
    ] = None,
    labels: Labels = None,
    license: License = None,
) -> None:
    """Import a network of Larq: a Keras 2 model in an HDF5 file.

    TensorFlow is not needed. Code in Lambda layers is never run.
    """
    needs("importing networks", "torch")
    needs("importing networks of Larq", "h5py")
    from unflip.imports import larq as source
    from unflip.imports.write import IMAGENET_ORDER, Images

    found = source.load(file, config, size)
    mean, std, words = _pixels(pixels or ("imagenet" if found.from_zoo else None), found.shape)
    classes = f"{found.classes:,} classes; their names are not known"
    images = Images(
        found.shape, mean, std, None, IMAGENET_ORDER if found.from_zoo else classes, words
    )
    origin = {
        "format": f"Keras HDF5, model {found.name}",
        "page": ZOO_PAGE if found.from_zoo else LARQ_PAGE,
        "license": license
        or (
            "not stated; Apache-2.0 for larq-zoo's own weights" if found.from_zoo else "not stated"
        ),
    }
    names = _names(labels, found.classes)
    files = [file] if config is None else [file, config]
    _write(out, found.model, images, origin, files, found.changes, names)


QONNX_PAGE = "https://github.com/fastmachinelearning/qonnx"


@imports.command(epilog="Example: unflip import qonnx model.onnx -o model.unflip --pixels -1..1")
def qonnx(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.onnx", help="What brevitas.export.export_qonnx wrote."),
    ],
    out: Out,
    pixels: Annotated[
        str | None,
        typer.Option(
            help="What the network was trained on: 0..1, -1..1, 0..255 or imagenet (its mean and standard "
            "deviation). Default: not stated in the file."
        ),
    ] = None,
    labels: Labels = None,
    license: License = None,
) -> None:
    """Import a QONNX file with binary weights, as brevitas exports them.

    Neither brevitas nor qonnx is needed. The file must be complete: data in other files is not read.
    """
    needs("importing networks", "torch")
    needs("importing QONNX files", "onnx")
    from unflip.imports import qonnx as source
    from unflip.imports.write import Images

    found = source.load(file)
    mean, std, words = _pixels(pixels, found.shape)
    classes = f"{found.classes:,} classes; their names are not known"
    images = Images(found.shape, mean, std, None, classes, words)
    origin = {
        "format": f"QONNX, written by {found.producer}",
        "page": QONNX_PAGE,
        "license": license or "not stated",
    }
    names = _names(labels, found.classes)
    _write(out, found.packed, images, origin, [file], found.changes, names)


Numbers = tuple[float, ...]


def _pixels(name: str | None, shape: tuple[int, ...]) -> tuple[Numbers | None, Numbers | None, str]:
    """Mean and std of a choice of --pixels, and what happens to the images in words."""
    from unflip.imports.write import IMAGENET_MEAN, IMAGENET_STD

    channels, *size = shape
    plain = f"{' × '.join(map(str, size))} pixels, {channels} channels" if size else "vectors"
    if name is None:
        return None, None, f"{plain}; the preprocessing is not known (--pixels states it)"
    if not size:
        raise ValueError(f"--pixels {name}: the network takes vectors of {channels}, not images")
    choices = {"0..1": (0.0, 1.0), "-1..1": (0.5, 0.5), "0..255": (0.0, 1 / 255)}
    if name in choices:
        mean, std = choices[name]
        return (mean,) * channels, (std,) * channels, f"{plain}, values {name}"
    if name != "imagenet" or channels != 3:
        raise ValueError(
            f"--pixels {name!r} should be {', '.join(choices)} or, for 3 channels, imagenet"
        )
    return IMAGENET_MEAN, IMAGENET_STD, f"RGB, short side 256, center crop {size[0]}"


def _names(path: Path | None, count: int) -> Sequence[str] | None:
    from unflip.imports.write import read_labels

    return None if path is None else read_labels(path, count)


def _write(
    out: Path,
    network: nn.Module | PackedNetwork,
    images: Images,
    origin: dict[str, str],
    files: list[Path],
    changes: list[str],
    labels: Sequence[str] | None,
) -> None:
    from torch import nn

    from unflip.imports.write import named, packed, sha256
    from unflip.packing.file import write

    if any(out.resolve() == path.resolve() for path in files):
        raise ValueError(f"{out} is the file to import: give another file with -o")
    for path in files:
        kind = "graph" if path.suffix == ".json" else "file"
        origin[kind] = path.name
        origin[f"{kind} SHA-256"] = sha256(path)
    if isinstance(network, nn.Module):
        found = packed(network, images, origin, labels)
    else:
        found = named(network, images, origin, labels)
    size = write(out, found)
    lines = [f"{out}: {size:,} bytes ({8 * size / 1e6:.3f} Mbit), from {files[0].name}"]
    lines += [f"changed: {change}" for change in changes]
    lines.append(f"images: {images.preparation}; classes: {images.classes}")
    lines.append(f"license: {origin['license']} ({origin['page']})")
    print(*map(printable, lines), sep="\n")

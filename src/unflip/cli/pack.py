"""``unflip pack`` and ``unflip export``: from a trained run to a file, and from that to other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unflip.cli.app import app, needs
from unflip.cli.options import MaxMemory, MaxWork, Packed, Uses


@app.command(epilog="Example: unflip pack runs/digits-dorefa -o digits.unflip")
def pack(
    run: Annotated[Path, typer.Argument(help="A run: its folder, or one of its seed-N folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    uses: Uses = None,
) -> None:
    """Pack a trained network into one file.

    The file runs without torch: see 'unflip predict' and unflip.load.
    """
    needs("packing", "torch")
    from unflip.packing.images import pack_for
    from unflip.runs import Run
    from unflip.runs.load import model_of
    from unflip.uses import use_all

    use_all(uses)
    chosen = Run.only_one(run)
    size = pack_for(chosen.inputs, model_of(chosen), out)
    print(f"{out}: {size:,} bytes ({8 * size / 1e6:.3f} Mbit), from {chosen}")


@app.command(epilog="Example: unflip export digits.unflip -o digits.onnx")
def export(
    model: Packed,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Default: MODEL with the suffix .onnx.")
    ] = None,
    qonnx: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write QONNX instead, for FPGA tools such as FINN and hls4ml."
        ),
    ] = None,
    c: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write C99 instead, NAME.h and NAME.c in this folder."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="PAGE",
            help="Write one HTML page instead, which runs the network on images in a browser.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="With --c: a C identifier. Default: the name of MODEL.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="IMAGES",
            help="With --c: compile with this machine's cc and compare the scores of an image, or of a folder of "
            "images, with the runtime.",
        ),
    ] = None,
    int16: Annotated[
        Path | None,
        typer.Option(
            metavar="IMAGES",
            help="With --c: store shortcuts as 16-bit integers, which needs about half the memory. Their ranges and "
            "the error of the scores are measured on an image, or on a folder of images.",
        ),
    ] = None,
    replace: Annotated[bool, typer.Option(help="With --c: replace files that exist.")] = False,
    max_memory: MaxMemory = None,
    max_work: MaxWork = None,
) -> None:
    """Write a packed network as an ONNX file, as QONNX, as plain C, or as a page for browsers.

    The ONNX file has standard operators; weights are stored as bits. QONNX has BipolarQuant and Quant nodes. The C
    code needs no library and no allocation, and computes the same bits as the runtime; with 8-bit ends it reads pixels
    without a conversion to float. The page computes them with WebAssembly; it opens from the disk.
    """
    if [out, qonnx, c, html].count(None) < 3:
        raise ValueError(
            "-o writes an ONNX file, --qonnx QONNX, --c C code and --html a page; give one of them"
        )
    from unflip.networks import locate

    path = locate(model)
    if c is not None:
        if check is not None and int16 is not None:
            raise ValueError("--check compares bits, which --int16 changes; give one of them")
        limits = (max_memory, max_work)
        if int16 is not None:
            return _export_int16(path, c, name or path.stem, int16, replace, limits)
        return _export_c(path, c, name or path.stem, check, replace, limits)
    if name is not None or check is not None or int16 is not None or replace:
        raise ValueError("--name, --check, --int16 and --replace need --c DIR")
    if html is not None:
        return _export_html(path, html, (max_memory, max_work))
    beside = path if Path(model).exists() else Path(path.name)  # not in a cache or in the package
    target = qonnx or out or beside.with_suffix(".onnx")
    if target.suffix != ".onnx":
        raise ValueError(
            f"{'-o' if qonnx is None else '--qonnx'} {target} should end in .onnx; for C code, give a folder with --c "
            "instead"
        )
    if target.resolve() == path.resolve():
        raise ValueError(f"{target} is the packed network itself: give another file")
    needs("writing ONNX files", "onnx")
    from unflip.export import onnx as plain
    from unflip.export import qonnx as dialect

    write = plain.export if qonnx is None else dialect.export
    size = write(path, target, max_memory, max_work)
    print(f"{target}: {size:,} bytes ({path.name}: {path.stat().st_size:,})")


def _export_html(model: Path, page: Path, limits: tuple[int | None, int | None]) -> None:
    from unflip.export.web.page import export_html

    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"--html {page} should end in .html")
    size = export_html(model, page, *limits)
    print(f"{page}: {size:,} bytes ({model.name}: {model.stat().st_size:,}); open it in a browser")


def _export_c(
    model: Path,
    folder: Path,
    name: str,
    images: Path | None,
    replace: bool,
    limits: tuple[int | None, int | None],
) -> None:
    from unflip.export.plain_c.check import check_images, image_paths
    from unflip.export.plain_c.export import export_c
    from unflip.runtime import load

    # Wrong paths are refused before files are written, so that a second try needs no --replace.
    if images is not None:
        image_paths(images, "--check")
    memory, work = limits
    files = export_c(model, folder, name, replace=replace, max_memory=memory, max_work=work)
    print(
        f"{folder / name}.c and .h: {files.flash:,} bytes of constants, {files.arena:,} bytes of arena"
    )
    if images is None:
        return
    network = load(model, max_memory=memory, max_work=work)
    count, different = check_images(network, files, folder / f"{name}.c", images)
    if different:
        raise ValueError(
            f"{different} of {count} images have other scores than in the runtime: please report this as a bug"
        )
    print(f"{count} image{'s' if count > 1 else ''}: the same bits as in the runtime")


def _export_int16(
    model: Path,
    folder: Path,
    name: str,
    images: Path,
    replace: bool,
    limits: tuple[int | None, int | None],
) -> None:
    from unflip.export.plain_c.measure import export_int16

    memory, work = limits
    files, error = export_int16(
        model, folder, name, images, replace=replace, max_memory=memory, max_work=work
    )
    print(
        f"{folder / name}.c and .h: {files.flash:,} bytes of constants, {files.arena:,} bytes of arena"
    )
    print(f"shortcuts are 16-bit integers: {error}")

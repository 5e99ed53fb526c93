"""``unflip methods``, ``models``, ``recipes`` and ``cost``: what unflip has, and what its networks cost."""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib import resources
from typing import Annotated, Any

import typer

from unflip.cli.app import app, needs, print_table
from unflip.cli.options import AsJson, Uses
from unflip.tables import Table
from unflip.uses import use_all

Name = Annotated[str | None, typer.Argument(help="Describe this one.")]


@app.command("methods", epilog="Example: unflip methods dorefa")
def list_methods(name: Name = None, uses: Uses = None) -> None:
    """List the binarization methods, or describe one.

    A description has formulas, paper and options.
    """
    needs("listing methods", "torch")
    from unflip import methods

    use_all(uses)
    if name is not None:
        cls = methods.config_class(name)
        print(inspect.getdoc(inspect.getmodule(cls)))
        print("\nOptions")
        for field in dataclasses.fields(cls):
            print(f"  {field.name} = {field.default!r}   ({field.type})")
        return
    rows = [(method, _first_line(methods.config_class(method))) for method in methods.names()]
    print_table(Table(("method", "what it does"), rows))


@app.command("models", epilog="Example: unflip models resnet20")
def list_models(name: Name = None, uses: Uses = None) -> None:
    """List the networks, or describe one with its options."""
    needs("listing models", "torch")
    from unflip import models

    use_all(uses)
    if name is not None:
        print(inspect.getdoc(models.builder(name)))
        print("\nOptions")
        for option, default in models.all_options(name, {}).items():
            print(f"  {option} = {default!r}")
        return
    rows = [
        (model, " × ".join(map(str, models.input_shape(model))), _first_line(models.builder(model)))
        for model in models.names()
    ]
    print_table(Table(("model", "input", "what it is"), rows))


def _first_line(documented: Any) -> str:
    return (documented.__doc__ or "").partition("\n")[0]


@app.command("recipes", epilog="Example: unflip recipes")
def list_recipes() -> None:
    """List the recipes that ship with unflip.

    'unflip train RECIPE' trains one.
    """
    needs("reading recipes", "yaml")
    import yaml

    files = sorted((resources.files("unflip") / "recipes").iterdir(), key=lambda file: file.name)
    shipped = [file for file in files if file.name.endswith(".yaml")]
    # Only the text is read: checking a recipe's fields would import torch.
    rows = [
        (file.name.removesuffix(".yaml"), yaml.safe_load(file.read_text(encoding="utf-8"))["about"])
        for file in shipped
    ]
    print_table(Table(("recipe", "about"), rows))


@app.command(epilog="Example: unflip cost resnet18 --method dorefa --option input_bits=2")
def cost(
    model: Annotated[str, typer.Argument(help="A network's name; 'unflip models' lists them.")],
    method: Annotated[
        str,
        typer.Option(help="'float' for the float twin, or a method; 'unflip methods' lists them."),
    ] = "float",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Method option, e.g. --option input_bits=2 (repeat for more).",
        ),
    ] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Model option, e.g. --model-option width=32 (repeat for more).",
        ),
    ] = None,
    as_json: AsJson = False,
    uses: Uses = None,
) -> None:
    """Count memory and FLOPs of a network.

    They are counted as the papers do, on one image of the network's published size.
    """
    needs("counting the cost of a model", "torch")
    import torch

    from unflip import models
    from unflip.cost import cost as count_cost

    use_all(uses)
    chosen: Any = {"name": method, **_pairs(option)} if option else method
    with torch.device("meta"):  # only shapes matter: nothing is allocated
        network = models.create(model, chosen, **_pairs(model_option))
        counted = count_cost(network, torch.empty(1, *models.input_shape(model)))
    if as_json:
        print(json.dumps({"model": model, "method": method, **dataclasses.asdict(counted)}))
        return
    print_table(counted.table(f"{model}, {method}"))


def _pairs(texts: list[str] | None) -> dict[str, Any]:
    """name=value texts; a value that is JSON (a number, true, null) becomes what it stands for."""
    pairs: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option {text!r} should look like name=value")
        try:
            pairs[name] = json.loads(value)
        except json.JSONDecodeError:
            pairs[name] = value
    return pairs

"""The README and the docs are right: their code runs; their commands, links, names and paths exist."""

import importlib
import inspect
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.core import TyperGroup
from typer.main import get_command

import unflip
from unflip import data as unflip_data
from unflip import models
from unflip.cli import app
from unflip.data import registry as data_registry
from unflip.methods import base, registry
from unflip.models import base as models_base
from unflip.recipes.load import load_recipe
from unflip.study import runner
from unflip.study.paper import EXPERIMENTS

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "results" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def code_blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def inline_code(page: Path) -> list[str]:
    """Code inside sentences and tables."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> list[str]:
    """Those in blocks, and those in the last cell of a row of the README's tables."""
    lines = "\n".join(page.read_text() for page in PAGES).splitlines()
    found = [line.strip().split("#")[0].strip() for line in lines if line.startswith("    unflip ")]
    found += [cell[1] for line in lines if (cell := re.search(r"\| `(unflip [^`]+)` \|$", line))]
    assert len(found) >= 20
    return sorted(set(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        other = page.parent / path if path else page
        assert other.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(other), f"{page.name} links to {target}"


def parse(words: list[str]) -> None:
    """What the command line makes of a command before it runs it: options and arguments that it does not have raise."""
    command, context = get_command(app), None
    while True:
        name, *rest = words
        context = command.make_context(name, rest, parent=context)
        if not isinstance(command, TyperGroup):
            return
        words = [*context._protected_args, *context.args]
        command = command.commands[words[0]]


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command):
    """Every `unflip VERB` on a page is a verb with these options, and every recipe, method and model on it is known."""
    parse(shlex.split(command))
    verb, *words = shlex.split(command)[1:]
    if verb == "train" and not words[0].endswith(".yaml"):
        load_recipe(words[0])
    if verb in ("methods", "cost") and words:
        known = unflip.methods.names() if verb == "methods" else ["resnet18"]
        assert words[0] in known


def inline_commands() -> list[str]:
    found = {code for page in PAGES for code in inline_code(page) if code.startswith("unflip ")}
    return sorted(code for code in found if "..." not in code)


@pytest.mark.parametrize("command", inline_commands())
def test_commands_in_sentences_exist(command):
    """A sentence may name a command without all that it needs, such as `unflip pack`."""
    try:
        parse(shlex.split(command))
    except Exception as error:  # typer has its own copy of click, under a private name
        if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
            raise


def python_names() -> list[str]:
    """Names such as `unflip.runs.Run` in sentences; `unflip.h` and `unflip.hpp` are files."""
    found = {code for page in PAGES for code in inline_code(page)}
    names = [re.match(r"unflip(\.\w+)+", code) for code in found]
    return sorted({name[0] for name in names if name} - {"unflip.h", "unflip.hpp"})


@pytest.mark.parametrize("name", python_names())
def test_names_in_sentences_exist(name):
    value = unflip
    for place, part in enumerate(name.split(".")[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(name.split(".")[:place]))
        value = getattr(value, part)


def test_the_paths_of_the_architecture_page_exist():
    """Paths with a placeholder in capitals are not checked."""
    paths = [
        code
        for code in inline_code(ROOT / "docs" / "architecture.md")
        if re.fullmatch(r"[\w.-]+/[\w./-]*", code) and not re.search(r"[A-Z]{3}", code)
    ]
    assert len(paths) > 50
    homes = (ROOT, ROOT / "src" / "unflip")
    missing = [path for path in paths if not any((home / path).exists() for home in homes)]
    assert not missing


def test_make_has_every_target_that_a_page_names():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^    |`)make (\w+)", page.read_text(), re.MULTILINE):
            assert f"\n{target}:" in makefile, f"{page.name}: make {target}"


def test_the_page_of_methods_lists_every_method():
    page = (ROOT / "docs" / "methods.md").read_text()
    table = page.partition("## Which one to take")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == unflip.methods.names()
    shown = re.findall(r"^::: unflip\.methods\.(\w+)$", page, re.MULTILINE)
    assert shown == unflip.methods.names()


def test_the_readme_is_short_and_counts_methods_right():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert re.findall(r"\*\*(\d+) methods\*\*", text) == [str(len(unflip.methods.names()))]


def test_the_readme_snippet_learns(capsys, tmp_path, monkeypatch):
    """With an eighth of its steps."""
    monkeypatch.chdir(tmp_path)  # it writes a file
    [snippet] = code_blocks(ROOT / "README.md")
    assert "range(400)" in snippet
    exec(snippet.replace("range(400)", "range(50)"), {})
    said = re.search(r"(18,860) bytes, (\d+\.\d)% of 397", capsys.readouterr().out)
    assert float(said[2]) > 50


def test_the_snippet_of_your_own_model_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a file
    [snippet] = code_blocks(ROOT / "docs" / "your-own-model.md")
    my_model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)
    )
    images = torch.randn(5, 3, 8, 8)
    scope = {"my_model": my_model, "example_input": images[:1], "images": images}
    exec(snippet, scope)
    assert "M FLOPs" in capsys.readouterr().out
    assert torch.allclose(scope["fast"](images), scope["frozen"](images), atol=1e-4)


def own_loop(method):
    """A small network, and what the loops of docs/training.md are given."""
    model = unflip.binarize(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), method, quiet=True)
    batches = [(torch.randn(8, 6), torch.randint(0, 4, (8,)))]
    entropy = nn.functional.cross_entropy
    given = {"model": model, "epochs": 2, "batches": batches, "cross_entropy": entropy}
    return model, {"unflip": unflip, **given}


def test_own_loop_snippet_runs():
    _, _, snippet, _ = code_blocks(ROOT / "docs" / "training.md")
    model, scope = own_loop("irnet")
    weight = model[0].weight.detach().clone()
    exec(snippet, {**scope, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert not torch.equal(weight, model[0].weight)


@pytest.mark.parametrize("hook", ["start_epoch", "before_step", "after_step"])
def test_the_methods_that_need_a_hook_are_listed(hook):
    page = (ROOT / "docs" / "training.md").read_text()
    listed = re.search(rf"    unflip\.{hook}\(.*# .*: (.*)\n", page)[1]
    need = []
    for name in sorted(set(unflip.methods.names()) - {"lns"}):  # which needs what its base does
        layer = unflip.BinaryLinear(4, 4, method=name)
        parts = (
            (layer.weight_binarizer, base.WeightBinarizer),
            (layer.input_binarizer, base.InputBinarizer),
        )
        if any(getattr(type(p), hook, None) is not getattr(c, hook, None) for p, c in parts):
            need.append(name)
    assert listed.split(", ") == need


def test_bops_two_optimizers_run():
    *_, snippet = code_blocks(ROOT / "docs" / "training.md")
    model, scope = own_loop("bop")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(snippet, {**scope, "torch": torch})
    assert (model[0].weight.abs() == 1).all()


def test_lns_snippet_runs(capsys):
    [snippet] = code_blocks(ROOT / "docs" / "lns.md")
    torch.manual_seed(0)

    def network():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)
        )

    pretrained = unflip.binarize(network(), "dorefa", quiet=True)
    model = network()
    batches = [(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))]
    exec(
        snippet,
        {
            "my_model": model,
            "pretrained": pretrained,
            "batches": batches,
            "cross_entropy": nn.functional.cross_entropy,
        },
    )
    assert capsys.readouterr().out


def test_the_new_method_of_the_guide_works():
    source, its_test, _, _ = code_blocks(ROOT / "docs" / "new-method.md")
    scope: dict = {"__name__": "tanhsign"}
    try:
        exec(compile(source, "tanhsign.py", "exec", dont_inherit=True), scope)
        exec(its_test, scope)
        scope["test_gradient_is_tanhs"]()
        model = unflip.binarize(
            nn.Sequential(nn.Conv2d(2, 4, 3)), "tanhsign", keep_first_and_last=False
        )
        x = torch.randn(2, 2, 6, 6)
        assert torch.equal(unflip.freeze(model)(x), model.eval()(x))
        wrapped = unflip.binarize(
            nn.Linear(4, 4), "lns", base="tanhsign", keep_first_and_last=False
        )
        assert wrapped.method.base.name == "tanhsign"
    finally:
        registry._REGISTRY.pop("tanhsign", None)


def test_the_network_of_the_guide_trains_by_any_method(tmp_path):
    _, _, source, _ = code_blocks(ROOT / "docs" / "new-method.md")
    try:
        exec(compile(source, "mynet.py", "exec", dont_inherit=True), {"__name__": "mynet"})
        for method in ("float", "xnor", {"name": "lns", "base": "dorefa"}):
            network = models.create("mynet", method, width=4)
            network(torch.randn(2, 1, 8, 8)).sum().backward()
        skipped = models.create("mynet", "xnor")
        assert [type(layer) is nn.Conv2d for layer in (skipped[0], skipped[2])] == [True, False]
    finally:
        models_base._REGISTRY.pop("mynet", None)


def test_the_data_set_of_the_guide_is_right(tmp_path):
    *_, source = code_blocks(ROOT / "docs" / "new-method.md")
    try:
        exec(compile(source, "stripes.py", "exec", dont_inherit=True), {"__name__": "stripes"})
        data = unflip_data.load("stripes", size=6)
        assert data.spec.shape == (1, 6, 6)
        held_out = data.split(40)
        assert set(held_out.test_labels) == {0, 1}
        assert len(held_out) == 200
    finally:
        data_registry._REGISTRY.pop("stripes", None)


def test_a_recipe_is_trained_and_its_network_loaded(tmp_path, monkeypatch, capsys):
    """The snippets of docs/training.md; the second one trains what the first one loads."""
    loading, training, *_ = code_blocks(ROOT / "docs" / "training.md")
    monkeypatch.chdir(tmp_path)
    exec(training, {})
    scope: dict = {}
    exec(loading, scope)
    assert capsys.readouterr().out.splitlines()[-1].startswith("finished ")
    assert not scope["model"].training
    assert scope["model"](torch.zeros(1, *scope["run"].inputs.shape)).shape == (1, 10)


def test_packing_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2))
    images = torch.randn(3, 3, 2, 2)
    model = unflip.binarize(layers, "dorefa", quiet=True)
    small = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 2))
    pixels = torch.randint(256, images.shape, dtype=torch.uint8)
    scope = {"model": model, "example_input": images[:1], "images": images}
    scope |= {"float_model": small, "pixels": pixels, "resnet18": models.create("resnet18")}
    for snippet in code_blocks(ROOT / "docs" / "deploy.md"):
        exec(snippet, scope)
    assert scope["size"] == (tmp_path / "model.unflip").stat().st_size
    assert scope["scores"].shape == (3, 2)


def test_a_trained_network_is_loaded(capsys):
    [snippet] = code_blocks(ROOT / "docs" / "networks.md")
    exec(snippet, {})
    assert "airplane" in capsys.readouterr().out


def test_the_study_of_the_guide_can_be_called(monkeypatch, capsys):
    """It would train for hours: only the call is checked, and that every arm exists."""
    [snippet] = code_blocks(ROOT / "docs" / "studies.md")
    signature = inspect.signature(runner.run_study)

    class Arm:
        mean = 85.0

    class Summary:
        def arm(self, name):
            return (
                Arm() if name in [draft.name for draft in EXPERIMENTS["ablation"].drafts] else None
            )

    def called(*arguments, **options):
        bound = signature.bind(*arguments, **options)
        bound.arguments["study"].only(bound.arguments["only"])
        return Summary()

    monkeypatch.setattr(runner, "run_study", called)
    exec(snippet, {})
    assert capsys.readouterr().out == "85.0\n"


def test_recipes_in_the_docs_are_valid(tmp_path):
    [whole] = code_blocks(ROOT / "docs" / "training.md", "yaml")
    path = tmp_path / "whole.yaml"
    path.write_text(re.sub(r"^uses: .*\n", "", whole, flags=re.MULTILINE))
    recipe = load_recipe(path)
    assert recipe.method["warm_steps"] == 2000
    assert recipe.start == "cifar10-resnet20-dorefa"
    [part] = code_blocks(ROOT / "docs" / "new-method.md", "yaml")
    assert set(re.findall(r"^(\w+):", part, re.MULTILINE)) <= set(type(recipe).model_fields)

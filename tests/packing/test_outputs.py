"""Models that return several tensors: each is packed, checked and named, and what has no form is named too."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip.packing import CannotPack, make_packed
from unflip.packing.check import check
from unflip.packing.convert import Converter
from unflip.packing.describe import describe
from unflip.packing.file import PackedFileError, outputs_of, to_bytes
from unflip.packing.ir import simplified
from unflip.packing.ops import HANDLERS
from unflip.packing.outputs import is_tensor, structure_of
from unflip.packing.reference import evaluate, evaluate_outputs
from unflip.packing.trace import trace

IMAGES = torch.randn(2, 3, 8, 8)
Found = namedtuple("Found", "scores boxes")


class Detector(nn.Module):
    """``head`` makes of the input, the stem, the body, scores and boxes what is returned."""

    def __init__(self, head: Callable[..., Any]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.box = nn.Conv2d(16, 4, 1)
        self.fc = nn.Linear(16, 5)
        self.head = head

    def forward(self, x: Tensor) -> Any:
        stem = self.stem(x)
        body = self.bn(self.conv(stem)) + stem
        return self.head(x, stem, body, self.fc(body.mean((2, 3))), self.box(body))


def detector(head: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    model = unflip.binarize(Detector(head), "xnor", quiet=True)
    with torch.no_grad():
        model.train()(torch.randn(32, 3, 8, 8))  # so that no sum lies on a threshold
    return model.eval()


STRUCTURES: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "tuple": (lambda x, s, b, scores, boxes: (scores, boxes), "tuple", ["0", "1"]),
    "list": (lambda x, s, b, scores, boxes: [boxes, scores, b], "tuple", ["0", "1", "2"]),
    "dict": (lambda x, s, b, scores, boxes: {"z": scores, "a": boxes}, "dict", ["z", "a"]),
    "ordered": (lambda x, s, b, *f: OrderedDict(z=b, a=f[1]), "dict", ["z", "a"]),
    "namedtuple": (lambda x, s, b, *found: Found(*found), "tuple", ["scores", "boxes"]),
    "one in a tuple": (lambda x, s, b, scores, boxes: (scores,), "tuple", ["0"]),
    "one in a dict": (lambda x, s, b, scores, boxes: {"scores": scores}, "dict", ["scores"]),
    "stem and body": (lambda x, s, b, scores, boxes: (s, scores, b), "tuple", ["0", "1", "2"]),
    "the same twice": (lambda x, s, b, *f: {"a": b, "b": b, "c": b + 0}, "dict", ["a", "b", "c"]),
    "before and after": (lambda x, s, b, *f: (b, b.relu(), b.relu() * 2), "tuple", list("012")),
    "changed in place": (lambda x, s, b, *f: (b, b.relu_()), "tuple", ["0", "1"]),
    "early exits": (lambda x, s, b, f, _: (s.mean((2, 3)), f.softmax(1)), "tuple", ["0", "1"]),
    "odd names": (lambda x, s, b, *f: {"ä b": f[0], "1": f[1]}, "dict", ["ä b", "1"]),
}


def parts(answer: Any) -> list[Tensor]:
    return list(answer.values()) if isinstance(answer, dict) else list(answer)


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_output_is_the_models(name: str) -> None:
    head, structure, names = STRUCTURES[name]
    model = detector(head)
    packed = make_packed(model, IMAGES)
    assert packed.graph["structure"] == structure
    assert "output" not in packed.graph
    assert [output.name for output in outputs_of(packed.graph)] == names
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        expected = parts(unflip.freeze(model)(x))
    found = evaluate_outputs(packed, x)
    assert list(found) == names
    for right, left in zip(expected, found.values(), strict=True):
        assert torch.allclose(left.reshape(right.shape), right, rtol=1e-4, atol=1e-5)
    assert to_bytes(packed) == to_bytes(make_packed(model, IMAGES))


def test_freezing_keeps_what_is_returned() -> None:
    for head, _, _ in STRUCTURES.values():
        model = detector(head)
        with torch.no_grad():
            answer, frozen = model(IMAGES), unflip.freeze(model)(IMAGES)
        assert type(frozen) is type(answer)
        assert structure_of(frozen, is_tensor) == structure_of(answer, is_tensor)


def test_one_tensor_has_the_field_it_always_had() -> None:
    packed = make_packed(detector(lambda x, s, b, scores, boxes: scores), IMAGES)
    assert list(packed.graph) == ["input", "ops", "output", "labels"]
    assert packed.graph["output"] == len(packed.graph["ops"])
    assert describe(packed).outputs == {"output": (5, 1, 1)}
    assert torch.equal(evaluate(packed, IMAGES), evaluate_outputs(packed, IMAGES)["output"])


def test_the_reference_says_which_function_has_several() -> None:
    packed = make_packed(detector(lambda x, s, b, *found: found), IMAGES)
    assert describe(packed).outputs == {"0": (5, 1, 1), "1": (4, 8, 8)}
    with pytest.raises(ValueError, match=r"2 outputs \(0, 1\); call evaluate_outputs"):
        evaluate(packed, IMAGES)


def test_what_is_returned_is_not_fused_away() -> None:
    """Alone, all of it becomes steps of the convolution; what is between has to be there if it is returned."""

    def made(head: Callable[[Tensor, Tensor], Any]) -> list[str]:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, x: Tensor) -> Any:
                y = self.conv(x)
                return head(y, y.relu() * 2)

        return [op["op"] for op in make_packed(Net(), IMAGES).graph["ops"]]

    assert made(lambda y, z: z) == ["conv"]
    assert made(lambda y, z: (z,)) == ["conv"]
    assert made(lambda y, z: (z, z)) == ["conv"]
    assert made(lambda y, z: (z, y)) == ["conv", "map"]
    assert made(lambda y, z: (y, z + y)) == ["conv", "map"]
    assert made(lambda y, z: (z, z + 1, y)) == ["conv", "map", "map"]


def test_equal_values_are_made_once() -> None:
    packed = make_packed(detector(lambda x, s, b, *f: (b.relu(), s, b.relu())), IMAGES)
    first, _, third = outputs_of(packed.graph)
    assert first.value == third.value


NAMED = "flat tuple, list or dict of tensors"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "None": (lambda x, s, b, *f: (*f, None), rf"outputs\[2\] is None; .*{NAMED}"),
    "None in a dict": (lambda x, s, b, *f: {"a": b, "aux": None}, r"outputs\['aux'\] is None"),
    "nested": (lambda x, s, b, *f: {"a": b, "aux": [b]}, rf"outputs\['aux'\]\[0\] is nested.*{NAMED}"),
    "deep": (lambda x, s, b, *f: (b, ({"k": b},)), r"outputs\[1\]\[0\]\['k'\] is nested"),
    "nested None": (lambda x, s, b, *f: {"aux": [None]}, r"outputs\['aux'\]\[0\] is nested"),
    "empty within": (lambda x, s, b, *f: (b, ()), r"outputs\[1\] is nested"),
    "a field": (lambda x, s, b, *f: Found(b, [b]), r"outputs\.boxes\[0\] is nested"),
    "a number": (lambda x, s, b, *f: (b, 3), r"outputs\[1\] is a value of type int"),
    "text": (lambda x, s, b, *f: "b", rf"the model returns a value of type str; .*{NAMED}"),
    "nothing": (lambda x, s, b, *f: None, "the model returns None"),
    "empty": (lambda x, s, b, *f: (), r"a tuple of 0; it must have 1 \.\. 4,096"),
    "many": (lambda x, s, b, *f: [b] * 4097, "a list of 4,097"),
    "a key": (lambda x, s, b, *f: {"a": b, 1: s}, r"outputs\[1\] has a key of type int"),
    "no name": (lambda x, s, b, *f: {"": b}, r"outputs\[''\] must be 1 \.\. 4,096 bytes"),
    "long name": (lambda x, s, b, *f: {"ü" * 3000: b}, r"must be 1 \.\. 4,096 bytes"),
    "NUL": (lambda x, s, b, *f: {"a\0": b}, "without a NUL"),
    "surrogate": (lambda x, s, b, *f: {"\ud800": b}, "bytes of UTF-8"),
    "input": (lambda x, s, b, *f: {"b": b, "x": x}, r"outputs\['x'\] is its input; remove it"),
    "input, again": (lambda x, s, b, *f: (x.clone() * 1, b), r"outputs\[0\] is its input"),
    "constant": (lambda x, s, b, *f: (b, torch.ones(2, 3)), r"outputs\[1\] does not depend on its input"),
    "view": (lambda x, s, b, *f: (b[:, :2], b.relu_()), "in place while another view"),
    "batch size": (lambda x, s, b, *f: (s, b / len(x)), "depends on the batch size"),
    "structure": (lambda x, s, b, *f: (s, b) if len(x) > 1 else (s,), "depends on the batch size"),
    "names": (lambda x, s, b, *f: {"a" if len(x) > 1 else "b": b}, "depends on the batch size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_named(name: str) -> None:
    head, message = REFUSED[name]
    torch.manual_seed(0)
    model = unflip.binarize(Detector(head), "xnor", quiet=True).eval()
    with pytest.raises(CannotPack, match=message):
        make_packed(model, IMAGES)


def test_labels_belong_to_outputs_of_as_many_channels() -> None:
    model = detector(lambda x, s, b, *found: found)
    for labels in ("abcde", "abcd"):
        assert make_packed(model, IMAGES, labels=list(labels)).graph["labels"] == list(labels)
    with pytest.raises(CannotPack, match="3 labels for a network whose outputs have 5, 4 channels"):
        make_packed(model, IMAGES, labels=list("abc"))


def test_the_check_looks_at_every_output() -> None:
    model = unflip.freeze(detector(lambda x, s, b, *f: {"scores": f[0], "boxes": f[1]}))
    packed = make_packed(model, IMAGES)
    converter = Converter(trace(model, IMAGES), IMAGES, HANDLERS)
    graph, structure, outputs = converter.convert()
    graph = simplified(graph)
    check(packed, graph, structure, IMAGES, outputs)
    for number, name in enumerate(structure.names):
        wrong = [o + (i == number) for i, o in enumerate(outputs)]
        with pytest.raises(CannotPack, match=rf"the network's outputs\['{name}'\]: by up to"):
            check(packed, graph, structure, IMAGES, wrong)


def test_a_graph_that_contradicts_itself() -> None:
    """What numpy alone reads: show and export."""
    graph = make_packed(detector(lambda x, s, b, *found: found), IMAGES).graph
    one = {"name": "a", "value": 1}
    for wrong, message in (
        ({"output": 1}, "either 'output' or"),
        ({"outputs": []}, "one or more"),
        ({"outputs": [one, one]}, "different names"),
        ({"outputs": [one, 3]}, "a list of names and values"),
        ({"outputs": [{"name": "a"}]}, "a list of names and values"),
        ({"outputs": [one, {"name": "b", "value": 99}]}, "output 'b' must be a value 0 .. "),
    ):
        with pytest.raises(PackedFileError, match=message):
            outputs_of({**graph, **wrong})
    with pytest.raises(PackedFileError, match="either 'output' or"):
        outputs_of({key: value for key, value in graph.items() if key != "outputs"})


@pytest.mark.parametrize(
    ("last", "found"), [(nn.Flatten(2), "2, 5, 1"), (nn.Unflatten(3, (1, 1)), "2, 5, 1, 1, 1")]
)
def test_an_output_of_other_dims_is_refused(last: nn.Module, found: str) -> None:
    """It would come back as (N, C)."""
    model = nn.Sequential(nn.Conv2d(3, 5, 4), last)
    with pytest.raises(CannotPack, match=rf"output has shape \({found}\); .*x\.flatten\(1\)"):
        make_packed(model, torch.randn(2, 3, 4, 4))


@pytest.mark.parametrize("container", ["tensor", "tuple", "dict"])
def test_an_image_of_one_pixel_keeps_its_shape(tmp_path: Any, container: str) -> None:
    """(N, C, 1, 1) is not (N, C)."""

    class Pixel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 4)

        def forward(self, x: Tensor) -> Any:
            pixel = self.conv(x)
            if container == "tensor":
                return pixel
            both = {"pixel": pixel, "vector": pixel.flatten(1)}
            return both if container == "dict" else tuple(both.values())

    model, x = Pixel(), torch.randn(2, 3, 4, 4)
    unflip.pack(model, x, tmp_path / "x.unflip")
    right, loaded = model(x), unflip.load(tmp_path / "x.unflip")
    found = loaded(x)
    if container == "tensor":
        right, found = [right], [found]
    elif container == "dict":
        right, found = right.values(), found.values()
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=1e-5)
    assert next(iter(loaded.output_shapes.values())) == (5, 1, 1)
    assert loaded(x[0]) is not None

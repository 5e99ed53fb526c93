"""The scope of kernels: which modules have them, for how long, and what happens to a kernel that fails its check.

Most tests pretend that the kernels can run and agree with torch. The last ones run them, on a CUDA device or in
Triton's interpreter.
"""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unflip.kernels import Kernels, Trial, check, scope, tuning
from unflip.kernels.tuning import INTERPRETED, available
from unflip.layers import BinaryConv2d, binary_layers, normalized

CPU = torch.device("cpu")
DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(not available(), reason="no CUDA device: see test_in_the_interpreter")
KERNELS = ("fused_product", "fused_norm", "fused_predict")
LNS = {"name": "lns", "mapping": "residual"}
CHECKS = ("check_product", "check_stems", "check_norm", "check_mapping")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels can run here and agree with torch. Nothing calls them."""
    monkeypatch.setattr(tuning, "available", lambda: True)
    monkeypatch.setattr(tuning, "runs_on", lambda device: True)
    monkeypatch.setattr(scope, "covered", lambda layer: True)
    monkeypatch.delenv("UNFLIP_NVRTC", raising=False)
    monkeypatch.delenv("UNFLIP_NORM", raising=False)
    for name in CHECKS:
        monkeypatch.setattr(check, name, lambda *_: None)


pretending = pytest.mark.usefixtures("pretend")


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """Every test leaves cuDNN's flags as they were before."""
    before = cudnn_flags()
    yield
    assert cudnn_flags() == before


def cudnn_flags() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def kernels_of(trial: Trial) -> dict[str, set[Any]]:
    """By the name of a hook: the options of the kernels that the binary layers have, or None."""
    found: dict[str, set[Any]] = {name: set() for name in KERNELS}
    for _, layer in binary_layers(trial.model):
        for name in KERNELS:
            kernel = getattr(layer, name)
            found[name].add(None if kernel is None else tuple(sorted(kernel.keywords.items())))
    return found


NONE: dict[str, set[Any]] = {name: {None} for name in KERNELS}


@pretending
def test_two_scopes_do_not_influence_each_other(make_trial: Callable[..., Trial]) -> None:
    one, others = make_trial(), [make_trial(LNS, seed=seed) for seed in range(2)]
    before = [attributes(trial.model) for trial in (one, *others)]
    alone = (("cuda", True), ("networks", 1))
    beside = (("cuda", True), ("networks", 2))
    of_one = {"fused_product": {alone}, "fused_norm": {alone}, "fused_predict": {None}}
    with Kernels([one], CPU):
        assert cudnn_flags() == (True, False)
        assert kernels_of(one) == of_one
        assert kernels_of(others[0]) == NONE
        assert vars(one.model.conv1)["networks"] == 1
        with Kernels(others, CPU):
            assert kernels_of(one) == of_one
            for other in others:
                assert kernels_of(other) == {
                    "fused_product": {beside},
                    "fused_norm": {beside},
                    "fused_predict": {(("networks", 2),)},
                }
                assert vars(other.model.conv1)["networks"] == 2
        assert kernels_of(one) == of_one
        assert all(kernels_of(other) == NONE for other in others)
        assert cudnn_flags() == (True, False)
    assert [attributes(trial.model) for trial in (one, *others)] == before


def fail_inside(trial: Trial, before: object) -> None:
    assert attributes(trial.model) != before
    raise ZeroDivisionError


@pretending
def test_everything_is_restored_after_an_error(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial(LNS)
    before = attributes(trial.model)
    with pytest.raises(ZeroDivisionError), Kernels([trial], CPU):
        fail_inside(trial, before)
    assert attributes(trial.model) == before


@pretending
@pytest.mark.parametrize("name", CHECKS)
def test_everything_is_restored_when_entering_is_interrupted(
    name: str, make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during one of the checks, which can take a minute."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, name, interrupted)
    trial = make_trial(LNS)
    before = attributes(trial.model)
    with pytest.raises(KeyboardInterrupt), Kernels([trial], CPU):
        pytest.fail("the scope was entered")
    assert attributes(trial.model) == before


def fails_if(condition: Callable[[Trial], bool]) -> Callable[..., None]:
    def fails(trial: Any, *_: Any) -> None:
        if condition(trial):
            raise RuntimeError("output of conv1 is off by 7\nand a long trace")

    return fails


@pretending
def test_without_cuda_kernels_training_falls_back_to_triton(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial()

    def cuda(trial: Trial) -> bool:
        return ("cuda", True) in next(iter(kernels_of(trial)["fused_product"]))

    monkeypatch.setattr(check, "check_product", fails_if(cuda))
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"without our CUDA C\+\+.*: output .* is off by 7$"):
            kernels = stack.enter_context(Kernels([trial], CPU))
        assert not kernels.cuda
        by_triton = (("cuda", False), ("networks", 1))
        assert kernels_of(trial)["fused_product"] == kernels_of(trial)["fused_norm"] == {by_triton}
    monkeypatch.setattr(check, "check_product", lambda *_: None)
    with Kernels([trial], CPU) as kernels:
        assert kernels.cuda, "a failure belongs to its own scope"
    monkeypatch.setenv("UNFLIP_NVRTC", "0")
    with Kernels([trial], CPU) as kernels:
        assert not kernels.cuda


@pretending
def test_without_triton_either_training_falls_back_to_cudnn(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial()
    monkeypatch.setattr(check, "check_product", fails_if(lambda _: True))
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match="off by 7") as warned:
            stack.enter_context(Kernels([trial], CPU))
        assert kernels_of(trial) == NONE  # the norm needs the product
    assert "without our CUDA C++ kernels" in str(warned[0].message)
    assert "with cuDNN's convolutions, because our kernels failed: output" in str(warned[1].message)


@pretending
@pytest.mark.parametrize(
    ("name", "message", "lost"),
    [
        ("check_norm", "compiler's BatchNorm, because our kernels failed: output", "fused_norm"),
        ("check_mapping", "without our kernels, because they failed: output", "fused_predict"),
        ("check_stems", "cuDNN's first convolution, because our kernels failed: output", None),
    ],
)
def test_a_kernel_that_fails_its_check_is_left_out(
    name: str,
    message: str,
    lost: str | None,
    make_trial: Callable[..., Trial],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = make_trial(LNS)
    monkeypatch.setattr(check, name, fails_if(lambda _: True))
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match=message):
            stack.enter_context(Kernels([trial], CPU))
        missing = {hook for hook, kernels in kernels_of(trial).items() if kernels == {None}}
        assert missing == ({lost} if lost else set())
        assert ("forward" in vars(trial.model.conv1)) == (lost is not None)


@pretending
def test_the_norm_can_be_left_to_the_compiler(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNFLIP_NORM", "0")
    trial = make_trial()
    with Kernels([trial], CPU):
        assert kernels_of(trial)["fused_norm"] == {None}
        assert kernels_of(trial)["fused_product"] != {None}


@pretending
def test_in_full_precision_the_first_convolution_is_plain(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(half=False)
    with Kernels([trial], CPU):
        assert "forward" not in vars(trial.model.conv1)


@pretending
def test_one_network_of_each_family_is_checked(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(check, "check_product", lambda trial: checked.append(trial.family))
    trials = [make_trial(), make_trial(seed=1), make_trial("xnor")]
    with Kernels(trials, CPU):
        assert checked == ["dorefa", "xnor"]


@pretending
def test_copies_of_a_layer_have_no_kernels(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    with Kernels([trial], CPU):
        _, layer = next(binary_layers(trial.model))
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert twin.fused_product is twin.fused_norm is None


def test_only_prelus_are_changed_on_a_cpu(make_trial: Callable[..., Trial]) -> None:
    if INTERPRETED:
        pytest.skip("the interpreter takes tensors on the CPU")
    trial = make_trial(LNS)
    before = attributes(trial.model), cudnn_flags()
    with Kernels([trial], CPU):
        inside = attributes(trial.model)
        changed = [name for name in inside if inside[name].pop("forward", None)]
        assert changed == [n for n, m in trial.model.named_modules() if type(m) is nn.PReLU]
        assert (inside, cudnn_flags()) == before
    assert attributes(trial.model) == before[0]


# --------------------------------------------------------------------------------------- fingerprint


def test_every_source_is_part_of_the_fingerprint(
    tmp_path: Path, make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels([make_trial()], CPU)
    before, package = kernels.fingerprint(), tmp_path / "unflip"
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(scope.FOLDER.parent, package, ignore=leave)
    monkeypatch.setattr(scope, "FOLDER", package / "kernels")
    assert kernels.fingerprint() == before
    sources = [p for p in (package / "kernels").rglob("*") if p.is_file()]
    assert {p.suffix for p in sources} == {".py", ".cu"}
    sources += [package / "layers.py", package / "methods" / "dorefa.py"]
    for path in sources:
        text = path.read_bytes()
        path.write_bytes(text + b" ")
        assert kernels.fingerprint() != before, path
        path.write_bytes(text)


def test_choices_that_a_graph_does_not_show_are_part_of_the_fingerprint(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(rows: int, networks: int = 1, cuda: bool = True, of: int = 1) -> str:
        monkeypatch.setattr(tuning, "chosen_rows", {("wgrad", 16, of): rows, ("dgrad", of): rows})
        kernels = Kernels([make_trial()] * networks, CPU)
        kernels.cuda = cuda
        return kernels.fingerprint()

    assert fingerprint(8) == fingerprint(8)
    assert fingerprint(8) != fingerprint(4)
    assert fingerprint(8, cuda=False) == fingerprint(4, cuda=False)
    assert fingerprint(8) != fingerprint(8, networks=2, of=2)
    assert fingerprint(8, networks=2) == fingerprint(4, networks=2), "another scope's choice"


# -------------------------------------------------------------------------------------- real kernels


@pytest.mark.skipif(available(), reason="the kernels run in this process")
def test_in_the_interpreter(in_the_interpreter: Callable[[str], None]) -> None:
    in_the_interpreter(__file__)


class Small(nn.Module):
    """A first convolution, and a binary one with all that follows it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.conv2 = BinaryConv2d(16, 16, 3, padding=1, bias=False, method=LNS)
        self.prelu, self.bn = nn.PReLU(16), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float16):
            y = self.conv1(x)
            return normalized(self.conv2, self.prelu, self.bn, y, y)


def small_trial(seed: int, x: Tensor) -> Trial:
    model = Small(seed).to(x.device)

    def restore(state: dict[str, Tensor]) -> None:
        model.load_state_dict(state)

    return Trial(
        model, True, "small", lambda: model(x), lambda: copy.deepcopy(model.state_dict()), restore
    )


@pytest.mark.at_length
@runs
@pytest.mark.filterwarnings("error")
def test_the_kernels_pass_their_checks_and_compiled_code_is_shared_by_seeds() -> None:
    """Code is compiled once for all seeds, and again for another number of networks; nothing has to be reset."""
    x = torch.randn(2, 1, 6, 6, device=DEVICE)
    trials = [small_trial(seed, x) for seed in range(3)]
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    compiled = torch.compile(forward, dynamic=False, backend=backend)

    def graphs_in(scoped: list[Trial]) -> int:
        with Kernels(scoped, torch.device(DEVICE)):
            for trial in scoped:
                state = trial.snapshot()
                expected = forward(trial.model, x)
                trial.restore(state)
                assert torch.equal(compiled(trial.model, x), expected)
        return len(graphs)

    assert graphs_in(trials) == 1
    assert "unflip.convolve_and_normalize" in graphs[0]
    assert "unflip.sign_conv2d" in graphs[0]
    assert graphs_in(trials[:1]) == 2
    assert graphs_in(trials) == graphs_in(trials[:1]) == 2
    compiled(trials[0].model, x)  # outside, code that was compiled with the kernels is not used
    assert len(graphs) == 3
    assert "unflip." not in graphs[2]


@runs
def test_two_scopes_with_real_kernels_give_the_same_bits_alone_and_nested() -> None:
    x = torch.randn(2, 1, 6, 6, device=DEVICE)
    one, other = small_trial(0, x), small_trial(1, x)

    def gradient(trial: Trial) -> Tensor:
        state = trial.snapshot()
        loss = trial.model(x).float().square().sum()
        grad = torch.autograd.grad(loss, trial.model.conv2.weight)[0]
        trial.restore(state)
        return grad

    device = torch.device(DEVICE)
    with Kernels([one], device):
        alone = gradient(one)
    with ExitStack() as stack:
        stack.enter_context(Kernels([one], device))
        with Kernels([other, small_trial(2, x)], device):
            assert torch.equal(gradient(one), alone)
        assert torch.equal(gradient(one), alone)

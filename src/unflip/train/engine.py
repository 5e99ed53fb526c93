"""How steps are run: plainly, or compiled and captured in one CUDA graph with a branch for each seed."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from unflip import layers, methods
from unflip.kernels import mapping, mapping_conv, norm, stem_conv, tuning
from unflip.kernels.sign_conv import cuda_kernels as sign_conv_cuda
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.kernels.sign_conv import triton_kernels as sign_conv_triton
from unflip.layers import binary_layers, inside_binarizer
from unflip.recipes.schema import Recipe
from unflip.train.learner import Learner


class Engine:
    """Runs one step of every learner. On a GPU the steps of all learners are one captured graph."""

    def __init__(self, learners: Sequence[Learner], *, compiled: bool, captured: bool) -> None:
        self.learners = learners
        self.graph: torch.cuda.CUDAGraph | None = None
        if learners[0].device.type != "cuda":
            return
        torch.backends.cudnn.benchmark = True
        # TF32 would round the mapping networks: bits in training would not be those that are frozen.
        torch.backends.cudnn.allow_tf32 = False
        sign_conv.share_device(len(learners))
        self._fuse()
        self._take_stems()
        self._normalise()
        self._map_together()
        if compiled:
            with _tagged():
                self._compile()
        if captured:
            self._capture()

    def step(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for learner in self.learners:
            learner.draw_as_alone()
            learner.step()

    @property
    def mode(self) -> str:
        compiled = self.learners[0].losses != self.learners[0].planned_losses
        graph = self.graph is not None
        words = [w for w, on in (("compiled", compiled), ("CUDA graph", graph)) if on]
        return " + ".join(words) or "eager"

    def _fuse(self) -> None:
        """Use the fused sign-and-convolution kernels, if they work here and give what the plain ones do."""
        layers.fused_product = fused_sign_convolution if sign_conv.available() else None
        if layers.fused_product is None:
            return
        problem = self._problem_of_fused()
        if problem is not None and sign_conv_cuda.enabled():  # Triton's kernels may still be right
            sign_conv_cuda.switch_off(problem)
            problem = self._problem_of_fused()
        if problem is not None:
            layers.fused_product = None
            warnings.warn(
                f"training with cuDNN's convolutions, because ours failed: {problem}",
                stacklevel=3,
            )

    def _problem_of_fused(self) -> str | None:
        try:
            for learner in _one_of_each_family(self.learners):
                check_fused(learner)
        except Exception as error:
            return _first_line(error)
        return None

    def _take_stems(self) -> None:
        """Use our kernels for float convolutions of images, if they work here and give what cuDNN does."""
        if not sign_conv.available():
            return
        try:
            for learner in _one_of_each_family(self.learners):
                check_stems(learner)
        except Exception as error:
            warnings.warn(
                f"training with cuDNN's first convolution, because ours failed: {_first_line(error)}",
                stacklevel=3,
            )
            return
        for learner in self.learners:
            learner.stems = list(_stems(learner).values())

    def _normalise(self) -> None:
        """Use the kernels for what follows a binary convolution, if they work here and give what torch does."""
        layers.fused_norm = None
        if layers.fused_product is None or not norm.enabled():
            return
        try:
            for learner in _one_of_each_family(self.learners):
                check_norms(learner)
            layers.fused_norm = norm.normalised
        except Exception as error:
            warnings.warn(
                f"training with the compiler's BatchNorm, because ours failed: {_first_line(error)}",
                stacklevel=3,
            )

    def _map_together(self) -> None:
        """Use the kernels for LNS's mappings, if they work here and give what the plain ones do."""
        mapping.kernels = False
        if not mapping_conv.available():
            return
        try:
            for learner in _one_of_each_family(self.learners):
                mapping.check_kernels(learner.model)
            mapping.kernels = True
        except Exception as error:
            warnings.warn(
                f"mapping weights without our kernels, because they failed: {_first_line(error)}",
                stacklevel=3,
            )

    def _compile(self) -> None:
        """Compile every learner's losses, and believe it only after comparing gradients with eager."""
        try:
            torch._dynamo.config.cache_size_limit = max(64, 4 * len(self.learners))
            for learner in self.learners:
                learner.losses = torch.compile(
                    learner.planned_losses, dynamic=False, options={"combo_kernels": True}
                )
            for learner in _one_of_each(self.learners):
                check_straight_through(learner.model)
            for learner in self.learners:  # what cannot be compiled fails here, not in the capture
                snapshot = learner.snapshot()
                learner.backward()
                learner.zero_grad()
                learner.restore(snapshot)
        except Exception as error:
            for learner in self.learners:
                learner.losses = learner.planned_losses
            warnings.warn(
                f"training without torch.compile, because it failed: {_first_line(error)}",
                stacklevel=3,
            )

    def _capture(self) -> None:
        snapshots = [learner.snapshot() for learner in self.learners]
        try:
            self.graph = _captured_steps(self.learners)
        except Exception as error:
            torch.cuda.synchronize()
            warnings.warn(
                f"training without a CUDA graph, because capture failed: {_first_line(error)}",
                stacklevel=3,
            )
        for learner, snapshot in zip(self.learners, snapshots, strict=True):
            learner.restore(snapshot)
            learner.position.zero_()


def _one_of_each(learners: Sequence[Learner]) -> list[Learner]:
    """A learner of each method: what holds for one seed holds for the others."""
    return list({str(learner.recipe.method): learner for learner in learners}.values())


def _one_of_each_family(learners: Sequence[Learner]) -> list[Learner]:
    """A learner of each network and kind of weights and inputs: to a kernel, another α is the same."""
    return list({_family(learner.recipe): learner for learner in learners}.values())


def _family(recipe: Recipe) -> str:
    method = "float" if recipe.method == "float" else methods.resolve(recipe.method).family
    return f"{method} {recipe.model}"


def _captured_steps(learners: Sequence[Learner]) -> torch.cuda.CUDAGraph:
    """One step of every learner; each learner is a branch (stream), so that small kernels overlap."""
    torch.cuda.synchronize()
    main = torch.cuda.Stream()
    branches = [torch.cuda.Stream() for _ in learners]
    for learner, branch in zip(learners, branches, strict=True):
        with torch.cuda.stream(branch):
            for _ in range(3):  # allocations, autotuning and lazy state happen before capture
                learner.position.zero_()
                learner.step()
        torch.cuda.synchronize()
        learner.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
        for learner, branch in zip(learners, branches, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                learner.step()
        for branch in branches:
            main.wait_stream(branch)
    torch.cuda.synchronize()
    return graph


def _tagged() -> AbstractContextManager[object]:
    """Compiled code is kept with the tag. A torch without tags, or a package without sources, keeps none of it."""
    try:
        return torch.compiler.config.patch(cache_key_tag=cache_tag())  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):
        from torch._inductor import config

        return config.patch(force_disable_caches=True)


def cache_tag() -> str:
    """What compiled code depends on and its graph does not show: our kernels, and how they were tuned.

    torch keeps compiled code on disk for the next process and knows it by its graph, in which a kernel is a name.
    """
    convolution = (sign_conv, sign_conv_triton, sign_conv_cuda, tuning)
    modules = (*convolution, stem_conv, norm, mapping, mapping_conv)
    sources = "".join(inspect.getsource(module) for module in modules)
    known = torch.compiler.config.cache_key_tag
    return f"{known} unflip {hashlib.sha256((sources + tuning.choices()).encode()).hexdigest()}"


def fused_sign_convolution(layer: Any, x: Tensor, unit: Tensor) -> Tensor | None:
    """The product of a layer with inputs −1, 0 and +1 by ``sign_conv``; None where that does not cover the layer.

    Sign and mask are part of the kernels where those know the binarizer; others binarize before.
    """
    binarizer = layer.input_binarizer
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros":
        return None
    if not sign_conv.supports(
        x.shape, unit.shape, layer.stride, layer.padding, layer.dilation, layer.groups
    ):
        return None
    assert not isinstance(layer.padding, str)  # not supported
    kind: Any = binarizer.fused_as or "given"
    x = binarizer(x) if kind == "given" else binarizer.shifted(x)
    return sign_conv.sign_conv2d(x.to(torch.float16), unit, layer.stride, layer.padding, kind)


def check_fused(learner: Learner) -> None:
    """Run every shape of layer once fused and once plain; also tunes the kernels before capture."""
    binary = dict(binary_layers(learner.model))
    for name, x in _inputs(learner, binary).items():
        fused = _values_and_gradients(binary[name], x.requires_grad_())
        kernel, layers.fused_product = layers.fused_product, None
        plain = _values_and_gradients(binary[name], x)
        layers.fused_product = kernel
        _compare(name, fused, plain)


def check_stems(learner: Learner) -> None:
    """Run every stem once by our kernels and once by cuDNN; also tunes the kernels before capture."""
    stems = _stems(learner)
    if not stems:
        return
    for name, x in _inputs(learner, stems).items():
        with stem_conv.by_kernel([stems[name]]):
            ours = _values_and_gradients(stems[name], x)
        _compare(name, ours, _values_and_gradients(stems[name], x))


def check_norms(learner: Learner) -> None:
    """Run what follows every binary convolution once by our kernels and once by torch."""
    calls, snapshot = _normalised(learner), learner.snapshot()
    try:
        for conv, *others in calls:
            layers.fused_norm = norm.normalised
            ours = _normalised_values(conv, *others)
            learner.restore(snapshot)
            layers.fused_norm = None
            plain = _normalised_values(conv, *others)  # which rounds to half in between
            _compare(f"what follows {conv.path}", ours, plain, tolerance=0.03)
            learner.restore(snapshot)
    finally:
        layers.fused_norm = None
        learner.restore(snapshot)


def _normalised(learner: Learner) -> list[tuple[Any, nn.Module, Any, Tensor, Tensor | None]]:
    """The modules and inputs of every call of ``layers.normalised`` in a step."""
    calls = []

    def remember(conv: Any, activation: Any, batch_norm: Any, x: Tensor, shortcut: Any) -> None:
        leaf = x.detach().requires_grad_()
        carried = None if shortcut is None else shortcut.detach().requires_grad_()
        carried = leaf if shortcut is x else carried  # that they are one and the same matters
        if isinstance(conv, layers.BinaryConv2d):
            calls.append((conv, activation, batch_norm, leaf, carried))

    snapshot = learner.snapshot()
    layers.fused_norm = remember
    try:
        learner.losses(learner.plan[0])
    finally:
        layers.fused_norm = None
        learner.restore(snapshot)
    return calls


def _normalised_values(
    conv: Any, activation: nn.Module, batch_norm: Any, x: Tensor, shortcut: Tensor | None
) -> dict[str, Tensor]:
    """Output, running statistics, and the gradients for a fixed probe."""
    with torch.autocast(x.device.type, torch.float16, cache_enabled=False):
        y = layers.normalised(conv, activation, batch_norm, x, shortcut)
    leaves = {
        "weight": conv.weight,
        "input": x,
        "BatchNorm": batch_norm.weight,
        "shift": batch_norm.bias,
    }
    leaves |= {"shortcut": shortcut} if shortcut is not None and shortcut is not x else {}
    parameters = dict(activation.named_parameters())
    parameters.pop(
        "adapted.after", None
    )  # has no gradient but rounding: BatchNorm takes this shift away again
    leaves |= {f"activation's {name}": parameter for name, parameter in parameters.items()}
    grads = torch.autograd.grad((y.float() * _probe(y)).sum(), list(leaves.values()))
    values = {"output": y, "mean": batch_norm.running_mean, "variance": batch_norm.running_var}
    values = {name: value.detach().clone() for name, value in values.items()}
    return values | {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}


def _probe(y: Tensor) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(0)
    return torch.randn(y.shape, device=y.device, generator=generator)


def _stems(learner: Learner) -> dict[str, nn.Conv2d]:
    """Convolutions of few channels that are float, by name, where training is in half precision."""
    if not learner.half:
        return {}
    return {
        name: module
        for name, module in learner.model.named_modules()
        if stem_conv.may_be_stem(module) and not inside_binarizer(name)
    }


def _inputs(learner: Learner, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What each of the modules is given in a step: the last, where there are several; none, where it is not called."""
    inputs: dict[str, Tensor] = {}

    def remember(name: str, x: Tensor) -> None:
        inputs[name] = x.detach().requires_grad_(x.requires_grad)

    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: remember(name, args[0]))
        for name, module in modules.items()
    ]
    try:
        snapshot = learner.snapshot()
        learner.losses(learner.plan[0])
        learner.restore(snapshot)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _values_and_gradients(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """A layer's output, and the gradients of its weight, and of ``x`` where that requires one, for a fixed probe."""
    with torch.autocast(x.device.type, torch.float16, cache_enabled=False):
        y = layer(x)
    leaves = {"weight's gradient": layer.weight}
    if x.requires_grad:
        leaves["input's gradient"] = x
    grads = torch.autograd.grad((y.float() * _probe(y)).sum(), list(leaves.values()))
    return {"output": y.detach(), **dict(zip(leaves, grads, strict=True))}


def _compare(
    name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.01
) -> None:
    for what, b in expected.items():
        error, norm = (found[what].float() - b.float()).norm().item(), b.float().norm().item()
        if not error <= tolerance * norm:
            raise RuntimeError(f"{what} of {name} is off by {error:.3g} (norm {norm:.3g})")


def check_straight_through(model: nn.Module, tolerance: float = 0.02) -> None:
    """Compare the gradient of each kind of binarizer compiled and eager, on the torch at hand.

    torch 2.11 once dropped the gradient of a straight-through sign without a word: accuracy crept up and no
    binary weight ever flipped. The binarizers are compared one by one, because a whole binary network is
    chaotic: one rounding flips a sign, and 18 layers further the gradients have nothing in common.
    """
    seen: set[tuple[type, type]] = set()
    for name, layer in binary_layers(model):
        kinds = (type(layer.weight_binarizer), type(layer.input_binarizer))
        if kinds in seen:
            continue
        seen.add(kinds)
        channels = layer.weight.shape[1] * getattr(layer, "groups", 1)
        image = (8, 8) if isinstance(layer, nn.Conv2d) else ()
        x = torch.randn(4, channels, *image, device=layer.weight.device)
        for what, function, value in (
            ("weight", layer.weight_binarizer, layer.weight.detach()),
            ("input", layer.input_binarizer, x),
        ):
            expected = _gradient(function, value)
            found = _gradient(torch.compile(function, dynamic=False), value)
            error, norm = (found - expected).norm().item(), expected.norm().item()
            if not error <= tolerance * norm:
                raise RuntimeError(
                    f"the compiled gradient of the {what} binarizer of {name} differs from the eager "
                    f"one by {error:.3g} (norm {norm:.3g})"
                )


def _gradient(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    leaf = value.clone().requires_grad_()
    output = function(leaf)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    return torch.autograd.grad((output * weights).sum(), leaf)[0]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

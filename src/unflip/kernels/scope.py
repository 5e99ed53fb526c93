"""The kernels of the networks that train side by side on a device, for as long as they train."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from unflip.kernels import check, prelu, stem_conv, tuning
from unflip.kernels.attach import attached
from unflip.kernels.check import Trial
from unflip.kernels.mapping import covered, mapped_layers, predict_fused
from unflip.kernels.mapping_products import operator as mapping_products
from unflip.kernels.norm import layer as norm
from unflip.kernels.passed import Passed
from unflip.kernels.sign_conv import cuda_kernels
from unflip.kernels.sign_conv.layer import fused_product
from unflip.layers import binary_layers

FOLDER = Path(__file__).parent


class Kernels:
    """Inside ``with Kernels(trials, device)``, the models use each kernel that agrees with torch.

    ``trials`` are all networks that train side by side on the device. On entry the kernels are checked and attached to
    the modules of these models, and cuDNN's flags are set; on exit all of it is restored. A kernel that fails its check
    is left out with a warning. On a CPU, only PReLU has another gradient (``prelu.py``).

    Kernels that have passed on this machine are not checked again (``passed.py``).

    Where several processes train one network, ``agreed`` turns the problem that each of them has with a kernel into
    one for all: they must run the same code.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        device: torch.device,
        agreed: Callable[[str | None], str | None] = lambda problem: problem,
    ) -> None:
        self.trials, self.device, self.agreed = trials, device, agreed
        self.networks = len(trials)
        self.cuda = False  # whether CUDA C++ kernels are used
        self.trusted = False  # whether all of them have passed before
        self.failed = False  # whether one of them has failed
        self._scope = ExitStack()

    def __enter__(self) -> Kernels:
        with ExitStack() as scope:
            if self.device.type == "cpu":
                scope.enter_context(prelu.vectorized(trial.model for trial in self.trials))
            if tuning.runs_on(self.device):
                scope.enter_context(_cudnn_flags())
            if self._all(tuning.available() and tuning.runs_on(self.device)):
                passed = Passed(self._description(), self.device)
                self.trusted = self._all(passed.recall())
                fused = self._attach_product(scope)
                self._attach_stems(scope)
                if fused:
                    self._attach_norm(scope)
                self._attach_mapping(scope)
                if not self.trusted and not self.failed:
                    passed.remember()
            self._scope = scope.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scope.close()

    def fingerprint(self) -> str:
        """Changes with the kernels' sources and with every choice that a graph of compiled code does not show."""
        choices = tuning.graph_choices(self.networks) if self.cuda else "Triton"
        text = f"{_sources()} {self.networks} {choices}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _description(self) -> list[str]:
        """Everything about the networks and their kernels that a check depends on."""
        allowed = cuda_kernels.allowed(), norm.allowed()
        networks = sorted({f"{t.family} {t.half} {t.model}" for t in self.trials})
        return [_sources(), f"{self.networks} {allowed}", *networks]

    def _attach_product(self, scope: ExitStack) -> bool:
        """The binary layers' products: by CUDA C++ and Triton, by Triton only, or by cuDNN. False: by cuDNN."""
        problem = None
        for cuda in (True, False) if self._all(cuda_kernels.allowed()) else (False,):
            kernel = partial(fused_product, networks=self.networks, cuda=cuda)
            with ExitStack() as trial:
                trial.enter_context(attached(self._modules(_binary), fused_product=kernel))
                problem = self._problem(check.check_product)
                if problem is None:
                    self.cuda = cuda
                    scope.enter_context(trial.pop_all())
                    return True
            if cuda:
                _warn(f"training without our CUDA C++ kernels, because they failed: {problem}")
        _warn(f"training with cuDNN's convolutions, because our kernels failed: {problem}")
        return False

    def _attach_stems(self, scope: ExitStack) -> None:
        """The float convolutions of images, in half precision."""
        problem = self._problem(
            lambda trial: check.check_stems(trial, self.networks) if trial.half else None
        )
        if problem is not None:
            _warn(f"training with cuDNN's first convolution, because our kernels failed: {problem}")
            return
        for trial in self.trials:
            if trial.half:
                stems = stem_conv.stems(trial.model).values()
                scope.enter_context(stem_conv.by_kernel(stems, self.networks))

    def _attach_norm(self, scope: ExitStack) -> None:
        """The operations after a binary convolution."""
        if not self._all(norm.allowed()):
            return
        kernel = partial(norm.fused_norm, networks=self.networks, cuda=self.cuda)
        problem = self._problem(lambda trial: check.check_norm(trial, kernel))
        if problem is not None:
            _warn(f"training with the compiler's BatchNorm, because our kernels failed: {problem}")
            return
        scope.enter_context(attached(self._modules(check.binary_convolutions), fused_norm=kernel))

    def _attach_mapping(self, scope: ExitStack) -> None:
        """The networks that predict weights."""
        kernel = partial(predict_fused, networks=self.networks)
        problem = self._problem(lambda trial: check.check_mapping(_mapped(trial.model), kernel))
        if problem is not None:
            _warn(f"predicting weights without our kernels, because they failed: {problem}")
            return
        mapped = self._modules(lambda model: list(_mapped(model).values()))
        scope.enter_context(attached(mapped, fused_predict=kernel))

    def _modules(self, of: Callable[[nn.Module], Sequence[nn.Module]]) -> list[nn.Module]:
        return [module for trial in self.trials for module in of(trial.model)]

    def _problem(self, compare: Callable[[Trial], None]) -> str | None:
        """The first line of the first error, for one network of each family."""
        if self.trusted:
            return None
        problem = None
        try:
            for trial in {trial.family: trial for trial in self.trials}.values():
                compare(trial)
        except Exception as error:
            problem = first_line(error)
        problem = self.agreed(problem)
        self.failed |= problem is not None
        return problem

    def _all(self, here: bool) -> bool:
        """Whether something is so in all processes."""
        return self.agreed(None if here else "not here") is None


def _sources() -> str:
    """A hash of the sources of the kernels, and of the layers and methods that they are compared with."""
    package, digest = FOLDER.parent, hashlib.sha256()
    files = "layers.py", "ste.py", "vectorized.py"
    plain = [*(package / name for name in files), *(package / "methods").rglob("*.py")]
    for path in sorted([*FOLDER.rglob("*.py"), *FOLDER.rglob("*.cu"), *plain]):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _binary(model: nn.Module) -> list[nn.Module]:
    return [layer for _, layer in binary_layers(model)]


def _mapped(model: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in mapped_layers(model).items() if covered(layer)}


@contextmanager
def prediction_kernels(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, networks of this model that predict weights use our matrix products: before training, while they are
    taught one by one. The kernels of :class:`Kernels` would first have to be tuned for every layer alone."""
    mapped = {
        name: layer
        for name, layer in mapped_layers(model).items()
        if mapping_products.supports(layer.weight_binarizer.mapping, layer.weight)
    }
    with ExitStack() as scope:
        if mapped and tuning.available() and tuning.runs_on(device):
            scope.enter_context(_cudnn_flags())
            try:
                check.check_mapping(mapped, mapping_products.predict_by_products)
            except Exception as error:
                _warn(
                    f"predicting weights without our kernels, because they failed: {first_line(error)}"
                )
            else:
                scope.enter_context(
                    attached(mapped.values(), fused_predict=mapping_products.predict_by_products)
                )
        yield


@contextmanager
def _cudnn_flags() -> Iterator[None]:
    """cuDNN's flags belong to the process: scopes that overlap have to be nested."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    try:
        cudnn.benchmark = True
        # TF32 would round the predictions: the bits of training would not be those that are frozen.
        cudnn.allow_tf32 = False
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)

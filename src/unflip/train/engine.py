"""How steps are run: eagerly, or compiled and captured in one CUDA graph with a branch for each seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType

import torch
from torch import Tensor, nn

from unflip import methods
from unflip.data.feed import Feed
from unflip.kernels import Kernels, Trial
from unflip.kernels.scope import first_line
from unflip.layers import binary_layers
from unflip.train.distributed import apart
from unflip.train.learner import Learner


class Engine:
    """Inside ``with Engine(...) as engine``, ``engine.step()`` runs one step of every learner.

    On a GPU the steps of all learners are one captured graph. With several ranks they are compiled only, because
    DistributedDataParallel starts its communication from the host, which a graph does not replay. On exit the learners
    are eager again, and their models have no kernels attached.
    """

    def __init__(self, learners: Sequence[Learner], *, compiled: bool, captured: bool) -> None:
        self.learners, self.ranks = learners, learners[0].ranks
        self.compiled = compiled
        self.captured = captured and self.ranks.world == 1
        self.feeds = _Feeds(learners)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.kernels = Kernels(
            [_trial(learner) for learner in learners],
            learners[0].device,
            self.ranks.first_problem,
        )
        self._scope = ExitStack()

    def __enter__(self) -> Engine:
        with ExitStack() as scope:
            with self._apart():
                scope.enter_context(self.kernels)
            scope.callback(self._run_eagerly)
            scope.callback(self.feeds.close)
            if self.learners[0].device.type == "cuda":
                if self.compiled:
                    self._compile(scope)
                if self.captured:
                    self._capture()
            self._scope = scope.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scope.close()

    def step(self) -> None:
        with self.feeds.step():
            if self.graph is not None:
                self.graph.replay()
                return
            for learner in self.learners:
                learner.draw_as_alone()
                learner.step()

    @property
    def mode(self) -> str:
        compiled = self.learners[0].losses != self.learners[0].eager_losses
        graph = self.graph is not None
        words = [w for w, on in (("compiled", compiled), ("CUDA graph", graph)) if on]
        return " + ".join(words) or "eager"

    def _apart(self) -> AbstractContextManager[None]:
        """Inside, no rank waits for another: kernels and compiler may fail on one of them only."""
        return apart([learner.objective for learner in self.learners])

    def _run_eagerly(self) -> None:
        self.graph = None
        for learner in self.learners:
            learner.losses = learner.eager_losses

    def _compile(self, scope: ExitStack) -> None:
        """Compile the losses of every learner. Compiled gradients are compared with eager ones before they are used."""
        limit = max(64, 4 * len(self.learners))
        scope.enter_context(torch._dynamo.config.patch(cache_size_limit=limit))
        problem = None
        try:
            with _tagged(self.kernels), self._apart():
                self._compile_losses()
        except Exception as error:
            problem = first_line(error)
        problem = self.ranks.first_problem(problem)
        if problem is not None:
            for learner in self.learners:
                learner.losses = learner.eager_losses
            warnings.warn(
                f"training without torch.compile, because it failed: {problem}",
                stacklevel=4,
            )

    def _compile_losses(self) -> None:
        for learner in self.learners:
            learner.losses = torch.compile(
                learner.eager_losses, dynamic=False, options={"combo_kernels": True}
            )
        for learner in _one_of_each_method(self.learners):
            check_straight_through(learner.model)
        for learner in self.learners:  # errors of the compiler appear here, not in the capture
            snapshot = learner.snapshot()
            learner.backward()
            learner.zero_grad()
            learner.restore(snapshot)

    def _capture(self) -> None:
        snapshots = [learner.snapshot() for learner in self.learners]
        try:
            self.graph = _captured_steps(self.learners)
        except Exception as error:
            torch.cuda.synchronize()
            warnings.warn(
                f"training without a CUDA graph, because capture failed: {first_line(error)}",
                stacklevel=3,
            )
        for learner, snapshot in zip(self.learners, snapshots, strict=True):
            learner.restore(snapshot)
            learner.position.zero_()


class _Feeds:
    """The inputs of learners whose source is streamed; nothing for a resident source.

    Learners with equal plans share one feed: their images are decoded once.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = [learner for learner in learners if learner.inputs is not None]
        self.feeds: list[tuple[Feed, list[Learner]]] = []
        self.at: tuple[int, int] | None = None  # epoch and step of the next inputs

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, every learner has its inputs; afterwards the next ones are fetched."""
        if not self.learners:
            yield
            return
        first = self.learners[0]
        if self.at != (first.epoch, int(first.position)):
            self._start(first.epoch, int(first.position))
        for feed, learners in self.feeds:
            feed.fill(*(learner.inputs for learner in learners if learner.inputs is not None))
        yield
        for learner in self.learners:
            learner.position += 1
        self.at = (first.epoch, int(first.position))
        for feed, _ in self.feeds:
            feed.fetch()

    def _start(self, epoch: int, step: int) -> None:
        self.close()
        for learner in self.learners:
            plan = learner.ranks.share(learner.plan)
            for _, others in self.feeds:
                if torch.equal(others[0].plan, learner.plan):
                    others.append(learner)
                    break
            else:
                feed = Feed(learner.source, learner.device)
                self.feeds.append((feed, [learner]))
                feed.start(plan, step)
        self.at = (epoch, step)

    def close(self) -> None:
        for feed, _ in self.feeds:
            feed.close()
        self.feeds = []
        self.at = None


def _trial(learner: Learner) -> Trial:
    """The learner, as the checks of the kernels need it. For a kernel, methods with other numbers are the same."""
    recipe = learner.recipe
    method = "float" if recipe.method == "float" else methods.resolve(recipe.method).family
    return Trial(
        model=learner.model,
        half=learner.half,
        family=f"{method} {recipe.model} {learner.images} {learner.source.spec.shape}",
        forward=lambda: learner.losses(*learner.next_inputs()),
        snapshot=learner.snapshot,
        restore=learner.restore,
    )


def _one_of_each_method(learners: Sequence[Learner]) -> list[Learner]:
    """Compiled code is the same for all seeds of a method."""
    return list({str(learner.recipe.method): learner for learner in learners}.values())


def _captured_steps(learners: Sequence[Learner]) -> torch.cuda.CUDAGraph:
    """One step of every learner. Each learner is a branch (stream), so that small kernels overlap."""
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


def _tagged(kernels: Kernels) -> AbstractContextManager[object]:
    """Inside, compiled code is kept on disk under the tag. Without a tag, nothing is kept.

    There is none in an older torch, or if the package's sources cannot be read.
    """
    try:
        return torch.compiler.config.patch(cache_key_tag=cache_tag(kernels))  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):
        from torch._inductor import config

        return config.patch(force_disable_caches=True)


def cache_tag(kernels: Kernels) -> str:
    """Names everything that compiled code depends on and its graph does not show: our kernels and their tuning.

    torch keeps compiled code on disk for the next process and finds it by its graph, where a kernel is only a name.
    """
    known = torch.compiler.config.cache_key_tag
    return f"{known} unflip {kernels.fingerprint()}"


def check_straight_through(model: nn.Module, tolerance: float = 0.02) -> None:
    """Compare the compiled gradient of each kind of binarizer with the eager one, on the installed torch.

    torch 2.11 once silently dropped the gradient of a straight-through sign: accuracy rose slowly and no binary weight
    ever flipped. The binarizers are compared one by one, because a whole binary network is chaotic: one rounding flips
    a sign, and 18 layers later the gradients have nothing in common.
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

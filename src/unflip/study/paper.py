"""The experiments of the LNS paper on CIFAR-10, the controls it lacks, and what goes beyond it.

*Training Binary Neural Networks through Learning with Noisy Supervision*, Han et al., ICML 2020, arXiv:2010.04871.
What the paper leaves open is answered by the recipes; see ``docs/lns.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unflip import models
from unflip.layers import binary_layers
from unflip.runs.files import read_saved
from unflip.study import record
from unflip.study.arm import Arm, Draft, Paper, make_arms, options
from unflip.study.study import Study
from unflip.train.recipe import Data, Recipe, load_recipe, recipe_in

DOREFA, FINETUNE, MAPPING, LNS = (
    f"cifar10-resnet20-{name}" for name in ("dorefa", "finetune", "mapping", "lns")
)
BASELINE = "baseline"
RHO = 0.005  # of the LNS recipe
ALPHAS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
RHOS = (0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2)
TUNING = ("data.validation=10000",)  # nothing is chosen on test images
# 70, 90 and 110 of 120 epochs, as the paper has it for ImageNet
STEPS = "schedule={name: step, at: [233, 300, 367], factor: 0.1}"
# as ResNet-20 was published (He et al., CVPR 2016: after 32k and 48k of 64k steps)
HALF = "schedule={name: step, at: [200, 300], factor: 0.1}"
# as Wide ResNet was published for CIFAR-10 (Zagoruyko and Komodakis, BMVC 2016: epochs 60, 120, 160 of 200)
WIDE = "schedule={name: step, at: [120, 240, 320], factor: 0.2}"
# a tenth after every quarter, as the paper has it for LNS itself
QUARTERS = "schedule={name: step, every: 100, factor: 0.1}"
STAYS = "method.lr=1e-30"  # above zero, and no weight moves
HELD = "optimizer.latent_lr=1e-6"  # where not one latent weight moved, the loop would see a lost gradient
OPEN = ("shortcut", "order", "pixels")  # of the paper's ResNet-20
TEACHER, STRONGEST = "cifar10-resnet20-teacher", "cifar10-resnet20-strongest"
NO_LOSS = "method.alpha=0.0"  # as the recipe has it: an override must not bring the loss back


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper. ``defaults`` change every recipe; ``about`` is for the command's help."""

    name: str
    title: str
    about: str
    drafts: tuple[Draft, ...]
    defaults: tuple[str, ...] = ()
    reference: str | None = None

    def study(
        self,
        out: Path,
        seeds: int = 5,
        *,
        epochs_scale: float = 1.0,
        overrides: Sequence[str] = (),
        baseline: Path | None = None,
        teacher: Path | None = None,
        tables_only: bool = False,
    ) -> Study:
        """The experiment in a folder. ``baseline`` holds the finished runs of one trained before, seed-0 and so on (for
        ``tables_only``, of some seeds); ``teacher`` the one that arms which distill learn from."""
        arms = make_arms(self.drafts, self.defaults, overrides, epochs_scale)
        if baseline is not None:
            if BASELINE not in (draft.name for draft in self.drafts):
                raise ValueError(
                    f"study {self.name} has no baseline: leave out --baseline {baseline}"
                )
            least = 1 if tables_only else seeds
            arms = [
                _given(arm, baseline, seeds, least) if arm.name == BASELINE else arm for arm in arms
            ]
        words = options(arms[0].recipe.data.name, seeds, overrides, epochs_scale)
        if any(arm.trained_otherwise for arm in arms):  # else the command trains the same one
            words.append("--baseline DIR")
        return Study(
            self.name,
            tuple(_comparable(*pair) for pair in zip(arms, self.drafts, strict=True)),
            out,
            tuple(range(seeds)),
            self.title,
            " ".join([f"unflip study {self.name}", *words]),
            _epochs_note(arms, epochs_scale),
            self.reference,
            teacher,
            tuple(overrides),
            epochs_scale,
        )

    def help(self) -> str:
        """What the command says of itself; its example works as it stands."""
        recipes = [load_recipe(draft.source, list(draft.changes)) for draft in self.drafts]
        pairs = zip(self.drafts, recipes, strict=True)
        learning = [draft.name for draft, recipe in pairs if recipe.distill]
        train = " ".join(["unflip train", TEACHER, *self.defaults])
        needed = f"With a teacher: {', '.join(learning)}; --teacher ({train})."
        first = f"unflip study {self.name} --epochs-scale 0.05 --seeds 2 --data DIR"
        without = f" --only {self.reference}" if learning else ""
        parts = [
            self.about,
            f"Arms: {', '.join(draft.name for draft in self.drafts)}.",
            *([needed] if learning else []),
            f"Leaves study.json, table.md and figures (SVG) beside the runs. A first look: {first}{without}",
        ]
        return "\n\n".join(parts)


def _given(arm: Arm, folder: Path, seeds: int, least: int) -> Arm:
    """The baseline's runs of another folder, of ``least`` seeds or more: the same images, network and method, or the
    arms mean nothing."""
    runs = [folder / f"seed-{seed}" for seed in range(seeds)]
    missing = [run for run in runs if not record.finished(run)]
    if seeds - len(missing) < least:
        raise ValueError(f"--baseline {folder}: {missing[0]} is not a finished run")
    otherwise = []
    for run in (run for run in runs if run not in missing):
        differs = [d for d in record.difference(run, arm.recipe) if not d.startswith("name ")]
        wrong = [d for d in differs if d.startswith(("data", "model", "method"))]
        if wrong:
            raise ValueError(
                f"--baseline {folder} is another network's: {'; '.join(wrong)}. Give one of this network and these "
                "images, or leave out --baseline to train it"
            )
        if differs:
            print(f"the baseline in {run} was trained differently: {'; '.join(differs)}")
            otherwise.append(run)
    given = replace(arm, finished_in=folder)
    return _as_trained(given, otherwise[0]) if otherwise else given


def _as_trained(arm: Arm, run: Path) -> Arm:
    """With the recipe of its runs: what the arm's own would give stands nowhere in the table."""
    recipe = recipe_in(run).model_copy(update={"name": arm.recipe.name})
    return replace(arm, recipe=recipe, trained_otherwise=True)


def _comparable(arm: Arm, draft: Draft) -> Arm:
    """The paper's figures are of CIFAR-10's test images, a network of its size and its epochs, and belong beside
    nothing else."""
    meant = load_recipe(draft.source, list(draft.changes))
    same = (
        arm.recipe.data == Data(name="cifar10")
        and arm.recipe.epochs == meant.epochs
        and _size(arm.recipe) == _size(meant)
    )
    return arm if same else replace(arm, paper=None)


def _size(recipe: Recipe) -> dict[str, Any]:
    """The network without what the paper leaves open."""
    return {k: v for k, v in recipe.model.model_dump().items() if k not in OPEN}


def _epochs_note(arms: Sequence[Arm], scale: float) -> str:
    text = "Epochs: " + ", ".join(
        f"{epochs} ({kind})"
        for kind, epochs in (
            ("from scratch", _epochs(arms, None)),
            ("from the baseline", _epochs(arms, BASELINE)),
        )
        if epochs
    )
    if scale == 1:
        return f"{text}."
    given = any(arm.finished_in for arm in arms)
    return f"{text}; {'the latter ' if given else ''}{scale:g} × those of the recipes."


def _epochs(arms: Sequence[Arm], start: str | None) -> str:
    found = {epochs for arm in arms if arm.start == start for epochs in _trained(arm)}
    return " or ".join(map(str, sorted(found)))


def _trained(arm: Arm) -> set[int]:
    """The epochs of an arm: its recipe's, or those of runs that were trained elsewhere."""
    if arm.finished_in is None:
        return {arm.recipe.epochs}
    results = arm.finished_in.glob("seed-*/result.json")
    return {read_saved(result, "epochs")["epochs"] for result in results}


def _binary_weights(recipe: Recipe) -> int:
    with torch.device("meta"):  # shapes are all that counts
        model = models.create(recipe.model.name, "dorefa", **recipe.model.options)
    return sum(layer.weight.numel() for _, layer in binary_layers(model))


def _one_mean(recipe: Recipe) -> list[str]:
    """One mean over all weights is their sum with α over their number, which the network decides."""
    assert isinstance(recipe.method, dict)
    alpha = recipe.method["alpha"] / _binary_weights(recipe)
    return ["method.reduction=sum", f"method.alpha={alpha!r}"]


def _stretched(recipe: Recipe) -> list[str]:
    """α / (1 − 2ρ) in place of ρ, with the α and ρ that LNS has beside it."""
    assert isinstance(recipe.method, dict)
    alpha, plus, minus = (recipe.method[name] for name in ("alpha", "rho_plus", "rho_minus"))
    return [f"method.alpha={alpha / (1 - plus - minus):.6f}", *_rho(0)]


def _latent(times: float) -> Callable[[Recipe], list[str]]:
    """Latent weights so many times faster than they would be."""

    def derived(recipe: Recipe) -> list[str]:
        rate = recipe.optimizer.latent_lr or recipe.optimizer.lr
        return [f"optimizer.latent_lr={times * rate:g}"]

    return derived


def _slow(recipe: Recipe) -> list[str]:
    """The mapping at a hundredth of the rate that it would have."""
    assert isinstance(recipe.method, dict)
    rate = recipe.method["lr"] or recipe.optimizer.lr
    return [f"method.lr={rate / 100:g}"]


def _distill(temperature: float, weight: float) -> str:
    return f"distill={{teacher: {TEACHER}, temperature: {temperature:g}, weight: {weight:g}}}"


def _after(
    name: str,
    label: str,
    source: str,
    *changes: str,
    paper: Paper | None = None,
    x: float | None = None,
    derived: Callable[[Recipe], list[str]] | None = None,
) -> Draft:
    """An arm that starts from the baseline. A rate at which no sign flips is a finding there, not a fault."""
    return Draft(
        name, label, source, (*changes, "allow_no_flips=true"), BASELINE, paper, x, derived
    )


def _rho(value: float) -> tuple[str, str]:
    return f"method.rho_plus={value}", f"method.rho_minus={value}"


def _finetune_with_latent(times: int) -> Draft:
    label = f"fine-tuning, latent weights {times} × faster"
    return _after(f"latent-{times}x", label, FINETUNE, derived=_latent(times))


_BASELINE = Draft(BASELINE, "baseline (DoReFa)", DOREFA, paper=Paper(85.06))
_LNS = _after("lns", "LNS", LNS, paper=Paper(85.56, 0.11, 85.78))


def _reading(name: str, label: str, *changes: str, times: float | None = None) -> Draft:
    derived = _latent(times) if times else None
    return Draft(name, label, DOREFA, changes, paper=_BASELINE.paper, derived=derived)


READINGS = Experiment(
    "readings",
    "What the paper's baseline may have been",
    "Readings of what the paper leaves open in its baseline (85.06 %): decay, shortcuts, speed of the latent weights.",
    (
        replace(
            _BASELINE,
            label="cosine decay, one shortcut a block",
            keeps=("schedule", "model.shortcut"),
        ),
        _reading("step", "decay by steps", STEPS),
        _reading("conv", "one shortcut a convolution", "model.shortcut=conv"),
        _reading("conv-step", "… decay by steps", "model.shortcut=conv", STEPS),
        _reading("conv-half", "… decay at 1/2 and 3/4", "model.shortcut=conv", HALF),
        _reading("conv-wide", "… decay as Wide ResNet's", "model.shortcut=conv", WIDE),
        _reading("conv-quarters", "… decay every quarter", "model.shortcut=conv", QUARTERS),
        _reading("latent-3x", "latent weights 3 × faster", times=3),
        _reading("latent-10x", "latent weights 10 × faster", times=10),
    ),
    reference=BASELINE,
)

ABLATION = Experiment(
    "ablation",
    "Mapping and noisy supervision, each added in turn (the paper's ablation)",
    "The paper's ablation and its Figure 3: fine-tuning, mapping without noisy supervision, LNS.",
    (
        _BASELINE,
        _after(
            "finetune-0.01",
            "fine-tuning, lr 0.01",
            FINETUNE,
            "optimizer.lr=0.01",
            paper=Paper(85.26, 0.06, 85.32),
        ),
        _after("finetune-0.001", "fine-tuning, lr 0.001", FINETUNE, "optimizer.lr=0.001"),
        _after("finetune-0.0001", "fine-tuning, lr 0.0001", FINETUNE, "optimizer.lr=0.0001"),
        # what training all but the signs gives: the control of a mapping that keeps them
        _after("finetune-still", "fine-tuning, latent weights 10,000 × slower", FINETUNE, HELD),
        _after(
            "mapping",
            "mapping without noisy supervision",
            MAPPING,
            NO_LOSS,
            paper=Paper(85.36, 0.06, 85.43),
        ),
        _LNS,
        # Algorithm 1 takes sign(W) anew in each pass; the paper's text calls its labels pretrained.
        replace(
            _after("lns-frozen", "LNS, labels frozen", LNS, "method.labels=frozen"),
            paper=_LNS.paper,
        ),
        # nor does it say over what its loss is a mean
        replace(
            _after("one-mean", "LNS, one mean over all weights", LNS, derived=_one_mean),
            paper=_LNS.paper,
        ),
    ),
    reference="finetune-0.01",
)

ALPHA = Experiment(
    "alpha",
    "LNS over α, at ρ = 0.01",
    "The paper's Figure 4: α from 0 to 5 at ρ = 0.01, on 10,000 training images held out.",
    (
        _BASELINE,
        *(
            _after(f"alpha-{a:g}", f"α = {a:g}", LNS, f"method.alpha={a}", *_rho(0.01), x=a)
            for a in ALPHAS
        ),
    ),
    TUNING,
    "alpha-0",
)

RHO_SWEEP = Experiment(
    "rho",
    "LNS over ρ, at α = 1",
    "The paper's Figure 5: ρ from 0 to 0.2 at α = 1, on 10,000 training images held out.",
    (
        _BASELINE,
        *(_after(f"rho-{r:g}", f"ρ = {r:g}", LNS, "method.alpha=1", *_rho(r), x=r) for r in RHOS),
    ),
    TUNING,
    "rho-0",
)

SOTA = Experiment(
    "sota",
    "1-bit ResNet-20, method by method (the paper's table on CIFAR-10)",
    "The paper's CIFAR-10 table: DoReFa-Net, XNOR-Net, TBN, DSQ and LNS, our runs beside its figures.",
    (
        replace(_BASELINE, label="DoReFa-Net"),
        Draft("xnor", "XNOR-Net", DOREFA, ("method=xnor",), paper=Paper(85.23)),
        # along one shortcut a convolution its inputs grow out of reach of its gradient, and it unlearns
        Draft("tbn", "TBN", DOREFA, ("method=tbn",), paper=Paper(84.34), keeps=("model.shortcut",)),
        Draft("dsq", "DSQ", DOREFA, ("method=dsq",), paper=Paper(84.11)),
        _LNS,
    ),
    reference=BASELINE,
)

CONTROLS = Experiment(
    "controls",
    "LNS against its controls",
    "What the paper does not control for: ρ = 0, a stretched α, each open reading, faster latent weights; on 10,000 "
    "training images held out.",
    (
        _BASELINE,
        _LNS,
        _after("rho-0", "ρ = 0", LNS, *_rho(0)),
        _after(
            "stretched-alpha",
            "ρ = 0, α / (1 − 2ρ)",
            LNS,
            derived=_stretched,
        ),
        _after("after-sign", "loss after the sign", LNS, "method.loss_on=after_sign"),
        _after("frozen-labels", "labels frozen", LNS, "method.labels=frozen"),
        _after("clipped", "clipped gradient", LNS, "method.gradient=clipped"),
        _after("alpha-0.1", "α = 0.1", LNS, "method.alpha=0.1"),
        _after("one-mean", "one mean over all weights", LNS, derived=_one_mean),
        _after("lns-fast", "LNS, latent weights 10 × faster", LNS, derived=_latent(10)),
        _after("slow", "mapping 100 × slower", LNS, derived=_slow),
        _after("mapping", "α = 0", MAPPING, NO_LOSS),
        _after("mapping-slow", "α = 0, mapping 100 × slower", MAPPING, NO_LOSS, derived=_slow),
        _after("mapping-still", "α = 0, mapping stays", MAPPING, NO_LOSS, STAYS),
        _after("residual", "residual mapping", LNS, "method.mapping=residual"),
        _after(
            "residual-one-mean",
            "residual mapping, α = 0.1, one mean over all weights",
            LNS,
            "method.mapping=residual",
            "method.alpha=0.1",
            derived=_one_mean,
        ),
        _after(
            "residual-mapping",
            "residual mapping, α = 0",
            MAPPING,
            NO_LOSS,
            "method.mapping=residual",
        ),
        _after(
            "residual-still",
            "residual mapping, α = 0, g stays 0",
            MAPPING,
            NO_LOSS,
            "method.mapping=residual",
            STAYS,
        ),
        _after("finetune", "fine-tuning", FINETUNE),
        _finetune_with_latent(10),
        _finetune_with_latent(20),
    ),
    TUNING,
    "finetune",
)

_FORWARD = ("method.loss=forward", "method.rates=estimated")

CORRECTIONS = Experiment(
    "corrections",
    "Losses that let a noisy label go",
    "LNS with other losses for noisy labels than the paper's: forward correction, with one ρ and with ρ(|w|) estimated "
    "from forks of the baseline; generalised and symmetric cross entropy; label smoothing. On 10,000 training images "
    "held out.",
    (
        _BASELINE,
        _after("finetune", "fine-tuning", FINETUNE),
        _LNS,
        _after("forward", "forward correction, ρ = 0.005", LNS, "method.loss=forward", *_rho(RHO)),
        _after("forward-estimated", "forward correction, ρ(|w|) estimated", LNS, *_FORWARD),
        _after(
            "residual-forward",
            "the same, residual mapping",
            LNS,
            *_FORWARD,
            "method.mapping=residual",
        ),
        _after("gce", "generalised cross entropy", LNS, "method.loss=gce"),
        _after("sce", "symmetric cross entropy", LNS, "method.loss=sce"),
        _after("smoothing", "label smoothing", LNS, "method.loss=smoothing"),
        _finetune_with_latent(10),
        _finetune_with_latent(20),
    ),
    TUNING,
    "finetune",
)

AFTER = "model.order=conv-bn-prelu"
MEAN = "model.pixels=mean"
# ReActNet's learned shifts, with the baseline's weights and gradients
SHIFTS = "method={name: reactnet, weights: dorefa, gradient: clipped}"
DISTILL = _distill(temperature=2, weight=0.5)
MORE_DISTILL = _distill(temperature=4, weight=0.9)


def _decay(value: float) -> str:
    return f"optimizer.weight_decay={value:f}"


def _stronger(name: str, label: str, *changes: str, times: float | None = None) -> Draft:
    derived = _latent(times) if times else None
    return Draft(name, label, DOREFA, ("model.shortcut=conv", *changes), derived=derived)


def _fast(name: str, label: str, *changes: str) -> Draft:
    return _stronger(f"fast{name}", f"fast{label}", *changes, times=10)


def _decayed(name: str, label: str, *changes: str) -> Draft:
    return _stronger(f"decayed{name}", f"decayed{label}", _decay(0.0001), *changes, times=10)


BEYOND = Experiment(
    "beyond",
    "What makes a stronger ±1 ResNet-20 than the paper's",
    "One shortcut a convolution, and on top of it faster latent weights, weight decay, other methods, another order, "
    "learned shifts, a teacher: on 10,000 training images held out.",
    (
        _stronger("conv", "one shortcut a convolution"),
        _stronger("decay", "… weight decay 0.0005", _decay(0.0005)),
        _stronger("adam", "… Adam", "optimizer={name: adam, lr: 0.001}"),
        _stronger("bop", "… Bop", "method=bop"),
        _stronger("bop-decay", "… Bop, weight decay 0.0001", "method=bop", _decay(0.0001)),
        _stronger("reste", "… ReSTE", "method=reste"),
        _stronger("recu", "… ReCU, weight decay 0.0005", "method=recu", _decay(0.0005)),
        _stronger("reactnet", "… ReActNet", "method=reactnet"),
        _fast("", ": latent weights 10 × faster"),
        _fast("-after", ", PReLU after the add", AFTER),
        _fast("-mean", ", shortcuts average pixels", MEAN),
        _fast("-shifts", ", learned shifts", SHIFTS),
        _fast("-distill", ", a teacher (T = 4, weight 0.9)", MORE_DISTILL),
        _fast("-all", ", all of the last three", MEAN, SHIFTS, MORE_DISTILL),
        _decayed("", ": latent weights 10 × faster, weight decay 0.0001"),
        _decayed("-mean", ", shortcuts average pixels", MEAN),
        _decayed("-shifts", ", learned shifts", SHIFTS),
        _decayed("-distill", ", a teacher (T = 2, weight 0.5)", DISTILL),
        _fast("-decay-2e-4", ", weight decay 0.0002", _decay(0.0002)),
        _fast("-decay-5e-4", ", weight decay 0.0005", _decay(0.0005)),
        _stronger(
            "latent-30x",
            "… latent weights 30 × faster, weight decay 0.0001",
            _decay(0.0001),
            times=30,
        ),
    ),
    TUNING,
    "conv",
)

FINAL = Experiment(
    "final",
    "The strongest ±1 ResNet-20 here, on test images",
    "The parts that were best on held-out images, put together, trained on all training images and measured on test "
    "images; and the same without a teacher.",
    (
        _stronger(BASELINE, "one shortcut a convolution"),
        Draft("strongest", "the strongest", STRONGEST),
        Draft("alone", "… without a teacher", STRONGEST, ("distill=null",)),
    ),
    reference=BASELINE,
)

_ALL = (READINGS, ABLATION, ALPHA, RHO_SWEEP, SOTA, CONTROLS, CORRECTIONS, BEYOND, FINAL)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}


def reference_of(study: str, said: str | None) -> str | None:
    """The arm that a study compares the others with: what its summary says, or what its experiment has."""
    known = EXPERIMENTS.get(study)
    return said or (known.reference if known else None)

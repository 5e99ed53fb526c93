"""The experiments of the LNS paper on CIFAR-10, controls that it lacks, and experiments beyond it.

*Training Binary Neural Networks through Learning with Noisy Supervision*, Han et al., ICML 2020, arXiv:2010.04871.
The recipes decide what the paper leaves open; see ``docs/lns.md``.
One file of more than 400 lines, because the experiments share their arms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unflip.recipes.schema import Recipe
from unflip.study.arm import Draft
from unflip.study.experiment import BASELINE, Experiment, distill
from unflip.study.summary import Paper

DOREFA, DOREFA_COSINE, FINETUNE, MAPPING, LNS, STRONGEST = (
    f"cifar10-resnet20-{name}"
    for name in ("dorefa", "cosine", "finetune", "mapping", "lns", "strongest")
)
RHO = 0.005  # of the LNS recipe
ALPHAS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
RHOS = (0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2)
TUNING = ("data.validation=10000",)  # nothing is chosen on test images
# 70, 90 and 110 of 120 epochs, as the paper has it for ImageNet
STEPS = "schedule={name: step, at: [233, 300, 367], factor: 0.1}"
# as ResNet-20 was published (He et al., CVPR 2016: after 32k and 48k of 64k steps)
HALF = "schedule={name: step, at: [200, 300], factor: 0.1}"
# a tenth after every quarter, as the paper has it for LNS itself
QUARTERS = "schedule={name: step, every: 100, factor: 0.1}"
STAYS = "method.lr=1e-30"  # a rate must be above zero; at this one no weight moves
NEARLY_FROZEN = "optimizer.latent_lr=1e-6"  # training stops with an error if no latent weight moves
NO_LOSS = "method.alpha=0.0"  # as the recipe has it: an override must not bring the loss back


def _binary_weights(recipe: Recipe) -> int:
    import torch  # not for declaring studies

    from unflip import models
    from unflip.layers import binary_layers

    with torch.device("meta"):  # only shapes matter
        model = models.create(recipe.model.name, "dorefa", **recipe.model.options)
    return sum(layer.weight.numel() for _, layer in binary_layers(model))


def _one_mean(recipe: Recipe) -> list[str]:
    """The mean over all weights is the sum with α / n, where n, the number of weights, depends on the network."""
    assert isinstance(recipe.method, dict)
    alpha = recipe.method["alpha"] / _binary_weights(recipe)
    return ["method.reduction=sum", f"method.alpha={alpha!r}"]


def _stretched(recipe: Recipe) -> list[str]:
    """α / (1 − 2ρ) instead of ρ, with the α and ρ of the LNS arm."""
    assert isinstance(recipe.method, dict)
    alpha, plus, minus = (recipe.method[name] for name in ("alpha", "rho_plus", "rho_minus"))
    return [f"method.alpha={alpha / (1 - plus - minus):.6f}", *_rho(0)]


def _latent(times: float) -> Callable[[Recipe], list[str]]:
    """``times`` the learning rate that the latent weights would have."""

    def derived(recipe: Recipe) -> list[str]:
        rate = recipe.optimizer.latent_lr or recipe.optimizer.lr
        return [f"optimizer.latent_lr={times * rate:g}"]

    return derived


def _slower(times: int) -> Callable[[Recipe], list[str]]:
    """The learning rate that the mapping would have, divided by ``times``."""

    def derived(recipe: Recipe) -> list[str]:
        assert isinstance(recipe.method, dict)
        rate = recipe.method["lr"] or recipe.optimizer.lr
        return [f"method.lr={rate / times:g}"]

    return derived


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


_BASELINE = Draft(BASELINE, "baseline (DoReFa)", DOREFA, paper=Paper(85.06), control=True)
_LNS = _after("lns", "LNS", LNS, paper=Paper(85.56, 0.11, 85.78))


def _with_cosine(name: str, label: str, *changes: str, times: float | None = None) -> Draft:
    """The baseline with cosine decay; latent weights ``times`` as fast as the rest."""
    derived = _latent(times) if times else None
    return Draft(name, label, DOREFA_COSINE, changes, derived=derived)


def _reading(name: str, label: str, *changes: str, times: float | None = None) -> Draft:
    return replace(_with_cosine(name, label, *changes, times=times), paper=_BASELINE.paper)


READINGS = Experiment(
    "readings",
    "What the paper's baseline may have been",
    "Interpretations of what the paper leaves open in its baseline (85.06 %): decay, shortcuts, speed of the latent "
    "weights.",
    (
        replace(
            _reading(BASELINE, "cosine decay, one shortcut per block"),
            keeps=("schedule", "model.shortcut"),
        ),
        _reading("step", "decay by steps", STEPS),
        _reading("conv", "one shortcut per convolution", "model.shortcut=conv"),
        _reading("conv-step", "… decay by steps", "model.shortcut=conv", STEPS),
        _reading("conv-half", "… decay at 1/2 and 3/4", "model.shortcut=conv", HALF),
        # the one that matches the paper best, and the baseline of all other studies
        replace(
            _BASELINE,
            name="conv-wide",
            label="… decay as Wide ResNet's",
            keeps=("schedule", "model.shortcut"),
        ),
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
        # trains everything except the signs: the control for a mapping that keeps them
        _after(
            "finetune-still", "fine-tuning, latent weights 10,000 × slower", FINETUNE, NEARLY_FROZEN
        ),
        _after(
            "mapping",
            "mapping without noisy supervision",
            MAPPING,
            NO_LOSS,
            paper=Paper(85.36, 0.06, 85.43),
        ),
        _LNS,
        # Algorithm 1 computes sign(W) again in each pass; the paper's text calls its labels pretrained.
        replace(
            _after("lns-frozen", "LNS, labels frozen", LNS, "method.labels=frozen"),
            paper=_LNS.paper,
        ),
        # the paper does not say over which weights the loss is averaged
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
        # with one shortcut per convolution its inputs grow beyond the range of its gradient, and it unlearns
        Draft("tbn", "TBN", DOREFA, ("method=tbn", "model.shortcut=block"), paper=Paper(84.34)),
        Draft("dsq", "DSQ", DOREFA, ("method=dsq",), paper=Paper(84.11)),
        _LNS,
    ),
    reference=BASELINE,
)

CONTROLS = Experiment(
    "controls",
    "LNS against its controls",
    "What the paper does not control for: ρ = 0, a stretched α, other interpretations of its text, faster latent "
    "weights; on 10,000 training images held out.",
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
        _after("slow", "mapping 100 × slower", LNS, derived=_slower(100)),
        _after("mapping", "α = 0", MAPPING, NO_LOSS),
        _after(
            "mapping-slow", "α = 0, mapping 100 × slower", MAPPING, NO_LOSS, derived=_slower(100)
        ),
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

# W gets the base method's straight-through gradient, and f learns from the noisy labels alone
STRAIGHT = "method.task_gradient=straight_through"
BOTH = "method.task_gradient=both"  # the same, and the task trains f too
TANH = "method.output=tanh"
FROZEN = "method.labels=frozen"
# until agreement has not risen for 1000 steps
CONVERGED = ("method.warm_agreement=null", "method.warm_patience=1000", "method.warm_steps=10000")


def _lns(name: str, label: str, *changes: str, slower: int | None = None) -> Draft:
    return _after(name, label, LNS, *changes, derived=_slower(slower) if slower else None)


def _after_sign(rho: float) -> tuple[str, ...]:
    return "method.loss_on=after_sign", *_rho(rho)


_FINETUNED = replace(
    _after("finetune", "fine-tuning", FINETUNE, paper=Paper(85.26, 0.06, 85.32)), control=True
)
_FINETUNED_SLOWLY = replace(
    _after("finetune-0.001", "fine-tuning, lr 0.001", FINETUNE, "optimizer.lr=0.001"), control=True
)
_SLOW_MAPPING = replace(
    _after("mapping-slow", "α = 0, mapping 10 × slower", MAPPING, NO_LOSS, derived=_slower(10)),
    control=True,
)

INTERPRETATIONS = Experiment(
    "interpretations",
    "What the paper's LNS may have been",
    "Interpretations of what the paper leaves open in LNS: where the gradient of the task goes, how fast the mapping "
    "learns, its warm start and its output, the loss after the sign. On 10,000 training images held out.",
    (
        _BASELINE,
        _FINETUNED,
        _FINETUNED_SLOWLY,
        _SLOW_MAPPING,
        _LNS,
        _lns("slow", "mapping 10 × slower", slower=10),
        _lns("slow-frozen", "mapping 10 × slower, labels frozen", FROZEN, slower=10),
        _lns(
            "slow-converged",
            "mapping 10 × slower, warm start until it converges",
            *CONVERGED,
            slower=10,
        ),
        _lns("slow-tanh", "mapping 10 × slower, f ends with tanh", TANH, slower=10),
        *(
            _lns(
                f"slow-after-{r:g}",
                f"mapping 10 × slower, loss after the sign, ρ = {r:g}",
                *_after_sign(r),
                slower=10,
            )
            for r in (RHO, 0.2)
        ),
        _lns("straight", "straight-through W", STRAIGHT),
        _lns("straight-slow", "straight-through W, mapping 10 × slower", STRAIGHT, slower=10),
        _lns("straight-alpha-0.1", "straight-through W, α = 0.1", STRAIGHT, "method.alpha=0.1"),
        # the control: f stays as the warm start left it
        replace(
            _lns("straight-alpha-0", "straight-through W, α = 0", STRAIGHT, NO_LOSS), control=True
        ),
        _lns("straight-frozen", "straight-through W, labels frozen", STRAIGHT, FROZEN),
        _lns(
            "straight-converged",
            "straight-through W, warm start until it converges",
            STRAIGHT,
            *CONVERGED,
        ),
        _lns("straight-tanh", "straight-through W, f ends with tanh", STRAIGHT, TANH),
        *(
            _lns(
                f"straight-after-{r:g}",
                f"straight-through W, loss after the sign, ρ = {r:g}",
                STRAIGHT,
                *_after_sign(r),
            )
            for r in (0, RHO, 0.05, 0.2)
        ),
        _lns("both", "straight-through W, f also by the task", BOTH),
        _lns(
            "both-slow",
            "straight-through W, f also by the task, mapping 10 × slower",
            BOTH,
            slower=10,
        ),
    ),
    TUNING,
    "finetune",
    losses=True,
)


def _replicated() -> tuple[Draft, ...]:
    """The arms of the interpretations, with all three rates of fine-tuning and the mapping alone as the paper has it;
    the paper's figure for LNS stands beside each of its interpretations."""
    added = {
        "finetune-0.001": _after(
            "finetune-0.0001", "fine-tuning, lr 0.0001", FINETUNE, "optimizer.lr=0.0001"
        ),
        "mapping-slow": _after(
            "mapping", "α = 0", MAPPING, NO_LOSS, paper=Paper(85.36, 0.06, 85.43)
        ),
    }
    arms: list[Draft] = []
    for draft in INTERPRETATIONS.drafts:
        is_lns = draft.source == LNS and NO_LOSS not in draft.changes
        arms.append(replace(draft, paper=_LNS.paper) if is_lns else draft)
        if draft.name in added:
            arms.append(replace(added[draft.name], control=True))
    return tuple(replace(arm, control=True) if arm.name == "lns" else arm for arm in arms)


REPLICATION = Experiment(
    "replication",
    "The paper's ablation, with interpretations of LNS",
    "The paper's ablation at full length on test images, from ten baselines: fine-tuning at three rates, the mapping "
    "alone, LNS. --best-of runs/interpretations adds the three interpretations that are best on held-out images; "
    "without it, all are trained.",
    _replicated(),
    reference="finetune",
    seeds=10,
    losses=True,
)

REPLICATION_FROM_ONE = replace(
    REPLICATION,
    name="replication-from-one",
    title="The paper's ablation, from one pretrained network as in the paper",
    about="As replication, but all seeds start from one baseline, as the paper's five runs do. --baseline "
    "runs/replication/baseline takes the first of that study.",
    drafts=tuple(
        replace(draft, once=True) if draft.name == BASELINE else draft
        for draft in REPLICATION.drafts
    ),
)

_FORWARD = ("method.loss=forward", "method.rates=estimated")

CORRECTIONS = Experiment(
    "corrections",
    "Losses that let a noisy label go",
    "LNS with other losses for noisy labels than the paper's: forward correction, with one ρ and with ρ(|w|) estimated "
    "from forks of the baseline; generalized and symmetric cross entropy; label smoothing. On 10,000 training images "
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
        _after("gce", "generalized cross entropy", LNS, "method.loss=gce"),
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
DISTILL = distill(temperature=2, weight=0.5)
MORE_DISTILL = distill(temperature=4, weight=0.9)


def _decay(value: float) -> str:
    return f"optimizer.weight_decay={value:f}"


def _stronger(name: str, label: str, *changes: str, times: float | None = None) -> Draft:
    return _with_cosine(name, label, "model.shortcut=conv", *changes, times=times)


def _fast(name: str, label: str, *changes: str) -> Draft:
    return _stronger(f"fast{name}", f"fast{label}", *changes, times=10)


def _decayed(name: str, label: str, *changes: str) -> Draft:
    return _stronger(f"decayed{name}", f"decayed{label}", _decay(0.0001), *changes, times=10)


BEYOND = Experiment(
    "beyond",
    "What makes a stronger ±1 ResNet-20 than the paper's",
    "One shortcut per convolution, and on top of it faster latent weights, weight decay, other methods, another order, "
    "learned shifts, a teacher: on 10,000 training images held out.",
    (
        _stronger("conv", "one shortcut per convolution"),
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
    "The best parts on held-out images together, trained on all training images and measured on test images; and "
    "the same without a teacher.",
    (
        _stronger(BASELINE, "one shortcut per convolution"),
        Draft("strongest", "the strongest", STRONGEST),
        Draft("alone", "… without a teacher", STRONGEST, ("distill=null",)),
    ),
    reference=BASELINE,
)

ENDS = Experiment(
    "ends",
    "What 8-bit ends cost",
    "The baseline with float ends, and trained with 8-bit ends: the first convolution and the last linear layer have "
    "8-bit weights and inputs. On test images.",
    (
        replace(_BASELINE, label="float ends", control=False),
        Draft("int8", "8-bit ends", DOREFA, ("ends=int8",)),
    ),
    reference=BASELINE,
)

_PAPER = (READINGS, ABLATION, ALPHA, RHO_SWEEP, SOTA)
_OURS = (
    *(CONTROLS, INTERPRETATIONS, REPLICATION, REPLICATION_FROM_ONE, CORRECTIONS, BEYOND, FINAL),
    ENDS,
)
_ALL = (*_PAPER, *_OURS)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}

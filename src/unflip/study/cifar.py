"""The tables of CIFAR-10 that papers on 1-bit networks report, and the search for a stronger ResNet-20.

VGG-small and ResNet-18: each method with its own published recipe, as far as it is known, and with the recipe of our
strongest ResNet-20. Epochs, batch sizes, rates, weight decay and warm-up are those of the authors' released code:

IR-Net  htqin/IR-Net: the script of VGG-small. There is none for ResNet-18; we take the one of ResNet-20
ReCU    z-hXu/ReCU: one command for all networks
ReSTE   DravenALG/ReSTE: 1000 epochs, 1500 with batches of 96 for ResNet-18. Its networks differ in the order of ReLU,
        BatchNorm and pool, and have no PReLU
AdaBin  huawei-noah/Efficient-Computing: the script of ResNet-20, whose defaults hold for all networks
BiPer   edmav4/BiPer: both steps as for ResNet-18. Those of VGG-small are in a file that we could not read

Published figures are those that the authors give; as far as we know they are of the best epoch and one run. For ReCU
they are without its second training ("finetune"). Figures that we could not check are left out. None of these arms has
been run by us.
"""

from __future__ import annotations

from unflip.study.arm import Draft
from unflip.study.experiment import BASELINE, TEACHER, Experiment, distill
from unflip.study.paper import DOREFA_COSINE, STRONGEST, TUNING
from unflip.study.summary import Paper

VGG = "model={name: vgg_small}"
HARDTANH_18 = "model={name: resnet18_cifar, order: conv-bn-hardtanh}"
BINARY_18 = "model={name: resnet18_cifar, order: conv-bn-hardtanh, downsample: binary}"
PRELU_18 = "model={name: resnet18_cifar, order: conv-prelu-bn}"
ADABIN_18 = "model={name: resnet18_cifar, order: adabin, shortcut: conv}"
STRONG_18 = "model={name: resnet18_cifar, order: conv-prelu-bn, shortcut: conv, pixels: mean}"
COSINE = "schedule={name: cosine}"
WARM = (
    "schedule={name: cosine, warmup: 4}"  # a fifth, two fifths, ... of the rate in the first epochs
)
LARGE = "teacher-18"  # the name of an arm


def _sgd(lr: float, decay: float) -> str:
    return f"optimizer={{name: sgd, lr: {lr:g}, momentum: 0.9, weight_decay: {decay:f}}}"


def _own(
    name: str,
    label: str,
    method: str,
    network: str,
    epochs: int,
    batch: int,
    lr: float,
    decay: float,
    *,
    schedule: str = COSINE,
    published: float | None = None,
) -> Draft:
    """A method with its authors' recipe."""
    changes = (
        f"method={method}",
        network,
        f"epochs={epochs}",
        f"batch_size={batch}",
        _sgd(lr, decay),
        schedule,
    )
    return Draft(name, label, DOREFA_COSINE, changes, paper=Paper(published) if published else None)


def _biper(network: str, published: float) -> tuple[Draft, Draft]:
    first = Draft(
        "biper-step1", "BiPer, first step", "cifar10-resnet20-biper-step1", (network, WARM)
    )
    second = Draft(
        "biper",
        "BiPer",
        "cifar10-resnet20-biper",
        (network, WARM),
        start=first.name,
        paper=Paper(published),
    )
    return first, second


def _large_teacher(network: str = STRONG_18) -> Draft:
    changes = (network, "epochs=200", _sgd(0.1, 0.0005))
    return Draft(LARGE, "ResNet-18, float (the teacher)", TEACHER, changes, once=True)


def _ours(name: str, label: str, network: str, *changes: str, teacher: str | None = LARGE) -> Draft:
    """A method with the recipe of our strongest ResNet-20."""
    taught = distill(2, 0.5) if teacher else "distill=null"
    return Draft(name, label, STRONGEST, (network, taught, *changes), teacher=teacher)


def _with_our_recipe(network: str) -> tuple[Draft, ...]:
    methods = {"irnet": "IR-Net", "recu": "ReCU", "reste": "ReSTE", "adabin": "AdaBin"}
    return (
        _large_teacher(),
        _ours("strongest", "our strongest recipe (ReActNet's shifts)", network),
        _ours("alone", "our strongest recipe, without a teacher", network, teacher=None),
        *(
            _ours(f"{name}-ours", f"our strongest recipe, with {label}", network, f"method={name}")
            for name, label in methods.items()
        ),
    )


def _baseline(network: str) -> Draft:
    return Draft(BASELINE, "DoReFa-Net, the recipe of our ResNet-20", DOREFA_COSINE, (network,))


VGG_SMALL = Experiment(
    "cifar10-vgg-small",
    "1-bit VGG-small on CIFAR-10",
    "VGG-small: each method with its published recipe, and with the recipe of our strongest ResNet-20.",
    (
        _baseline(VGG),
        _own(
            "irnet",
            "IR-Net",
            "{name: irnet, t_min: 0.1}",
            VGG,
            300,
            128,
            0.007,
            0.0001,
            published=90.4,
        ),
        _own("recu", "ReCU", "recu", VGG, 600, 256, 0.1, 0.0005, schedule=WARM, published=92.2),
        _own(
            "reste", "ReSTE", "reste", VGG, 1000, 256, 0.1, 0.0001, schedule=WARM, published=92.55
        ),
        _own("adabin", "AdaBin", "adabin", VGG, 400, 128, 0.1, 0.0001, published=92.3),
        *_biper(VGG, 92.46),
        *_with_our_recipe(VGG),
    ),
    reference=BASELINE,
    seeds=3,
)

RESNET_18 = Experiment(
    "cifar10-resnet18",
    "1-bit ResNet-18 on CIFAR-10",
    "ResNet-18 for small images: each method with its published recipe, and with the recipe of our strongest "
    "ResNet-20.",
    (
        _baseline(PRELU_18),
        _own("irnet", "IR-Net", "irnet", HARDTANH_18, 400, 128, 0.1, 0.0001),
        _own(
            "recu", "ReCU", "recu", BINARY_18, 600, 256, 0.1, 0.0005, schedule=WARM, published=92.8
        ),
        _own(
            "reste",
            "ReSTE",
            "reste",
            PRELU_18,
            1500,
            96,
            0.1,
            0.0001,
            schedule=WARM,
            published=92.63,
        ),
        _own("adabin", "AdaBin", "adabin", ADABIN_18, 400, 128, 0.1, 0.0001),
        *_biper(BINARY_18, 93.75),
        *_with_our_recipe(STRONG_18),
    ),
    reference=BASELINE,
    seeds=3,
)

SMALL = "teacher-20"  # the name of an arm


def _variant(name: str, label: str, *changes: str, teacher: str = SMALL) -> Draft:
    return Draft(name, label, STRONGEST, changes, teacher=teacher)


RECORD = Experiment(
    "record",
    "Changes to the recipe of our strongest ±1 ResNet-20",
    "Each change alone, on 10,000 training images held out. Then, for the arm that was best: --override "
    "data.validation=0 --seeds 5 --only ARM, in another --out.",
    (
        Draft(SMALL, "ResNet-20 of twice the width, float (the teacher)", TEACHER, once=True),
        _large_teacher(),
        _variant("strongest", "the strongest so far"),
        _variant("large-teacher", "ResNet-18 as teacher", distill(2, 0.5), teacher=LARGE),
        _variant(
            "large-teacher-0.9",
            "ResNet-18 as teacher, T = 4, weight 0.9",
            distill(4, 0.9),
            teacher=LARGE,
        ),
        _variant("distill-0.9", "T = 4, weight 0.9", distill(4, 0.9)),
        _variant("decay-0.0001", "weight decay 0.0001", "optimizer.weight_decay=0.0001"),
        _variant("decay-0.000025", "weight decay 0.000025", "optimizer.weight_decay=0.000025"),
        _variant("latent-2", "latent weights twice as fast", "optimizer.latent_lr=2.0"),
        _variant("latent-0.5", "latent weights half as fast", "optimizer.latent_lr=0.5"),
        _variant("after", "PReLU after the add", "model.order=conv-bn-prelu"),
        _variant("smooth", "labels smoothed by 0.1", "label_smoothing=0.1"),
        _variant("parabola", "gradients of Bi-Real Net", "method.gradient=approximate"),
        _variant("long", "1000 epochs", "epochs=1000"),
    ),
    TUNING,
    "strongest",
    seeds=2,
)

EXPERIMENTS = {experiment.name: experiment for experiment in (VGG_SMALL, RESNET_18, RECORD)}

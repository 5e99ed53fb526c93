"""The ImageNet tables of the LNS paper, and the same arms on Imagenette.

*Training Binary Neural Networks through Learning with Noisy Supervision*, Han et al., ICML 2020, arXiv:2010.04871.
An arm has a shipped recipe where there is one. The other methods of the paper's tables have a *common recipe* with the
method replaced: DoReFa-Net's for ResNet-18, XNOR-Net's for AlexNet. So their rows compare methods and do not repeat
their papers' training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unflip.study.arm import Draft
from unflip.study.experiment import BASELINE, Experiment
from unflip.study.pack import Pack
from unflip.study.summary import Paper

# ResNet-18 on one H200: results/training-speed/imagenet.log
IMAGENET = Pack(
    "ImageNet",
    "imagenet.pack",
    "IMAGENET_FOLDER",
    training_images=1_281_167,
    classes=1000,
    images_per_second=18_800,
    slower={"lns": 1.5},
)
IMAGENETTE = replace(
    IMAGENET,
    name="Imagenette",
    file="imagenette.pack",
    folder="IMAGENETTE_FOLDER",
    training_images=9_469,
    classes=10,
)
TEACHER = "teacher"
# their papers have one shortcut per convolution
BIREAL = "model.variant=bireal"
MAPPING = ("method.alpha=0.0", "allow_no_flips=true")
FROZEN = ("method.labels=frozen", "allow_no_flips=true")  # as in the study of CIFAR-10

# Top-1 and top-5 in percent. Without another source: the LNS paper's tables. Figures that could not be checked are left
# out.
RESNET18 = {
    "binarynet": Paper(42.2, top5=67.1),
    "bwn": Paper(60.8, top5=83.0),
    "xnor": Paper(51.2, top5=73.2),
    "tbn": Paper(55.6, top5=79.0),
    "hwgq": Paper(59.6, top5=82.2),
    "quantnet": Paper(53.6, top5=75.3),
    "bop": Paper(54.2, top5=77.2),
    "pcnn": Paper(57.3, top5=80.0),
    "gbcn": Paper(57.8, top5=80.9),
    "irnet": Paper(58.1, top5=80.0),
    "bbg": Paper(59.4),  # Shen et al., ICASSP 2020
    BASELINE: Paper(52.5, top5=76.7),
    "finetune": Paper(52.8),
    "lns": Paper(53.1, top5=77.0),
    "bireal": Paper(56.4, top5=79.5),
    "bireal-prelu": Paper(59.0, top5=81.3),
    "bireal-prelu-lns": Paper(59.4, top5=81.7),
    "adabin": Paper(63.1, top5=84.3),  # Tu et al., ECCV 2022
    "reactnet": Paper(65.9),  # Liu et al., ECCV 2020
}
ALEXNET = {
    "bwn": Paper(56.8, top5=79.4),  # Rastegari et al., ECCV 2016
    "xnor": Paper(44.2, top5=69.2),  # Rastegari et al., ECCV 2016
    BASELINE: Paper(43.6),  # Zhou et al., 2016; the LNS paper's own baseline has 43.9
    "lns": Paper(44.4),
}


def _common(source: str, method: str, label: str, *changes: str, options: str = "") -> Draft:
    """A method of the paper's tables on the common recipe."""
    chosen = f"method={{name: {method}{options}}}"
    return Draft(method, f"{label} (common recipe)", source, (chosen, *changes))


def _resnet18(images: str) -> tuple[Draft, ...]:
    def shipped(name: str) -> str:
        return f"{images}-resnet18-{name}"

    dorefa = shipped("dorefa")
    one_base = ", weight_bases: 1, input_bases: 1"
    return (
        Draft("float", "float", shipped("float")),
        _common(dorefa, "binarynet", "BinaryNet"),
        _common(dorefa, "bwn", "BWN, float inputs"),
        _common(dorefa, "xnor", "XNOR-Net"),
        _common(dorefa, "abc", "ABC-Net, one base", options=one_base),
        _common(dorefa, "tbn", "TBN, ternary inputs"),
        _common(dorefa, "hwgq", "HWGQ, 2-bit inputs"),
        _common(dorefa, "quantnet", "Quantization Networks"),
        _common(dorefa, "bop", "Bop", BIREAL),
        _common(dorefa, "pcnn", "PCNN", BIREAL),
        _common(dorefa, "gbcn", "GBCN", BIREAL),
        _common(dorefa, "irnet", "IR-Net", BIREAL),
        _common(dorefa, "bbg", "BBG"),
        Draft(BASELINE, "DoReFa-Net", dorefa),
        Draft("finetune", "fine-tuning of DoReFa-Net", shipped("finetune"), start=BASELINE),
        Draft("lns", "LNS on DoReFa-Net", shipped("lns"), start=BASELINE),
        Draft("bireal", "Bi-Real Net", shipped("bireal")),
        Draft("bireal-prelu", "Bi-Real Net + PReLU", shipped("bireal-prelu")),
        Draft(
            "bireal-prelu-lns",
            "LNS on Bi-Real Net + PReLU",
            shipped("bireal-prelu-lns"),
            start="bireal-prelu",
        ),
        Draft("adabin", "AdaBin", shipped("adabin")),
        Draft(TEACHER, "ResNet-34, float (the teacher)", f"{images}-resnet34-teacher", once=True),
        Draft(
            "reactnet-step1",
            "ReActNet, first step: float weights",
            shipped("reactnet-step1"),
            teacher=TEACHER,
        ),
        Draft(
            "reactnet",
            "ReActNet",
            shipped("reactnet"),
            start="reactnet-step1",
            teacher=TEACHER,
        ),
    )


def _alexnet(images: str) -> tuple[Draft, ...]:
    def shipped(name: str) -> str:
        return f"{images}-alexnet-{name}"

    xnor = shipped("xnor")
    return (
        Draft("float", "float", shipped("float")),
        _common(xnor, "binarynet", "BinaryNet"),
        _common(xnor, "bwn", "BWN, float inputs"),
        Draft("xnor", "XNOR-Net", xnor),
        Draft(BASELINE, "DoReFa-Net", shipped("dorefa")),
        Draft("finetune", "fine-tuning", shipped("dorefa-finetune"), start=BASELINE),
        Draft("lns", "LNS", shipped("dorefa-lns"), start=BASELINE),
    )


def _ablation(images: str) -> tuple[Draft, ...]:
    def shipped(name: str) -> str:
        return f"{images}-resnet18-{name}"

    lns, prelu = shipped("lns"), "bireal-prelu"
    return (
        Draft(BASELINE, "baseline (DoReFa)", shipped("dorefa")),
        Draft("finetune", "fine-tuning", shipped("finetune"), start=BASELINE),
        Draft("mapping", "mapping without noisy supervision", lns, MAPPING, start=BASELINE),
        Draft("lns", "LNS", lns, start=BASELINE),
        Draft("lns-frozen", "LNS, labels frozen", lns, FROZEN, start=BASELINE),
        Draft(prelu, "Bi-Real Net + PReLU", shipped(prelu)),
        Draft(f"{prelu}-finetune", "… fine-tuning", shipped(f"{prelu}-finetune"), start=prelu),
        Draft(f"{prelu}-lns", "… LNS", shipped(f"{prelu}-lns"), start=prelu),
    )


def _strongest(images: str) -> tuple[Draft, ...]:
    """Our strongest ±1 network, in two steps as ReActNet."""
    name = f"{images}-resnet18-strongest"
    first = Draft(
        "strongest-step1",
        "the strongest, first step: float weights",
        f"{name}-step1",
        teacher=TEACHER,
    )
    return first, Draft("strongest", "the strongest", name, start=first.name, teacher=TEACHER)


def _published(drafts: Sequence[Draft], figures: Mapping[str, Paper]) -> tuple[Draft, ...]:
    return tuple(replace(draft, paper=figures.get(draft.name)) for draft in drafts)


def _experiments(images: str, pack: Pack, seeds: int) -> list[Experiment]:
    """``images`` is how the names of the recipes and of the studies begin."""
    known = pack is IMAGENET
    ours = () if known else _strongest(images)
    resnet18 = _published((*_resnet18(images), *ours), RESNET18 if known else {})
    alexnet = _published(_alexnet(images), ALEXNET if known else {})
    ablation = _published(_ablation(images), RESNET18 if known else {})
    beside = ", the papers' figures beside ours" if known else ": the arms of the paper's table"
    return [
        Experiment(
            f"{images}-resnet18",
            f"1-bit ResNet-18 on {pack.name}, method by method",
            f"ResNet-18 on {pack.name}{beside}; also AdaBin, and ReActNet in two steps with a teacher.",
            resnet18,
            reference=BASELINE,
            pack=pack,
            seeds=seeds,
        ),
        Experiment(
            f"{images}-alexnet",
            f"1-bit AlexNet on {pack.name}, method by method",
            f"AlexNet on {pack.name}{beside}.",
            alexnet,
            reference=BASELINE,
            pack=pack,
            seeds=seeds,
        ),
        Experiment(
            f"{images}-ablation",
            f"Mapping and noisy supervision on {pack.name}, each added in turn",
            f"Fine-tuning, mapping without noisy supervision, and LNS on ResNet-18 and {pack.name}; from DoReFa-Net "
            "and from Bi-Real Net + PReLU.",
            ablation,
            reference="finetune",
            pack=pack,
            seeds=seeds,
        ),
    ]


_ALL = (*_experiments("imagenet", IMAGENET, 1), *_experiments("imagenette", IMAGENETTE, 3))
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}

"""AutoBNN: Searching for Accurate Binary Neural Architectures.

Shen, Han, Xu, Wang, ICCV Workshops 2019, arXiv:1909.07378.

Binary features carry less information than the same number of float features, so a binary network needs other widths
than its float twin. The paper keeps the binarization and searches the widths: ``unflip study autobnn``.

Weights     Q = E(|W|) · sign(W), the mean over the whole layer; ∂L/∂W = ∂L/∂Q
Inputs      B = round(clip(x, 0, 1)), ∂L/∂x = ∂L/∂B · 1[0 ≤ x ≤ 1]   (both as DoReFa-Net; inputs="pm1" as there)
            The 1×1 convolutions of ResNet's shortcuts are binary too, as in the authors' code
Encoding    a factor on the channels of each part of the network, from {1/2, 1, 2, 3, 4}: the option ``widths`` of
            resnet20, resnet18 (one per stage) and vgg_small (one per convolution)
Constraint  FLOPs (unflip.cost) ≤ budget · FLOPs of the network without ``widths``. In a candidate above the budget,
            factors drawn at random are lowered one step at a time until it fits: every trained candidate fits
Fitness     accuracy on held-out training images after a short training
First       the widest network with one factor throughout that fits; the others are random
Crossover   each factor comes from one of two parents; a parent is the fitter of two drawn at random
Mutation    each factor is redrawn with a small probability
Selection   the fittest of parents and children survive, so the best never gets worse

Verified with the authors' code: the binarization, that the stem takes the first stage's factor, and the factors of the
networks they found, for example [0.5, 2, 1, 1, 1, 0.5] (VGG-Auto-A), whose values are our candidates.
Not verified: we had only the introduction of the paper, and the code does not contain the search. Population,
generations, probabilities, operators and the form of the constraint are our choices. The authors' ResNet-18 also has a
factor for the channels inside each block (12 numbers). Ours has one per stage: with a shortcut around each convolution
(Bi-Real) there are no channels inside a block. Channels are multiples of 8 here.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from unflip.methods.base import InputBinarizer, Method, WeightBinarizer
from unflip.methods.dorefa import UnitInterval
from unflip.methods.pieces import ClippedSign, LayerMeanSign
from unflip.methods.registry import register


@register("autobnn")
@dataclass(frozen=True)
class AutoBNN(Method):
    """DoReFa's binarization, for networks whose widths are searched (`unflip study autobnn`)."""

    inputs: Literal["01", "pm1"] = "01"

    @property
    def binary_downsample(self) -> bool:
        return True

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return LayerMeanSign()

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        return ClippedSign() if self.inputs == "pm1" else UnitInterval(bits=1)

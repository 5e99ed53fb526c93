"""AutoBNN: Searching for Accurate Binary Neural Architectures.

Shen, Han, Xu, Wang, ICCV Workshops 2019, arXiv:1909.07378.

Binary features tell less than float ones of the same number, so a binary network wants other widths than its float
twin. The paper leaves the binarization as it is and searches the widths: ``unflip study autobnn``.

Weights     Q = E(|W|) · sign(W), the mean over the whole layer; ∂L/∂W = ∂L/∂Q
Inputs      B = round(clip(x, 0, 1)), ∂L/∂x = ∂L/∂B · 1[0 ≤ x ≤ 1]   (both as DoReFa-Net; inputs="pm1" as there)
            The 1×1 convolutions of ResNet's shortcuts are binary too, as in the authors' code
Encoding    a factor on the channels of each part of the network, from {1/2, 1, 2, 3, 4}: the option ``widths`` of
            resnet20, resnet18 (one a stage) and vgg_small (one a convolution)
Constraint  FLOPs (unflip.cost) ≤ budget · FLOPs of the network without ``widths``. A candidate above it has factors
            drawn at random lowered, a step at a time, until it fits: all that are trained fit
Fitness     accuracy on held-out training images after a short training
First       the widest network of one factor throughout that fits, the others at random
Crossover   each factor from one of two parents; a parent is the fitter of two drawn at random
Mutation    each factor is drawn anew with a small probability
Selection   the fittest of parents and children live on, so the best never gets worse

What was verified: from the authors' code the binarization, that the stem takes the first stage's factor, and the
factors of the networks they found, for example [0.5, 2, 1, 1, 1, 0.5] (VGG-Auto-A), whose values are our candidates.
What could not be: of the paper's text only the introduction was at hand, and the search itself is not in the code.
Population, generations, probabilities, operators and the form of the constraint are ours. The authors' ResNet-18 also
has a factor for the channels inside each block (12 numbers); ours has one a stage, because with a shortcut round each
convolution (Bi-Real) there are no channels inside a block. Channels are multiples of 8 here.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from unflip.methods.base import InputBinarizer, Method, WeightBinarizer, register
from unflip.methods.dorefa import LayerMeanSign, PlusMinusOne, UnitInterval


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
        return PlusMinusOne() if self.inputs == "pm1" else UnitInterval(bits=1)

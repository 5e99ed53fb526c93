"""Kernels for training, almost all for GPUs. They are used inside a scope, on the modules of the given models only.

scope.py       Kernels: checks the kernels, attaches them to models, and restores everything on exit
check.py       compares every kernel with torch on the network at hand, before it is used
sign_conv/     the binary convolution: sign, product and straight-through gradient (Triton and CUDA C++)
stem_conv.py   a network's first convolution, of images, by the kernels of sign_conv
norm/          PReLU, BatchNorm and shortcut after a binary convolution
prelu.py       the gradient of PReLU on a CPU, by vectorized operations
mapping.py     the weights that networks predict (LNS): computed once per step, and several layers together
mapping_conv/  the kernels for those networks, for layers of up to 128 channels
mapping_products/  the same for wider layers, as matrix products on tensor cores
passed.py      remembers which kernels have passed on this machine
tuning.py      measures blocks and kernels, and chooses the fastest
nvrtc.py       compiles CUDA C++ at run time
attach.py      attributes that a module has only inside a scope

The package knows only ``unflip.layers`` and ``unflip.methods``. There are no process-wide switches: the number of
networks that train side by side, and whether CUDA C++ may be used, are arguments of every operator.

Public: :class:`Kernels`, :class:`Trial`, :func:`prediction_kernels`, :func:`shared_predictions`.
"""

from unflip.kernels.check import Trial
from unflip.kernels.mapping import shared_predictions
from unflip.kernels.scope import Kernels, prediction_kernels

__all__ = ["Kernels", "Trial", "prediction_kernels", "shared_predictions"]

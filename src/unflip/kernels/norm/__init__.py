"""PReLU, BatchNorm and shortcut after a binary convolution.

operator.py         the operators as torch knows them, and how the kernels are launched
triton_kernels.py   the Triton kernels, and the formulas of the gradients
layer.py            a model's layers by these operators
"""

"""The binary convolution: sign, convolution and straight-through gradient.

operator.py         the operators as torch knows them, the layers they cover, and the choice of kernels
layer.py            a binary layer's product by these operators
triton_kernels.py   the Triton kernels; triton_launch.py tunes and launches them
cuda_kernels.py     launches the CUDA C++ kernels of sign_conv.cu and sign_conv_wgrad.cu
"""

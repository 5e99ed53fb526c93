"""LNS's mapping networks of all 3×3 layers at once.

operator.py         the operators as torch knows them, the layers they cover, and how the kernels are launched
plan.py             sizes and offsets of the flat tensors
triton_kernels.py   the Triton kernels
"""

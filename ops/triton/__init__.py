"""Triton kernels: the fallback on a GPU, and what the HIP kernels are compared with."""

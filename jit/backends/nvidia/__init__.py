"""NVIDIA: nvcc, what ptxas says of a kernel, libcudart."""

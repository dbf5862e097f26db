"""Kernels for GPUs in Triton, a file per idea. Each takes the arguments of its twin in torch."""

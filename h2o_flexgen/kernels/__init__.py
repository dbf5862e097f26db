"""Kernels in C for the CPU, each beside a twin in torch that it equals and that does its work where none was built."""

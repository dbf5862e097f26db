"""C kernels for the CPU, each beside an equal twin in torch that does its work where none was built."""

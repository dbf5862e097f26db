"""The formats in which values are stored, and the table of the kernels that read them. Nothing here computes."""

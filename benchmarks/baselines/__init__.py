"""The systems that benchmarks/compare.py holds side by side: one file each, all asked and answering in the same words."""

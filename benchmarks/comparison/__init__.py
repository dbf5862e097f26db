"""What benchmarks/compare.py is made of."""

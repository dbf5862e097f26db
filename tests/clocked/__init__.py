"""A pretended accelerator that checks whether anything has made every access happen behind those that it conflicts with."""

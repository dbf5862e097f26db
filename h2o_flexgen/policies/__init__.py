"""Policies say, as data, which tokens a KV cache keeps. Nothing here imports torch."""

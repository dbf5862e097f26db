"""Sampling: what is asked of a completion, how its tokens are picked, and what is returned."""

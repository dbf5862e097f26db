"""Stores of a run's data: weights, KV and hidden states."""

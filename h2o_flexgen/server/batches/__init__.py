"""Batches: files of requests that clients leave with a server. It computes them when no client waits,
and keeps the results."""

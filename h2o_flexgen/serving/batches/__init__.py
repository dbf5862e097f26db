"""Batches: files of requests that clients leave with a server, which computes them when nobody
waits, and keeps what came of it."""

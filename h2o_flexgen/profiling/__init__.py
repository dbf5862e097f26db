"""Profiling: everything that measures a machine."""

"""Calibration: what each KV head of a model needs, and what its tokens are worth, measured on texts."""

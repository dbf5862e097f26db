"""Calibration: what each KV head of a model needs to keep, measured by having the model read texts twice."""

"""The file of a probe: safetensors with a weight (KV heads, width) and a bias (KV heads,) of every layer with KV, named as in
published probes, and in the metadata the model's name and what the probe was fitted to. Written and read here alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from h2o_flexgen.core.files import local_path, read_document, write_bytes
from h2o_flexgen.core.hints import reason
from h2o_flexgen.core.probe import Floats, Probe

FILE = "probe.safetensors"  # its name where it lies beside the model that it was fitted to
WEIGHT, BIAS = "layers.{}.weight", "layers.{}.bias"
NAME = re.compile(r"layers\.(\d+)\.(weight|bias)")
UNKNOWN = "an unnamed model"  # published probes do not name their model
OF_CALIBRATE = "give a file that calibrate wrote"


def write_probe(probe: Probe, path: Path) -> None:
    tensors: dict[str, Floats] = {}
    for layer, (weight, bias) in enumerate(zip(probe.weights, probe.biases)):
        tensors |= {WEIGHT.format(layer): weight, BIAS.format(layer): bias}
    write_bytes(path, save(tensors, metadata={"model": probe.model, "source": probe.source}))


def read_probe(path: str | os.PathLike[str]) -> Probe:
    """The probe of a file; whatever is wrong with it is said in a line that begins with its name."""
    place = local_path(path)
    file = str(place)
    try:
        tensors = dict(deserialize(read_document(place)))
        with safe_open(file, framework="numpy") as opened:
            said = opened.metadata() or {}
    except OSError as error:
        raise ValueError(f"probe {file} cannot be read ({reason(error)})") from error
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file ({error}); {OF_CALIBRATE}") from error
    try:
        weights, biases = _stacked(tensors)
        return Probe(said.get("model", UNKNOWN), said.get("source", ""), weights, biases, file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _stacked(tensors: Mapping[str, Mapping[str, Any]]) -> tuple[Floats, Floats]:
    if other := next((name for name in tensors if not NAME.fullmatch(name)), None):
        raise ValueError(f"it has {other}, and a linear probe has a weight and a bias for each layer; {OF_CALIBRATE}")
    layers = max(1, -(-len(tensors) // 2))  # a higher number means that layers before it are missing
    wanted = [form.format(layer) for form in (WEIGHT, BIAS) for layer in range(layers)]
    if missing := next((name for name in wanted if name not in tensors), None):
        raise ValueError(f"{missing} is missing; {OF_CALIBRATE}")
    values = [_floats(name, tensors[name]) for name in wanted]
    if len({one.shape for one in values[:layers]}) > 1 or len({one.shape for one in values[layers:]}) > 1:
        raise ValueError(f"its layers have different shapes; {OF_CALIBRATE}")
    return np.stack(values[:layers]), np.stack(values[layers:])


def _floats(name: str, tensor: Mapping[str, Any]) -> Floats:
    data, shape, dtype = tensor["data"], tensor["shape"], tensor["dtype"]
    if dtype not in ("F32", "F16", "BF16"):
        raise ValueError(f"{name} is {dtype}; known are F32, F16 and BF16")
    if dtype == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, np.float32 if dtype == "F32" else np.float16).astype(np.float32)
    return np.asarray(values.reshape(shape), np.float32)

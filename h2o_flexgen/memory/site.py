"""The site that this process is: its kind of device, its library of kernels, its threads."""

from __future__ import annotations

import torch

from h2o_flexgen.core.site import Site
from h2o_flexgen.formats.kernel_table import CPU, Processor
from h2o_flexgen.kernels.native import processor


def site_of(device: str, accelerator: bool, writes_weights: bool = False) -> Site:
    """`device`: its kind. An accelerator that computes as a CPU has none of the kernels in C."""
    own = Processor(device) if accelerator and device == CPU else processor(device)
    return Site(accelerator, writes_weights, own, torch.get_num_threads())

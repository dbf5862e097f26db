"""The site that this process is: its kind of device, its library of kernels, its threads."""

from __future__ import annotations

import torch

from h2o_flexgen.core.site import Site
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.table import Processor


def site_of(device: str, accelerator: bool, writes_weights: bool = False) -> Site:
    """`device`: its kind. Kernels in C are for CPUs, so an accelerator's site has none of them."""
    return Site(accelerator, writes_weights, Processor(device) if accelerator else processor(device), torch.get_num_threads())

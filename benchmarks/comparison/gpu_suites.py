"""What is compared on a GPU that is made smaller: 16 GB as a T4 has them, and 24 GB. Data, and nothing else.

Weights are made up in memory: no file is written, and all of them fit in host memory. Plans of this engine are given, so that
nothing is searched while a GPU waits; they fit into the memory of the suite and 128 GB of the host, with about as many tokens
of prompts at once as there is room for. Rows of others are counted: as many as are expected to fit, fewer where they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.comparison.suites import (
    FOUR_BITS,
    H2O,
    KV_IN_4_BITS,
    ROWS,
    SUITES,
    Case,
    Contender,
    Load,
    Suite,
    own,
)
from h2o_flexgen.core.site import HOST

GB = 10**9
OPT_6, OPT_30, GPT_OSS = "facebook/opt-6.7b", "facebook/opt-30b", "openai/gpt-oss-120b"
BARRIER = {"schedule": "flexgen_barrier"}
LONG_PROMPTS, LONG_ANSWERS, OF_EXPERTS = Load(512, 32), Load(64, 256), Load(64, 64)
HOST_BYTES = 128 * GB  # for which the plans are made
FIRST = 5  # 4 bits and h2o, Accelerate, DeepSpeed, FlexGen, and what computes as these do
FEW_STEPS = 2  # of systems whose steps are alike, and may take ten seconds
KV_ON_GPU = {"percent": (0, 100, 100, 0, 100, 0)}
ALL_ON_GPU = {"percent": (100, 0, 100, 0, 100, 0), "overlap": False}  # as its authors ran OPT-6.7B
# as its authors ran OPT-30B, in batches of 48 rows: KV is attended by the processor; more rows take longer and bring nothing
KV_IN_HOST = {"cpu_cache_compute": True, "gpu_batch_size": 48, "most_rows": 192}
MOSTLY_HOST, ALL_IN_HOST = {"percent": (20, 80, 0, 100, 0, 100)}, {"percent": (0, 100, 0, 100, 0, 100)}
PACKED = {"compress_weight": True}
KEPT, LEAST_WEIGHTS = "20 % of the KV", "weights in 4 bits"
PlansByCase = Mapping[Case, Mapping[str, Any]]


def plan(percent: tuple[int, ...], batch: int, batches: int, **options: Any) -> Mapping[str, Any]:
    return {"percent": percent, ROWS: batch * batches, "rows_at_once": batch, **options}


L, A, E = str(LONG_PROMPTS), str(LONG_ANSWERS), str(OF_EXPERTS)
ON_HOST = {"attend_on": HOST}
RESIDENT = (100, 0, 100, 0, 100, 0)
# the least that a GPU of so many bytes is asked for: of a T4 or an RTX A5000 the driver has taken a part
SMALL: Mapping[int, PlansByCase] = {
    16 * GB: {
        (OPT_6, L): plan(RESIDENT, 256, 1, prefill_tokens=16384),
        (OPT_6, A): plan(RESIDENT, 768, 1, prefill_tokens=4096),
        (OPT_30, L): plan((55, 45, 0, 100, 100, 0), 128, 2, prefill_tokens=2048),
        (OPT_30, A): plan((58, 42, 0, 100, 100, 0), 512, 1, prefill_tokens=4096),
    },
    24 * GB: {
        (OPT_6, L): plan(RESIDENT, 512, 1, prefill_tokens=16384),
        (OPT_6, A): plan(RESIDENT, 1024, 1, prefill_tokens=16384),
        (OPT_30, L): plan((92, 8, 100, 0, 100, 0), 96, 1, buffers=3),
        (OPT_30, A): plan((90, 10, 100, 0, 100, 0), 192, 1, buffers=3),  # with room for graphs
    },
}
SMALL_ON_HOST: Mapping[int, PlansByCase] = {
    16 * GB: {
        (OPT_30, L): plan((46, 54, 0, 100, 100, 0), 128, 2, prefill_tokens=8192),
        (OPT_30, A): plan((4, 96, 11, 89, 100, 0), 512, 4, prefill_tokens=8192),
    },
    24 * GB: {(OPT_30, A): plan((8, 92, 24, 76, 100, 0), 512, 4, prefill_tokens=8192)},
}
FULL: Mapping[int, PlansByCase] = {
    16 * GB: {
        (OPT_6, L): plan(RESIDENT, 4, 1, prefill_tokens=4096),
        (OPT_6, A): plan(RESIDENT, 8, 1),
        (OPT_30, L): plan((16, 84, 0, 100, 100, 0), 40, 2, prefill_tokens=2048),
        (OPT_30, A): plan((14, 86, 0, 100, 100, 0), 128, 1, prefill_tokens=2048),
    },
    24 * GB: {
        (OPT_6, L): plan(RESIDENT, 24, 1, prefill_tokens=8192),
        (OPT_6, A): plan(RESIDENT, 48, 1, prefill_tokens=4096),
        (OPT_30, L): plan((25, 75, 0, 100, 100, 0), 96, 1, prefill_tokens=2048),
        (OPT_30, A): plan((31, 69, 0, 100, 100, 0), 48, 3, prefill_tokens=2048),
    },
}
FULL_ON_HOST: Mapping[int, PlansByCase] = {
    16 * GB: {
        (OPT_30, L): plan((14, 86, 0, 100, 100, 0), 40, 2, prefill_tokens=4096),
        (OPT_30, A): plan((18, 82, 0, 100, 100, 0), 48, 3),
    },
    24 * GB: {
        (OPT_30, L): plan((28, 72, 0, 100, 100, 0), 48, 2, prefill_tokens=4096),
        (OPT_30, A): plan((30, 70, 0, 100, 100, 0), 48, 3, prefill_tokens=2048),
    },
}
EXPERTS: PlansByCase = {(GPT_OSS, E): plan((24, 76, 0, 100, 100, 0), 512, 4, prefill_tokens=4096)}


def on_gpu(device_bytes: int) -> tuple[Contender, ...]:
    """The first is the one that the others are held against; those that tell most come first, as time may not do for all."""
    small, full = SMALL[device_bytes], FULL[device_bytes]
    return (
        own("h2o_flexgen", H2O, FOUR_BITS, cases=small),
        Contender("accelerate", "accelerate", steps=FEW_STEPS),
        Contender("deepspeed", "deepspeed", {"tier": "cpu"}, steps=FEW_STEPS),
        Contender("flexgen", "flexgen", KV_ON_GPU),
        own("16 bits, full KV", cases=full),
        own("flexgen_barrier, 16 bits, full KV", BARRIER, cases=full),
        Contender("transformers", "transformers"),
        own("attended by the processor", H2O, FOUR_BITS, ON_HOST, cases=SMALL_ON_HOST[device_bytes]),
        own("16 bits, full KV, attended by the processor", ON_HOST, cases=FULL_ON_HOST[device_bytes]),
        Contender("flexgen, all on the GPU", "flexgen", ALL_ON_GPU),
        Contender("h2o original", "h2o original", KV_ON_GPU, computes=KEPT),
        Contender(
            "h2o original, 4 bits, all on the GPU",
            "h2o original",
            {**ALL_ON_GPU, **PACKED},
            computes=f"{LEAST_WEIGHTS}, {KEPT}",
        ),
        Contender("flexgen, KV in host memory", "flexgen", {**KV_IN_HOST, **MOSTLY_HOST}),
        Contender("h2o original, KV in host memory", "h2o original", {**KV_IN_HOST, **ALL_IN_HOST}, computes=KEPT),
        Contender("flexgen, 4 bits", "flexgen", {**KV_ON_GPU, **PACKED, "compress_cache": True}, computes="4 bits"),
    )


def experts_on_gpu() -> tuple[Contender, ...]:
    return (
        own("h2o_flexgen", H2O, KV_IN_4_BITS, cases=EXPERTS),
        own("full KV", cases=EXPERTS),
    )


def _suite(device_bytes: int) -> Suite:
    return Suite(
        (OPT_6, OPT_30),
        contenders=partial(on_gpu, device_bytes),
        device="cuda",
        device_bytes=device_bytes,
        loads=(LONG_PROMPTS, LONG_ANSWERS),
        made_up=True,
        dtype="float16",
        first=FIRST,
    )


GPU_SUITES: Mapping[str, Suite] = {
    "gpu-16gb": _suite(16 * GB),
    "gpu-24gb": _suite(24 * GB),
    "gpu-24gb-experts": Suite(
        (GPT_OSS,),
        contenders=experts_on_gpu,
        device="cuda",
        device_bytes=24 * GB,
        loads=(OF_EXPERTS,),
        rows=(512, 2048),
        made_up=True,
    ),
}
ALL_SUITES: Mapping[str, Suite] = {**SUITES, **GPU_SUITES}

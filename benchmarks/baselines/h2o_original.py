"""H2O's own engine, which its authors made of FlexGen: heavy hitters and recent tokens of OPT in float16, on one CUDA device.

It is in no package: it is a folder of sources, which the option "sources" names. Never run by us: written after its sources. It
keeps what it holds of the prompt, so that `kv_budget` of prompt and generation becomes a share of the prompt.

Options: those of FlexGen, "sources", and "kv_budget" (0.2).
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.baselines.flexgen_original import Room, answer_of, policy_of, unsuited
from benchmarks.baselines.installed import missing_package
from benchmarks.baselines.request import Answer, Ready, Request

ENGINE = Path("flexgen") / "flex_opt.py"
HOW = "git clone https://github.com/FMInference/H2O, and give --h2o-original H2O/h2o_flexgen"
BUDGET = 0.2
LEAST_HEAVY = 2  # with one it crashes


class System:
    loads_within_cap = True

    def missing(self, request: Request) -> str | None:
        sources = request.options.get("sources")
        if reason := unsuited(request):
            return reason.replace("FlexGen", "H2O's engine")
        if sources is None:
            return f"it is in no package: {HOW}"
        if not (Path(sources) / ENGINE).is_file():
            return f"{sources} has no {ENGINE}: {HOW}"
        if int(request.prompt_len * heavy_share(request)) < LEAST_HEAVY:
            return f"of prompts of {request.prompt_len} tokens it would keep less than {LEAST_HEAVY} heavy hitters"
        return missing_package("attr", "psutil")

    def rows_to_try(self, request: Request) -> tuple[int, ...]:
        return (_Room(request).rows(),)

    def run(self, request: Request, ready: Ready) -> Answer:
        sys.path.insert(0, request.options["sources"])  # before a FlexGen that is installed
        policy = policy_of(request, hh_ratio=heavy_share(request), hh_all=True)
        return answer_of(request, ready, policy, {"h2o original": "sources"})


class _Room(Room):
    eager_values = 8  # its softmax is in float32

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.kept_share = request.options.get("kv_budget", BUDGET)


def heavy_share(request: Request) -> float:
    """Of a prompt; it keeps as many recent tokens besides."""
    budget: float = request.options.get("kv_budget", BUDGET)
    return budget / 2 * (request.prompt_len + request.gen_len) / request.prompt_len

"""What is compared on what: models, memory, workloads, and the systems with their options. Data, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from h2o_flexgen.formats.kernel_table import EXACT, INT8
from h2o_flexgen.formats.table import PLAIN

GIB = 1 << 30


Case = tuple[str, str]  # a model, and a load in words
ROWS = "rows"


@dataclass(frozen=True, eq=False)
class Contender:
    """A system under a name of its own: the engine takes part several times, with one thing switched off in turn."""

    name: str
    system: str  # a key of baselines.systems.SYSTEMS
    options: Mapping[str, Any] = field(default_factory=dict)
    capped: bool = True
    computes: str = "exactly, in 16 bits"
    most_rows: int | None = None  # where more would be faster still, but take too long to measure
    halved: bool = True  # tried with fewer rows than its planner says would fit, too
    dtype: str | None = None  # that it computes in, if not in the one that is asked for
    codec: str = PLAIN  # one of ours with as many bits as its weights have
    arithmetic: str = EXACT  # or INT8: which of the processor's peaks bounds it
    steps: int | None = None  # that are timed, where each takes so long that fewer have to do
    cases: Mapping[Case, Mapping[str, Any]] = field(default_factory=dict)  # options for a model and load alone, "rows" too

    def options_for(self, case: Case) -> dict[str, Any]:
        return {name: value for name, value in {**self.options, **self.cases.get(case, {})}.items() if name != ROWS}

    def rows_for(self, case: Case) -> int | None:
        """The rows of its plan for this case, if it has one."""
        return self.cases.get(case, {}).get(ROWS)


@dataclass(frozen=True)
class Load:
    prompt_len: int
    gen_len: int

    def __str__(self) -> str:
        return f"{self.prompt_len}+{self.gen_len}"

    @classmethod
    def of(cls, text: str) -> Load:
        prompt, plus, generated = text.partition("+")
        if not (plus and prompt.isdigit() and generated.isdigit() and int(prompt) > 0 and int(generated) > 1):
            raise ValueError(
                f"workload {text!r} is not understood; write it like 64+256: tokens of a prompt, tokens to generate"
            )
        return cls(int(prompt), int(generated))


# -- the engine, and the engine with one thing switched off ------------------------------------------------------------------

FULL_KV_ROWS = 64  # with KV on disk a thousand rows may fit; their prompts alone take an hour
ZIGZAG = {"sep_layer": False, "buffers": 3}
BARRIER = {"sep_layer": False, "schedule": "flexgen_barrier"}
ROW_BY_ROW = {"sep_layer": False, "schedule": "row_by_row", "rows_at_once": 1 << 20}  # all rows are one batch
H2O = {"kv_policy": "h2o", "kv_budget": 0.2}
FOUR_BITS = {"weight_codec": "group4", "kv_codec": "group4"}
WEIGHTS_IN_4_BITS = {"weight_codec": "group4"}
KV_IN_4_BITS = {"kv_codec": "group4"}
INT8_PRODUCTS = {"compute": INT8}
LOSSY = {
    "4 bits": FOUR_BITS,
    "weights in 4 bits": WEIGHTS_IN_4_BITS,
    "KV in 4 bits": KV_IN_4_BITS,
    "int8": INT8_PRODUCTS,
    "20 % of the KV": H2O,
}
HOST_KV: Mapping[str, Any] = {"percent": (0, 0, 0, 100, 0, 100)}
DISK_KV = {"percent": (0, 0, 0, 0, 0, 100), "rows_at_once": 32}  # a batch is what of the KV is in memory at a time
RESIDENT = {"percent": (0, 100, 0, 100, 0, 100), "sep_layer": False, "rows_at_once": 1 << 20}  # all rows are one batch
LLAMA_CPP = (
    Contender(
        "llama.cpp, Q4_0",
        "llama.cpp",
        {"stored": "q4_0"},
        computes="weights in 4 bits, int8",
        codec="group4",
        arithmetic=INT8,
    ),
    Contender("llama.cpp, bf16", "llama.cpp", {"stored": "bf16"}),
)


def own(
    name: str,
    *options: Mapping[str, Any],
    halved: bool = False,
    most_rows: int | None = None,
    cases: Mapping[Case, Mapping[str, Any]] | None = None,
) -> Contender:
    """This engine, with options of which each mapping stands for something that it does."""
    merged = {key: value for each in options for key, value in each.items()}
    lossy = [words for words, option in LOSSY.items() if any(one is option for one in options)]
    computes = ", ".join(lossy) or Contender.computes
    codec, arithmetic = merged.get("weight_codec", PLAIN), merged.get("compute", EXACT)
    more = {"computes": computes, "most_rows": most_rows, "halved": halved, "codec": codec, "arithmetic": arithmetic}
    more |= {"cases": cases or {}}
    return Contender(name, "h2o_flexgen", merged, **more)


def on_cpu() -> tuple[Contender, ...]:
    """The first is the one that the others are held against."""
    return (
        own("h2o_flexgen", ZIGZAG, H2O, FOUR_BITS, HOST_KV, halved=True),
        own("int8", ZIGZAG, H2O, FOUR_BITS, INT8_PRODUCTS, HOST_KV),
        own("without H2O", ZIGZAG, FOUR_BITS, HOST_KV),
        own("without 4 bits", ZIGZAG, H2O, HOST_KV),
        own("without overlap", ZIGZAG, H2O, FOUR_BITS, HOST_KV, {"buffers": 1}),
        own("16 bits, full KV", ZIGZAG, DISK_KV, most_rows=FULL_KV_ROWS),
        own("flexgen_barrier, 16 bits, full KV", BARRIER, DISK_KV, most_rows=FULL_KV_ROWS),
        own("row_by_row, 16 bits, full KV", ROW_BY_ROW, HOST_KV),
        Contender("accelerate", "accelerate"),
        Contender("accelerate, eager attention", "accelerate", {"attention": "eager"}),
        Contender("deepspeed", "deepspeed"),
        Contender("airllm", "airllm"),
        Contender("flexgen", "flexgen"),
        Contender("continuous batching", "continuous batching"),
        *LLAMA_CPP,
        Contender("transformers, no cap", "transformers", capped=False),
        Contender("continuous batching, no cap", "continuous batching", capped=False),
    )


def by_rows() -> tuple[Contender, ...]:
    """The systems of a table by rows, in which everything is in memory and one layer's products are what counts."""
    return (
        own("h2o_flexgen, int8", RESIDENT, WEIGHTS_IN_4_BITS, INT8_PRODUCTS),
        own("h2o_flexgen, 4 bits", RESIDENT, WEIGHTS_IN_4_BITS),
        own("h2o_flexgen, 16 bits", RESIDENT),
        *LLAMA_CPP,
        Contender("transformers, bf16", "transformers"),
        Contender("transformers, fp32", "transformers", dtype="float32", computes="exactly, in fp32"),
        Contender("continuous batching", "continuous batching"),
    )


# -- the suites ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    models: tuple[str, ...]
    caps: tuple[int | None, ...] = (None,)  # bytes of host memory; None: what the machine has
    contenders: Callable[[], tuple[Contender, ...]] = on_cpu
    device: str = "cpu"
    device_bytes: int | None = None
    loads: tuple[Load, ...] = (Load(512, 32), Load(64, 256), Load(512, 512))
    rows: tuple[int, ...] = ()  # all systems are run with these; none: each with its best number
    made_up: bool = False  # no file of weights is written: every system makes them up in memory
    dtype: str = "bfloat16"
    first: int | None = None  # so many systems are run for all models and loads, before the others are; None: all


SUITES: Mapping[str, Suite] = {
    "cpu-small": Suite(("facebook/opt-1.3b",), (3 * GIB // 2,)),
    "cpu": Suite(("facebook/opt-6.7b",), (4 * GIB, 8 * GIB)),
    "processor": Suite(
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",), (12 * GIB,), by_rows, loads=(Load(128, 32),), rows=(1, 8, 32, 128, 512)
    ),
    "llama": Suite(("meta-llama/Meta-Llama-3-8B",), (4 * GIB, 8 * GIB)),
}

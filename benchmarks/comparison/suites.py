"""What is compared on what: models, memory, workloads, and the systems with their options. Data, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30
GB = 10**9


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


@dataclass(frozen=True)
class Suite:
    models: tuple[str, ...]
    caps: tuple[int, ...]  # bytes of host memory
    device: str = "cpu"
    device_bytes: int | None = None
    loads: tuple[Load, ...] = (Load(512, 32), Load(64, 256), Load(512, 512))


SUITES: Mapping[str, Suite] = {
    "cpu-small": Suite(("facebook/opt-1.3b",), (3 * GIB // 2,)),
    "cpu": Suite(("facebook/opt-6.7b",), (4 * GIB, 8 * GIB)),
    "llama": Suite(("meta-llama/Meta-Llama-3-8B",), (4 * GIB, 8 * GIB)),
    "gpu-t4-like": Suite(
        ("facebook/opt-6.7b", "facebook/opt-30b"),
        (100 * GB,),
        device="cuda",
        device_bytes=16 * GB,
        loads=(Load(512, 32), Load(512, 512), Load(512, 1024)),
    ),
}

# -- the engine, and the engine with one thing switched off ------------------------------------------------------------------

FULL_KV_ROWS = 64  # with KV on disk a thousand rows may fit, whose prompts alone take an hour
ZIGZAG = {"sep_layer": False, "slots": 3}
BARRIER = {"sep_layer": False, "schedule": "flexgen_barrier"}
ROW_BY_ROW = {"sep_layer": False, "schedule": "row_by_row", "rows_at_once": 1 << 20}  # all rows are one batch
H2O = {"kv_policy": "h2o", "kv_budget": 0.2}
FOUR_BITS = {"weight_codec": "group4", "kv_codec": "group4"}
LOSSY = {"4 bits": FOUR_BITS, "20 % of the KV": H2O}
HOST_KV = {"percent": (0, 0, 0, 100, 0, 100)}
DISK_KV = {"percent": (0, 0, 0, 0, 0, 100), "rows_at_once": 32}  # a batch is what of the KV is in memory at a time
GPU = {"percent": (0, 100, 0, 100, 100, 0)}  # weights and KV in host memory


def _own(name: str, *options: Mapping[str, Any], halved: bool = False, most_rows: int | None = None) -> Contender:
    merged = {key: value for each in options for key, value in each.items()}
    lossy = [words for words, option in LOSSY.items() if any(one is option for one in options)]
    computes = ", ".join(lossy) or Contender.computes
    return Contender(name, "h2o_flexgen", merged, computes=computes, most_rows=most_rows, halved=halved)


def contenders(device: str) -> tuple[Contender, ...]:
    """The first is the one that the others are held against."""
    memory, all_kv = (GPU, GPU) if device == "cuda" else (HOST_KV, DISK_KV)
    return (
        _own("h2o_flexgen", ZIGZAG, H2O, FOUR_BITS, memory, halved=True),
        _own("without H2O", ZIGZAG, FOUR_BITS, memory),
        _own("without 4 bits", ZIGZAG, H2O, memory),
        _own("without overlap", ZIGZAG, H2O, FOUR_BITS, memory, {"slots": 1}),
        _own("16 bits, full KV", ZIGZAG, all_kv, most_rows=FULL_KV_ROWS),
        _own("flexgen_barrier, 16 bits, full KV", BARRIER, all_kv, most_rows=FULL_KV_ROWS),
        _own("row_by_row, 16 bits, full KV", ROW_BY_ROW, memory),
        Contender("accelerate", "accelerate"),
        Contender("accelerate, eager attention", "accelerate", {"attention": "eager"}),
        Contender("deepspeed", "deepspeed"),
        Contender("airllm", "airllm"),
        Contender("flexgen", "flexgen"),
        Contender("transformers, no cap", "transformers", capped=False),
    )

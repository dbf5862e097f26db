"""Timing: how long a generation took, measured whole or projected from a part of it. What is projected says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.schedule.task import Task

if TYPE_CHECKING:
    from h2o_flexgen.core.workload import Block
    from h2o_flexgen.engine.stats import Stats
    from h2o_flexgen.sampling.output import Completion

FEWER_BATCH_LAYERS = 20  # of the first decode step that are run; the second half of them is what the projection goes by


@dataclass(frozen=True)
class Timing:
    num_prompts: int
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    projected: bool = False

    @property
    def total_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        return _rate(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """The first token of each prompt comes out of prefill."""
        return _rate(self.generated_tokens - self.num_prompts, self.decode_seconds)

    @property
    def tokens_per_second(self) -> float:
        return _rate(self.generated_tokens, self.total_seconds)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def measured(stats: Stats) -> Timing:
    return Timing(stats.num_prompts, stats.prompt_tokens, stats.generated_tokens, stats.prefill_seconds, stats.decode_seconds)


def projected(stats: Stats, generated: int, decode_seconds: Iterable[float]) -> Timing:
    return Timing(stats.num_prompts, stats.prompt_tokens, generated, stats.prefill_seconds, sum(decode_seconds), projected=True)


# -- from the first steps (--cut-gen-len) --------------------------------------------------------------------------------


def from_first_steps(stats: Stats, completions: Sequence[Completion], gen_len: int) -> Timing:
    """Rows that were cut off would have gone on to `gen_len`; those that had finished would not."""
    cut_off = {one.index: one.finish_reason == "length" for one in completions}
    generated = sum(gen_len if cut_off[one.index] else len(one.token_ids) for one in completions)
    decode = [
        extended_seconds(run.step_seconds, gen_len - 1) if _any_of(run.block, cut_off) else run.decode_seconds
        for run in stats.blocks
    ]
    return projected(stats, generated, decode)


def _any_of(block: Block, cut_off: Mapping[int, bool]) -> bool:
    return any(cut_off[row] for batch in block.batches for row in batch.rows)


def extended_seconds(step_seconds: Sequence[float], steps: int) -> float:
    """Of `steps` decode steps, of which the first were measured: a line through these, as the KV grows by a token a step. A
    line that falls is noise, and then every further step takes the mean."""
    count = len(step_seconds)
    middle, mean = (count - 1) / 2, sum(step_seconds) / count
    spread = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * seconds for place, seconds in enumerate(step_seconds)) / spread if spread else 0.0
    growth = max(slope, 0.0)
    return sum(step_seconds) + sum(mean + growth * (place - middle) for place in range(count, steps))


# -- from the first layers of the first decode step (--debug-mode fewer_batch) --------------------------------------------


def after_first_layers(task: Task) -> bool:
    return task.op is Op.COMPUTE and (task.step, task.layer) >= (1, FEWER_BATCH_LAYERS)


def from_first_layers(stats: Stats, ends: Sequence[Mapping[int, float]], layers: int, gen_len: int) -> Timing:
    """Every decode step takes what the first would have taken: that the KV grows is left out."""
    steps = [
        run.step_seconds[0] if run.step_seconds else step_seconds_of(layer_ends, layers) if layer_ends else 0.0
        for run, layer_ends in zip(stats.blocks, ends)
    ]
    return projected(stats, stats.num_prompts * gen_len, (seconds * (gen_len - 1) for seconds in steps))


def step_seconds_of(ends: Mapping[int, float], layers: int) -> float:
    """The second half of the layers that were run, an even number of them: attention and MLP take turns."""
    last = max(ends)
    first = max(min(ends), last - max(2, (last + 1) // 4 * 2))
    return (ends[last] - ends[first]) / (last - first) * layers if last > first else 0.0

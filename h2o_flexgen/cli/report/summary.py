"""The summary of a finished run: the texts, their time, measured whole or projected from a part, FlexGen's five lines, and what
was promised of memory and was not kept."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from h2o_flexgen.cli.report import Entry, entry, noted, told
from h2o_flexgen.cli.terminal import printable
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import TIER_NAMES
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.core.workload import Block, Workload
from h2o_flexgen.engine.drafts import Drafted
from h2o_flexgen.engine.stats import Peaks, Stats
from h2o_flexgen.engine.stores.prefix_files import PrefixFileCounts
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.completion import Completion, StepLogprobs
from h2o_flexgen.schedule.ops import Op, Task

FIRST = 8  # completions that are shown unless all are wanted
CHARACTERS = 600  # characters of a text that are shown unless all are wanted
TOKENS = 3  # tokens that are shown with log-probabilities unless all are wanted
PROMPT_CHARACTERS = 120  # characters that are shown from the end of a prompt
INDENT = "    "
FEWER_BATCH_LAYERS = 20  # layers of the first decode step that are run; the second half of them is the base of the projection
GIB = 1 << 30  # FlexGen's unit, which it calls GB
MEMORY = "memory"  # the first word of each line about a promise


# -- texts -----------------------------------------------------------------------------------------------------------------


def completion_lines(completions: Sequence[Completion], everything: bool, as_text: bool = True) -> Iterator[str]:
    """The end of each prompt and, beneath it, the completion: as text, or as token ids for a model without a tokenizer."""
    shown = completions if everything else completions[:FIRST]
    for place, one in enumerate(shown):
        if place:
            yield ""
        counts = f"{len(one.prompt_token_ids)} + {len(one.token_ids)} tokens, {one.finish_reason}"
        yield f"prompt {one.index} ({counts})" + ("" if one.prompt is None else f": {_last_line(one.prompt)}")
        text = one.text if as_text else f"token ids {' '.join(map(str, one.token_ids))}"
        yield from (f"{INDENT}{line}" for line in _shown(text, everything).split("\n"))
        if one.logprobs is not None:
            yield f"  logprobs: {_logprobs(one.logprobs, everything)}"
    if len(shown) < len(completions):
        yield f"({len(completions) - len(shown)} more; --verbose 2 shows all, --output FILE writes all)"


def _shown(text: str, everything: bool) -> str:
    return printable(text if everything or len(text) <= CHARACTERS else text[:CHARACTERS] + " ...")


def _last_line(prompt: str) -> str:
    """The end of a prompt, on one line."""
    line = " ".join(prompt.split())
    return printable(line if len(line) <= PROMPT_CHARACTERS else "... " + line[-PROMPT_CHARACTERS:])


def _logprobs(logprobs: Sequence[StepLogprobs], everything: bool) -> str:
    steps = logprobs if everything else logprobs[:TOKENS]
    words = []
    for step in steps:
        top = "".join(f" {one.token_id}:{one.logprob:.3f}" for one in step.top)
        words.append(f"{step.chosen.token_id}:{step.chosen.logprob:.3f}" + (f" (of{top})" if top else ""))
    return ", ".join(words) + (" ..." if len(steps) < len(logprobs) else "")


# -- how long it took ---------------------------------------------------------------------------------------------------


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
        """Tokens per second of decode; the first token of each prompt is made by prefill."""
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
    """Extends the first steps to all: rows that were cut off would have gone on to `gen_len`, finished ones would not."""
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
    """Seconds of `steps` decode steps, of which the first were measured: a line through these, as the KV grows by a token a
    step. If the line falls, that is noise, and every further step takes the mean."""
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
    """The timing if every decode step took what the first would have taken; growth of the KV is left out."""
    steps = [
        run.step_seconds[0] if run.step_seconds else step_seconds_of(layer_ends, layers) if layer_ends else 0.0
        for run, layer_ends in zip(stats.blocks, ends)
    ]
    return projected(stats, stats.num_prompts * gen_len, (seconds * (gen_len - 1) for seconds in steps))


def step_seconds_of(ends: Mapping[int, float], layers: int) -> float:
    """Seconds of a step, from the second half of the layers that were run, an even number: attention and MLP take turns."""
    last = max(ends)
    first = max(min(ends), last - max(2, (last + 1) // 4 * 2))
    return (ends[last] - ends[first]) / (last - first) * layers if last > first else 0.0


# -- FlexGen's summary -----------------------------------------------------------------------------------------------------


def summary(spec: ModelSpec, workload: Workload, timing: Timing, peak_device_bytes: int) -> list[Entry]:
    """The summary in the layout of FlexGen's logs, tabs included; sizes are those of the whole workload at its full length."""
    slots = sum(length + workload.gen_len for length in workload.prompt_lens)
    cache = slots * spec.kv_bytes_per_token
    hidden = slots * spec.width * spec.itemsize
    sizes = {"model size": spec.weight_bytes, "cache size": cache, "hidden size (p)": hidden}
    return [
        told("\t".join(f"{name}: {nbytes / GIB:.3f} GiB" for name, nbytes in sizes.items())),
        noted(prompt_tokens=timing.prompt_tokens, generated_tokens=timing.generated_tokens),
        told(f"peak gpu mem: {peak_device_bytes / GIB:.3f} GiB\tprojected: {timing.projected}", projected=timing.projected),
        _pair("prefill", timing.prefill_seconds, timing.prefill_tokens_per_second, "prefill_tokens_per_second"),
        _pair("decode", timing.decode_seconds, timing.decode_tokens_per_second, "decode_tokens_per_second"),
        _pair("total", timing.total_seconds, timing.tokens_per_second, "tokens_per_second"),
    ]


def _pair(phase: str, seconds: float, rate: float, rate_key: str) -> Entry:
    words = f"{phase} latency: {seconds:.3f} s\t{phase} throughput: {rate:.3f} token/s"
    return told(words, **{f"{phase}_seconds": round(seconds, 6), rate_key: round(rate, 3)})


def log_name(model: str, plan: Plan, prompt_len: int, gen_len: int) -> str:
    percent = "-".join(f"{share:g}" for share in plan.percent)
    short = model.rstrip("/").rpartition("/")[2]
    block = f"gbs{plan.gpu_batch_size}-ngbs{plan.num_gpu_batches}"
    return f"fo-{short}-{block}-prompt{prompt_len}-gen{gen_len}-percent-{percent}.log"


def append_log(file: Path, lines: Sequence[str]) -> None:
    with file.open("a", encoding="utf-8") as log:
        log.write("\n".join(lines) + "\n")


# -- memory ----------------------------------------------------------------------------------------------------------------


def peaks_entry(peaks: Peaks) -> Entry:
    """The most that each tier held, in words where that was more than was promised."""
    values = {name: dict(of_tiers) for name, of_tiers in peaks._asdict().items()}
    return told(*(f"{MEMORY}: {line}" for line in _broken_lines(peaks)), **values)


def prefix_files_entry(counts: PrefixFileCounts) -> Entry:
    """What was found in the folder of prefixes, and written to it."""
    found = f"{counts.found} found, of {counts.found_tokens} tokens in all ({format_bytes(counts.read_bytes)})"
    written = f"{counts.written} written ({format_bytes(counts.written_bytes)})"
    damaged = f"; {counts.damaged} were damaged, and made again" if counts.damaged else ""
    trouble = f"; not all could be written: {counts.trouble}" if counts.trouble else ""
    return entry("prefixes", f"in their folder: {found}, {written}{damaged}{trouble}", prefix_files=asdict(counts))


def drafts_entry(drafted: Drafted, tokens: int, passes: int) -> Entry:
    """The tokens that were guessed; `tokens` of all rows were generated in so many passes, each of which computes all rows."""
    per_pass = tokens / max(1, passes)
    values = {**drafted._asdict(), "tokens_per_pass": round(per_pass, 3)}
    return entry("drafts", f"{guessed(drafted)}; {per_pass:.2f} tokens a pass, of all its rows together", drafts=values)


def guessed(drafted: Drafted) -> str:
    """What became of guesses, in words."""
    proposed, accepted = drafted
    return f"{accepted} of {proposed} guessed tokens were right" if proposed else "no token was guessed"


def say_broken(peaks: Peaks) -> None:
    """Says on stderr where a limit was exceeded. The exit status stays: what was computed is whole and right."""
    for line in peaks_entry(peaks).lines:
        print(line, file=sys.stderr, flush=True)


def _broken_lines(peaks: Peaks) -> Iterator[str]:
    """Peaks are exact, as the system and the allocators count them: a byte more than the limit is too much."""
    for tier, over in peaks.over_budget_bytes.items():
        if over:
            peak = peaks.peak_bytes[tier]
            held = f"{format_bytes(peak)} of {TIER_NAMES[tier]} memory were held, and the limit was {format_bytes(peak - over)}"
            yield (
                f"{held}: {format_bytes(over)} more than promised. What was computed is right; "
                f"to hold less, give a limit that is smaller by as much, or a smaller batch"
            )

"""What a finished run has to say: the texts, FlexGen's summary of five lines, and one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.cli.page import page_width, printable, wrapped
from h2o_flexgen.cli.projection import Timing
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.plan import Plan

if TYPE_CHECKING:
    from h2o_flexgen.sampling.output import Completion, StepLogprobs

FIRST = 8  # completions that are shown unless all are wanted
CHARACTERS = 600  # of a text that is shown unless all is wanted
TOKENS = 3  # whose log-probabilities are shown unless all are wanted
PROMPT_CHARACTERS = 120  # of a prompt, its last
INDENT = "    "
GIB = 1 << 30  # FlexGen counts in these, and calls them GB


def say(lines: Iterable[str]) -> None:
    for line in wrapped(lines, page_width()):
        print(line, flush=True)


# -- texts -----------------------------------------------------------------------------------------------------------------


def completion_lines(completions: Sequence[Completion], everything: bool, as_text: bool = True) -> Iterator[str]:
    """The end of each prompt, and beneath it what follows: as text, or, of a model without a tokenizer, as token ids."""
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


# -- FlexGen's summary -----------------------------------------------------------------------------------------------------


def summary_lines(spec: ModelSpec, workload: Workload, timing: Timing, peak_device_bytes: int) -> list[str]:
    """The layout of FlexGen's logs, tabs included; sizes are those of the whole workload at its full length."""
    slots = sum(length + workload.gen_len for length in workload.prompt_lens)
    cache = slots * spec.kv_bytes_per_slot * len(spec.kv_layers)
    hidden = slots * spec.width * spec.itemsize
    sizes = {"model size": spec.weight_bytes, "cache size": cache, "hidden size (p)": hidden}
    return [
        "\t".join(f"{name}: {nbytes / GIB:.3f} GiB" for name, nbytes in sizes.items()),
        f"peak gpu mem: {peak_device_bytes / GIB:.3f} GiB\tprojected: {timing.projected}",
        _pair("prefill", timing.prefill_seconds, timing.prefill_tokens_per_second),
        _pair("decode", timing.decode_seconds, timing.decode_tokens_per_second),
        _pair("total", timing.total_seconds, timing.tokens_per_second),
    ]


def _pair(phase: str, seconds: float, rate: float) -> str:
    return f"{phase} latency: {seconds:.3f} s\t{phase} throughput: {rate:.3f} token/s"


def log_name(model: str, plan: Plan, prompt_len: int, gen_len: int) -> str:
    percent = "-".join(f"{share:g}" for share in plan.percent)
    short = model.rstrip("/").rpartition("/")[2]
    block = f"gbs{plan.gpu_batch_size}-ngbs{plan.num_gpu_batches}"
    return f"fo-{short}-{block}-prompt{prompt_len}-gen{gen_len}-percent-{percent}.log"


def append_log(file: Path, lines: Sequence[str]) -> None:
    with file.open("a", encoding="utf-8") as log:
        log.write("\n".join(lines) + "\n")


def check_writable(file: str | None, flag: str) -> None:
    """Before the work and not behind it."""
    if file is None:
        return
    path = Path(file).expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {file} cannot be written: give a file in a folder that exists")


# -- JSON ------------------------------------------------------------------------------------------------------------------


def timing_json(timing: Timing) -> Mapping[str, object]:
    seconds = ("prefill_seconds", "decode_seconds", "total_seconds")
    rates = ("prefill_tokens_per_second", "decode_tokens_per_second", "tokens_per_second")
    return {
        "prompt_tokens": timing.prompt_tokens,
        "generated_tokens": timing.generated_tokens,
        **{name: round(getattr(timing, name), 6) for name in seconds},
        **{name: round(getattr(timing, name), 3) for name in rates},
        "projected": timing.projected,
    }

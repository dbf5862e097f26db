"""LLM: a model under a plan, and `generate`. The public face of the engine in Python.

    llm = LLM("facebook/opt-1.3b", percent=(0, 50, 0, 100, 100, 0), gpu_batch_size=8, num_gpu_batches=4)
    outputs = llm.generate(["Hello", "The ferry"], SamplingParams(max_tokens=32))

Nothing is loaded by the constructor: the first `generate` knows the workload, refuses what does not fit, and then loads.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from h2o_flexgen.conversation import Conversation, Extent
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import ModelSpec, usual_dtype
from h2o_flexgen.core.tiers import HOST
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.vocabulary import check_tokens
from h2o_flexgen.core.workload import Block, BlockSize, Workload
from h2o_flexgen.engine.engine import BlockRun, Engine, OnVisit, Until
from h2o_flexgen.engine.head import AtHead, Picker
from h2o_flexgen.engine.many_positions import LOGITS_AT_ONCE, positions_at_once
from h2o_flexgen.engine.prompts_done import OnCompletion, PromptsDone, UseTqdm, shown_progress
from h2o_flexgen.engine.row_state import RowState, completions_of
from h2o_flexgen.engine.rows import OnLogits, OnToken
from h2o_flexgen.engine.scoring import (
    PREFILL,
    Scored,
    Scorer,
    decode_groups,
    pairs_by_text,
    scored_of,
    way_of,
)
from h2o_flexgen.engine.shrink import OnShrink, Shrink, run_blocks
from h2o_flexgen.engine.stage import OnStage, Stage
from h2o_flexgen.engine.threads import set_threads
from h2o_flexgen.finding import Asked, AutoPlan
from h2o_flexgen.kernels.native import kernel_threads
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.memory.host import available_bytes, bytes_to_begin_with, give_back_freed, peak_resident_bytes
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.memory.threads import do_without_lost_threads, refuse_forked, start_computing_threads
from h2o_flexgen.models import create_model, known_config, load_config
from h2o_flexgen.models.base import Model
from h2o_flexgen.models.checkpoint import Checkpoint, WeightSource, open_checkpoint
from h2o_flexgen.models.derived import COPIES, Damaged, cache_folder
from h2o_flexgen.models.dummy import DummySource
from h2o_flexgen.models.hub import resolve_model
from h2o_flexgen.models.leftovers import remove_leftovers
from h2o_flexgen.models.packed import PackedCheckpoint
from h2o_flexgen.planning.budgets import Budgets, DoesNotFit, Request, refuse_what_does_not_fit
from h2o_flexgen.planning.footprint import Footprint
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.positions import check_positions, check_rolling, most_tokens
from h2o_flexgen.quant.codec import PLAIN
from h2o_flexgen.sampling.elsewhere import ARGUMENTS, OPTIONS, refuse_unknown
from h2o_flexgen.sampling.output import Completion
from h2o_flexgen.sampling.params import SamplingParams, one_params
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.text.dialogue import choose_style
from h2o_flexgen.text.messages import read_chats
from h2o_flexgen.text.prompts import Prompt, Prompts, read_pair, read_prompts, token_ids
from h2o_flexgen.text.tokenizer import AUTO, BYTES, HfTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Params: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"  # one for all prompts, or one for each
Pairs: TypeAlias = "Iterable[tuple[str, str] | tuple[Sequence[int], Sequence[int]]]"  # what stands before, what is scored
Listener: TypeAlias = "Callable[[Sequence[int]], None]"
DUMMY_SEED = 0
LOGITS_BYTES = 32  # of a logit while texts are scored in one pass: itself and what is made of it, generously


@dataclass(frozen=True)
class Stats:
    """Of the last `generate` or `score`."""

    num_prompts: int
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    step_seconds: tuple[float, ...]  # of every decode step of every block
    moved_bytes: dict[str, int]  # per lane
    busy_seconds: dict[str, float]  # per lane
    peak_bytes: dict[str, int]  # per tier; the host's is the process's resident memory
    shrunk: tuple[BlockSize, ...]  # of the blocks that memory ran out in; their seconds and bytes count above
    blocks: tuple[BlockRun, ...] = field(repr=False)  # that ended; of these only the last has kept its trace

    @property
    def last_block(self) -> BlockRun:
        return self.blocks[-1]


class LLM:
    """A model under a plan. `model` is a hub name or a local folder; with `dummy_weights` random ones take the place of files,
    and every byte of a text is a token unless a `tokenizer` is named ("bytes", a hub name or a folder). With percent="auto"
    the plan is found for the first prompts, and anew for later ones that outgrow it; the machine is measured once for that.
    Nothing large is loaded before the first `generate` or `converse`; `close`, or a `with`, gives all of it back."""

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path = AUTO,
        percent: Sequence[float] | str | None = None,
        plan: Plan | None = None,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        gpu_mem: int | str | None = None,
        cpu_mem: int | str | None = None,
        offload_dir: str | Path | None = None,
        dummy_weights: bool = False,
        overlap: bool = True,
        threads: int | None = None,
        on_stage: OnStage | None = None,
        **plan_options: object,
    ) -> None:
        """`threads`: that compute on the CPU, of the whole process (default: as torch has them).
        `plan_options` are what Plan.create takes: gpu_batch_size, slots, ..., kv_policy, heavy, recent, kv_budget, ..."""
        is_found = isinstance(percent, str) and percent == AUTO
        asked = _asked_plan(plan, percent, plan_options, is_found)
        asked = asked if overlap else asked.without_overlap()
        self._dtype = str(dtype).removeprefix("torch.")
        self._auto = AutoPlan(_asked(asked, plan_options), self._dtype) if is_found else None
        self.name = _name("model", model)
        self.tokenizer_name = _name("tokenizer", tokenizer)
        self.dummy_weights = dummy_weights
        self._on_stage = self._listener = on_stage
        self._process = os.getpid()
        set_threads(threads)
        do_without_lost_threads()
        self.device = open_device(device)
        self._refuse_gpu_mem(gpu_mem)
        self._take(asked)
        self._closed = False
        self.stats: Stats | None = None
        self.offload_folder = Path(offload_dir or default_offload_folder()).expanduser()
        self.leftovers = remove_leftovers(self.offload_folder, [cache_folder(kind) for kind in COPIES])
        self._mended: set[Path] = set()
        self._open()
        self._host_base = bytes_to_begin_with()
        self.budgets = self._measure_budgets(gpu_mem, cpu_mem)
        self._memories: Memories | None = None
        self._engine: Engine | None = None
        self._conversation: Conversation | None = None

    def _open(self) -> None:
        """The model, with copies of its weights that are as they were written."""
        while True:
            try:
                return self._open_model(self._dtype)
            except Damaged as damaged:
                self._discard(damaged)

    def _discard(self, damaged: Damaged) -> None:
        """A damaged copy goes, and the next opening makes it again; one that is damaged once more is an error. Where another
        process has taken it away, the next opening finds what that one made, or makes it."""
        if damaged.copy.path in self._mended and damaged.copy.is_still_there:
            advice = "it was made again just now: is the disk sound? Set XDG_CACHE_HOME to a folder on another"
            raise ValueError(f"{damaged.what}; {advice}") from damaged
        if not damaged.copy.discard():
            return
        self._mended.add(damaged.copy.path)
        if self._listener is None:
            warnings.warn(f"{damaged.what}; it is made again", RuntimeWarning, stacklevel=2)
        self._report(Stage.MENDING)

    def _open_model(self, dtype: str) -> None:
        folder: Path | None = None
        if self.dummy_weights:
            config = known_config(self.name) or load_config(self.name)
            dtype = usual_dtype(self.device.accelerator) if dtype == "auto" else dtype
            self._source: WeightSource = DummySource(DUMMY_SEED, dtype, self.offload_folder, self._wrote)
        else:
            folder = resolve_model(self.name)
            config = load_config(str(folder))
            checkpoint = open_checkpoint(folder, progress=self._converted)
            dtype = usual_dtype(self.device.accelerator, checkpoint.dtype) if dtype == "auto" else dtype
            self._source = checkpoint
        built = create_model(config, dtype, self.plan.sep_layer, self.name)
        stored = self._source.stored_itemsize
        self.plain_spec = built.spec.map_tensors(lambda tensor: replace(tensor, stored_itemsize=stored(tensor.name)))
        built.spec = self.plain_spec.written_as(self.plan.weight_codec, self.plan.kv_codec)
        if isinstance(self._source, Checkpoint) and self.plan.weight_codec != PLAIN:
            self._source = PackedCheckpoint(self._source, built.spec, progress=self._report_packing)
        check_rolling(built.spec, self.plan)
        self._model: Model = built
        self.tokenizer: Tokenizer = load_tokenizer(folder, config, built.spec.vocab, self._tokenizer_place())

    def _tokenizer_place(self) -> str | Path:
        asked = self.tokenizer_name
        return asked if asked in (AUTO, BYTES) else resolve_model(asked, with_weights=False)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | Tokenizer:
        """The tokenizer of transformers, where the model has one."""
        return self.tokenizer.of_transformers if isinstance(self.tokenizer, HfTokenizer) else self.tokenizer

    def adopt(self, plan: Plan) -> None:
        """Another plan in place of the one that was asked for: one that was found for this model, say."""
        self._refuse_closed()
        if self._engine is not None:
            raise ValueError(f"weights of {self.name} lie where the plan before wants them; make a new LLM for another plan")
        self._take(plan)
        self._source.close()
        self._open()
        self.budgets = replace(self.budgets, disk=self._disk_budget())  # weights that it packs take some of the disk
        self.weigh()

    def _find_plan(self, workload: Workload, scores_texts: bool, on_stage: OnStage | None) -> None:
        """Where percent is "auto", and there is none yet or the workload has outgrown it. Logits of many positions of a text
        take memory that a plan knows nothing of."""
        auto, held_back = self._auto, LOGITS_AT_ONCE * LOGITS_BYTES if scores_texts else 0
        if auto is None or not auto.has_outgrown(workload, held_back, self.plan):
            return
        self._refuse_closed()
        self._refuse_in_conversation()
        before = self.requested
        self._unload()
        with self._heard_by(on_stage):
            try:
                auto.find(self, workload, held_back)
            except BaseException:
                self.adopt(before)  # what was there before can go on
                raise

    def _take(self, plan: Plan) -> None:
        folded = plan if self.device.accelerator else plan.folded()
        if folded.attend_on == HOST:
            raise ValueError("attend_on 'host' can be priced, but this version cannot run it on an accelerator; leave it out")
        self.requested, self.plan = plan, folded

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def model(self) -> Model:
        """Its layers as functions, for who runs them in another way."""
        return self._model

    @property
    def source(self) -> WeightSource:
        """Where its weights come from."""
        return self._source

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """Where weights are read from in every step; none before the first `generate`."""
        return self._engine.weight_files if self._engine is not None else ()

    @property
    def packing(self) -> tuple[Path, int] | None:
        """The folder that packed weights are kept in, and the bytes to write there first; random ones are not kept."""
        return (self._source.folder, self._source.bytes_to_write) if isinstance(self._source, PackedCheckpoint) else None

    # -- budgets -------------------------------------------------------------------------------------------------------

    def _refuse_gpu_mem(self, gpu_mem: int | str | None) -> None:
        """Memory of a GPU that is not computed on limits nothing, and whoever gives it expects something else."""
        if gpu_mem is not None and not self.device.accelerator:
            raise ValueError(f"gpu_mem {shown(gpu_mem)} is for a GPU, and this model computes on the CPU; leave it out")

    def _measure_budgets(self, gpu_mem: int | str | None, cpu_mem: int | str | None) -> Budgets:
        device = None if gpu_mem is None else parse_bytes(gpu_mem)
        self.device.limit(device)
        known = [nbytes for nbytes in (device, self.device.free_bytes()) if nbytes is not None]
        return Budgets(
            device=min(known) if known and self.device.accelerator else None,
            host=available_bytes() + self._host_base if cpu_mem is None else parse_bytes(cpu_mem),
            disk=self._disk_budget(),
            host_base=self._host_base,
        )

    def weigh(self) -> None:
        """Looks again at what the process holds beside what the plan counts: a search for a plan leaves something behind."""
        if self._memories is None:
            give_back_freed()
            self.budgets = replace(self.budgets, host_base=bytes_to_begin_with())

    def _disk_budget(self) -> int | None:
        """What is free where KV and activations go, without what packed weights will take of it."""
        place = existing_folder(self.offload_folder)
        if place is None:
            return None
        free = shutil.disk_usage(place).free
        if self.packing is None:
            return free
        folder, nbytes = self.packing
        cache = existing_folder(folder)
        shared = cache is not None and cache.stat().st_dev == place.stat().st_dev
        return max(0, free - nbytes) if shared else free

    def check_prompts(self, prompts: Prompts, params: Params = None) -> None:
        """Refuses prompts that no plan can run, before one is found: empty ones, too long ones, those of unknown tokens."""
        read = read_prompts(prompts, self.tokenizer)
        self._rows(read, params, False, [()] * len(read))

    def check(self, workload: Workload) -> Footprint:
        """Refuses a workload that the plan does not fit, before anything is loaded; else says what will be held."""
        for length, row in workload.first_of_length.items():
            check_positions(self.spec, self.plan, row, length, workload.gen_len)
        return self._refuse_what_does_not_fit(workload)

    def _refuse_what_does_not_fit(self, workload: Workload, scored_at_once: int = 0) -> Footprint:
        return refuse_what_does_not_fit(self.request(workload, self.plan, scored_at_once), self.budgets)

    def request(self, workload: Workload, plan: Plan, scored_at_once: int = 0) -> Request:
        """All that decides whether a plan fits, which may be another one than this model's."""
        accelerator = self.device.accelerator
        threads = 0 if accelerator else kernel_threads()
        plan = plan if accelerator else plan.folded()
        spec = self.spec if plan == self.plan else self.spec_under(plan)
        return Request(spec, plan, workload, accelerator, self.dummy_weights, threads, scored_at_once)

    def spec_under(self, plan: Plan) -> ModelSpec:
        return self.plain_spec.written_as(plan.weight_codec, plan.kv_codec)

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        seed: int | None = None,
        use_tqdm: UseTqdm = False,
        on_token: OnToken | None = None,
        on_completion: OnCompletion | None = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
        stop_at: Until | None = None,
        forced: Sequence[Sequence[int]] | None = None,
        on_logits: OnLogits | None = None,
        **unknown: object,
    ) -> list[Completion]:
        """Completions in the order of the prompts. A prompt is a text, a list of token ids, or a dict of one of them; prompts
        are a list, an array or an iterator of these. `on_token` gets every token as it comes; rows of one block take turns.
        `on_completion` gets what becomes of a prompt when its block is over. `use_tqdm` shows on stderr how many prompts are
        done, or on a bar that a function like tqdm makes. When memory runs out in spite of the plan, the rest goes on in
        smaller blocks, of which `on_shrink` is told (without it a warning is given); unless it `may_shrink`, that is an error.
        `forced`: of each row the first tokens, which are given and not picked; they count in max_tokens, and none of them ends
        the row. `on_logits` gets those of every token, in fp32 and in host memory, good until it returns. Where
        prompts have several completions (n), each is a row: listeners hear its place among all of them."""
        refuse_unknown("argument", unknown, _arguments(LLM.generate), ARGUMENTS)
        read = read_prompts(prompts, self.tokenizer)
        rows = self._rows(read, sampling_params, on_token is not None, [()] * len(read) if forced is None else forced)
        if not rows:
            return []
        asks_of_prompts = any(row.wants_prompt_logprobs for row in rows)
        self._find_plan(_workload(rows), asks_of_prompts, on_stage)
        positions = positions_at_once(self.plan, self.spec.vocab) if asks_of_prompts else 0
        ended = PromptsDone(rows, on_completion).block_ended
        with shown_progress(use_tqdm, rows, (on_token, on_stage or self._on_stage)) as (each_token, each_stage):
            picker = Picker(Sampler(seed), each_token, on_logits, positions)
            self._run([rows], picker, each_stage, on_visit, on_shrink, may_shrink, stop_at, positions, ended)
        return completions_of(rows)

    def chat(
        self,
        messages: Iterable[object],
        sampling_params: Params = None,
        *,
        style: str = AUTO,
        seed: int | None = None,
        use_tqdm: UseTqdm = False,
        on_token: OnToken | None = None,
        on_completion: OnCompletion | None = None,
        **unknown: object,
    ) -> list[Completion]:
        """Answers to a chat, which is a list of {"role": ..., "content": ...}, or to each of a list of chats. They are written
        down by the model's chat template; or, where it has none, as a script of User: and Assistant: (`style` names the one or
        the other, or "plain"). Each call computes all of it anew: `converse` keeps what was said."""
        refuse_unknown("argument", unknown, _arguments(LLM.chat), ARGUMENTS)
        written = choose_style(style, self.tokenizer)
        prompts = [written.whole(chat) for chat in read_chats(messages)]
        params = [replace(one, stop=(*one.stop_strings, *written.stops)) for one in _for_each(sampling_params, len(prompts))]
        given = [{"prompt": one.text, "prompt_token_ids": one.ids} for one in prompts]
        return self.generate(given, params, seed=seed, use_tqdm=use_tqdm, on_token=on_token, on_completion=on_completion)

    def score(
        self,
        pairs: Pairs,
        *,
        by: str | None = None,
        on_token: OnToken | None = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
    ) -> list[Scored]:
        """How likely each continuation is behind its context, in the order of the pairs, of texts or of token ids. "prefill":
        in one pass, which is refused where the cache evicts or rounds; "decode": token by token, with what it keeps; None: the
        first where it may be, else the second. `on_token` gets every token that is scored."""
        by = way_of(self.plan, by)
        running = partial(self._run, on_stage=on_stage, on_visit=on_visit, on_shrink=on_shrink, may_shrink=may_shrink)
        read = [read_pair(place, pair, self.tokenizer) for place, pair in enumerate(pairs)]
        contexts, continuations = [Prompt(None, before) for before, _ in read], [after for _, after in read]
        if empty := [index for index, after in enumerate(continuations) if not after]:
            raise ValueError(f"continuation {empty[0]} is empty; there is nothing to score: leave the pair out")
        if not read:
            return []
        params = [SamplingParams(max_tokens=len(after), logprobs=1) for after in continuations]
        rows = self._rows(contexts, params, False, continuations)
        self._find_plan(_workload(rows), True, on_stage)
        if by == PREFILL:
            wanted, at_once = pairs_by_text(rows), positions_at_once(self.plan, self.spec.vocab)
            texts = [RowState(place, text, SamplingParams(max_tokens=1), self.tokenizer) for place, text in enumerate(wanted)]
            scorer = Scorer([*wanted.values()], at_once, on_token)
            running([texts], scorer, scored_at_once=at_once)
            return [scorer.scored[index] for index in range(len(read))]
        running(decode_groups(rows, self.plan), Picker(Sampler(0), on_token))
        return [scored_of(row.completion()) for row in rows]

    def _run(
        self,
        groups: Sequence[Sequence[RowState]],
        at_head: AtHead,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
        stop_at: Until | None = None,
        scored_at_once: int = 0,
        on_ended: Listener | None = None,
    ) -> None:
        """Each group is a workload of its own. All are looked at before the first is run. `on_ended` hears which rows of their
        group a block had that is over."""
        workloads = [_workload(rows) for rows in groups]
        for workload in set(workloads):
            self._refuse_what_does_not_fit(workload, scored_at_once)
        engine = self._ready(on_stage)
        runs: list[BlockRun] = []
        size = BlockSize(self.plan.gpu_batch_size, self.plan.num_gpu_batches)
        for workload, rows in zip(workloads, groups):

            def run(block: Block, may_run_out: bool, rows: Sequence[RowState] = rows) -> BlockRun:
                return engine.run(block, rows, at_head, on_visit, stop_at, may_run_out=may_run_out and may_shrink)

            engine.trim()
            for one in run_blocks(workload, size, rows, run, on_shrink or _warn):
                if runs:  # a long job has many blocks: the last one's trace is kept
                    runs[-1] = runs[-1].without_trace()
                runs.append(one)
                if on_ended is not None:
                    on_ended([row for batch in one.block.batches for row in batch.rows])
        self.stats = self._measured([row for rows in groups for row in rows], runs)

    def converse(self, context: int | None = None, *, seed: int | None = None, on_stage: OnStage | None = None) -> Conversation:
        """A text that goes on turn by turn, with a KV cache that lives on. `context`: the tokens that it may grow to (default:
        the model's positions); with rolling positions it has no end. Until it is closed nothing else can be generated."""
        if self._auto is not None and not self._auto.found_for:
            raise ValueError("percent 'auto' finds plans for generate, chat and score; for a conversation give six numbers")
        extent = Extent.of(self.spec, self.plan.policy, context, self.plan.prefill_tokens)
        try:
            self._refuse_what_does_not_fit(extent.workload)
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}; or give a shorter context, or a KV policy that keeps less") from None
        self._conversation = Conversation(self._ready(on_stage), self.spec, self.tokenizer, extent, seed)
        return self._conversation

    def _ready(self, on_stage: OnStage | None) -> Engine:
        """The engine, with nothing of earlier workloads in memory but the weights."""
        self._refuse_in_conversation()
        self._refuse_closed()
        with self._heard_by(on_stage):
            engine = self._load()
        engine.trim()
        engine.restart_peaks()
        return engine

    def _refuse_in_conversation(self) -> None:
        if self._conversation is not None and not self._conversation.closed:
            raise ValueError(f"a conversation of {self.name} is open; close it first")

    def _rows(
        self, prompts: Sequence[Prompt], params: Params, streamed: bool, forced: Sequence[Sequence[int]]
    ) -> list[RowState]:
        each = _for_each(params, len(prompts))
        if len(forced) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with forced tokens for {len(forced)}; give some, or none, for each")
        rows: list[RowState] = []
        for index, (prompt, asked, forced_ids) in enumerate(zip(prompts, each, forced)):
            given = token_ids(f"what row {index} is forced to take", forced_ids)
            self._check_prompt(index, prompt.ids)
            own = self._checked(asked, index, len(prompt.ids), given)
            for number in range(own.n):
                rows.append(RowState(index, prompt.ids, own, self.tokenizer, prompt.text, streamed, given, number, len(rows)))
        return rows

    def _checked(self, params: SamplingParams, index: int, prompt_len: int, forced: Sequence[int]) -> SamplingParams:
        """What this model can do behind this prompt, where it is said how many tokens may come."""
        params.check_vocabulary(self.spec.vocab, self.name)
        wanted = params.max_tokens
        most = most_tokens(self.spec, self.plan, index, prompt_len) if wanted is None else wanted
        self._check_forced(index, forced, most)
        check_positions(self.spec, self.plan, index, prompt_len, most)
        if params.min_tokens > most:
            raise ValueError(f"min_tokens is {params.min_tokens}, but behind prompt {index} there is room for {most} tokens")
        return params.up_to(most)

    def _check_prompt(self, index: int, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError(f"prompt {index} is empty; every prompt needs at least one token")
        self._check_tokens(f"prompt {index} has", ids)

    def _check_forced(self, index: int, forced: Sequence[int], max_tokens: int) -> None:
        if len(forced) > max_tokens:
            raise ValueError(
                f"row {index} has {len(forced)} forced tokens, but max_tokens is {max_tokens}, and they count in it"
            )
        self._check_tokens(f"row {index} is forced to take", forced)

    def _check_tokens(self, whose: str, ids: Sequence[int]) -> None:
        check_tokens(whose, ids, self.spec.vocab, self.name)

    def _load(self) -> Engine:
        self._refuse_closed()
        while self._engine is None:
            self._report(Stage.LOADING)
            start_computing_threads()
            try:
                self._engine = self._new_engine()
            except Damaged as damaged:
                self._discard(damaged)
                self._open()
        self._report(Stage.GENERATING)
        return self._engine

    def _new_engine(self) -> Engine:
        """An engine whose weights are loaded, and checked where they lie in a copy."""
        self._memories = Memories(self.device, self.offload_folder, self.plan.pin_weight)
        try:
            return Engine(self._model, self._source, self.plan, self._memories)
        except BaseException:  # whoever tries again starts from nothing
            self._source.close()
            self._memories.close()
            raise

    def _refuse_closed(self) -> None:
        refuse_forked(self._process, f"this LLM of {self.name}")
        if self._closed:
            raise ValueError(f"this LLM of {self.name} is closed; make a new one to generate")

    @contextmanager
    def _heard_by(self, on_stage: OnStage | None) -> Iterator[None]:
        """Stages of this call go to its own listener, or to that of the constructor; afterwards to the latter alone."""
        self._listener = on_stage or self._on_stage
        try:
            yield
        finally:
            self._listener = self._on_stage

    def _report(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        if self._listener is not None:
            self._listener(stage, done_bytes, total_bytes)

    def _report_packing(self, done_bytes: int, total_bytes: int) -> None:
        self._report(Stage.PACKING, done_bytes, total_bytes)
        if done_bytes == total_bytes:
            self._report(Stage.LOADING)

    def _converted(self, done_bytes: int, total_bytes: int) -> None:
        self._report(Stage.CONVERTING, done_bytes, total_bytes)

    def _wrote(self, done_bytes: int, total_bytes: int) -> None:
        self._report(Stage.WRITING, done_bytes, total_bytes)
        if done_bytes == total_bytes:
            self._report(Stage.LOADING)

    def _measured(self, rows: Sequence[RowState], runs: Sequence[BlockRun]) -> Stats:
        assert self._memories is not None
        ended = tuple(run for run in runs if run.shortage is None)
        moved: Counter[str] = Counter()
        busy: Counter[str] = Counter()
        for run in runs:
            moved.update(run.moved_bytes)
            busy.update(run.busy_seconds)
        prefill, decode = sum(run.prefill_seconds for run in runs), sum(run.decode_seconds for run in runs)
        disk_peak = self._memories.disk.meter.peak_bytes
        if self.dummy_weights:
            disk_peak += sum(file.stat().st_size for file in self.weight_files)
        peaks = {"device": self.device.peak_bytes(), "host": peak_resident_bytes(), "disk": disk_peak}
        return Stats(
            num_prompts=len({row.index for row in rows}),
            prompt_tokens=sum(row.prompt_len for row in rows),
            generated_tokens=sum(row.num_generated for row in rows),  # once, also where a row started anew
            prefill_seconds=prefill,
            decode_seconds=decode,
            total_seconds=prefill + decode,
            step_seconds=tuple(seconds for run in ended for seconds in run.step_seconds),
            moved_bytes=dict(moved),
            busy_seconds=dict(busy),
            peak_bytes=peaks,
            shrunk=tuple(BlockSize.of(run.block) for run in runs if run.shortage is not None),
            blocks=ended,
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def unload(self) -> None:
        """Gives all memory back. Whoever generates again loads again."""
        refuse_forked(self._process, f"this LLM of {self.name}")
        if self._conversation is not None:
            self._conversation.close()
        if self._memories is not None:
            self._memories.close()
        self._memories = self._engine = None  # what it holds is page-locked until its memory is closed
        gc.collect()
        give_back_freed()

    def close(self) -> None:
        """Ends the disk threads, closes files and removes what was written. The object can no longer generate. In a
        process that was forked nothing is done: all is the parent's."""
        self._closed = True
        if self._process != os.getpid():
            return
        if self._conversation is not None:
            self._conversation.close()
        self._unload()

    def _unload(self) -> None:
        try:
            self._source.close()
        finally:
            if self._memories is not None:
                self._memories.close()
            self._engine = self._memories = None  # last: what it holds is page-locked until its memory is closed

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _asked_plan(
    plan: Plan | None, percent: Sequence[float] | str | None, options: Mapping[str, object], is_found: bool
) -> Plan:
    """Nothing that was asked for is dropped in silence."""
    refuse_unknown("option", options, [*Plan.option_names(), *_arguments(LLM)], OPTIONS)
    if isinstance(percent, str) and not is_found:
        raise ValueError(f"percent is {shown(percent)}; give six numbers, or {AUTO!r} to have a plan found")
    if plan is None:
        asked = Plan.create(**options)
        return asked if percent is None or is_found else asked.with_percent(percent)  # type: ignore[arg-type]
    if other := next(iter([*options, *(["percent"] if percent is not None else [])]), None):
        raise ValueError(f"both plan and {other} are given; put {other} into the plan, or leave the plan out")
    return plan


def _arguments(function: Callable[..., object]) -> list[str]:
    """Those that it names."""
    return [name for name, one in signature(function).parameters.items() if one.kind is not Parameter.VAR_KEYWORD]


def _asked(plan: Plan, options: Mapping[str, object]) -> Asked:
    """Sizes that were given are kept."""
    sizes, batches = ((getattr(plan, name),) if name in options else () for name in ("gpu_batch_size", "num_gpu_batches"))
    return Asked(plan, sizes, batches)


def _name(what: str, given: object) -> str:
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"{what} is a {type(given).__name__}; give a name on the hub, or a folder")
    return str(given)


def _for_each(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, (SamplingParams, str, bytes, Mapping)) or not isinstance(params, Iterable):
        return [one_params(params)] * count
    each = [one_params(one) for one in params]
    if len(each) != count:
        raise ValueError(f"{count} prompts came with {len(each)} sampling params; give one for all or one for each")
    return each


def _workload(rows: Sequence[RowState]) -> Workload:
    return Workload(tuple(row.prompt_len for row in rows), max((row.max_tokens for row in rows), default=1))


def _warn(shrink: Shrink) -> None:
    """For those who listen to nothing: a smaller block is slower, and nobody should wonder why."""
    warnings.warn(f"{shrink} ({shrink.shortage.reason})", RuntimeWarning, stacklevel=2)


def default_offload_folder() -> Path:
    """Not the system's folder for temporary files: that is often memory."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "h2o_flexgen" / "offload"


def existing_folder(folder: Path) -> Path | None:
    """The folder, or the nearest one above that is there."""
    return next((place for place in (folder, *folder.parents) if place.exists()), None)

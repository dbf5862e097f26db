"""LLM: a model under a plan, and `generate`. The public face of the engine in Python.

    llm = LLM("facebook/opt-1.3b", percent=(0, 50, 0, 100, 100, 0), gpu_batch_size=8, num_gpu_batches=4)
    outputs = llm.generate(["Hello", "The ferry"], SamplingParams(max_tokens=32))

Nothing is loaded by the constructor: the first `generate` knows the workload, refuses what does not fit, and then loads.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import refuse_unknown
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.arrivals import ROWS_PER_SEAT, Arrival, Arrivals
from h2o_flexgen.engine.conversation import Conversation, Extent
from h2o_flexgen.engine.engine import OnVisit, Until
from h2o_flexgen.engine.generate import OnCompletion, PreparedRows, Running, Stream, UseTqdm, job_of, shown_progress
from h2o_flexgen.engine.head import Picker
from h2o_flexgen.engine.job import Job, Requests
from h2o_flexgen.engine.reports import OnStage, OnTick, Ticker
from h2o_flexgen.engine.restarted_run import OnShrink
from h2o_flexgen.engine.row_maker import Forced, Params, RowMaker, for_each, workload_of
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import OnLogits, OnToken
from h2o_flexgen.engine.scoring import PREFILL, Pairs, Scored, Scorer, decode_groups, params_of, read_pairs, scored_of, way_of
from h2o_flexgen.engine.stats import Peaks, Stats
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.working_space import positions_at_once
from h2o_flexgen.planning.workload_plan import (
    DoesNotFit,
    WorkloadPlan,
    first_that_fits,
    prefix_rooms,
    room_of_states,
    rooms_to_search,
)
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.foreign_options import ARGUMENTS, OF_CONSTRUCTORS, OwnOptions, dtype_called
from h2o_flexgen.sampling.params import Adapted, LoRARequest, SamplingParams, adapters_of_prompts, params_with_adapters
from h2o_flexgen.sampling.pooling import (
    CLASSIFYING,
    INSTEAD,
    LAST,
    RANKING,
    Classification,
    ClassifyParams,
    Embedding,
    PoolingParams,
    Ranked,
    Truncate,
    best_first,
    most_read,
    read_truncate,
)
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.session.loaded_model import LoadedModel, Say, told_by_stages, told_by_warnings
from h2o_flexgen.session.open_request import (
    PREFIX_BYTES,
    ModelRequest,
    OpenRequest,
    SiteRequest,
    adapters_of,
    arguments_of,
    asked_plan,
    loras_of,
    measures_heads,
    name_of,
    what_is_searched,
)
from h2o_flexgen.session.plan_finder import AutoPlan
from h2o_flexgen.text.answer_reader import with_message
from h2o_flexgen.text.dialogue import choose_style
from h2o_flexgen.text.prompts import Prompt, Prompts, read_chats, read_documents, read_prompts, shortened
from h2o_flexgen.text.tokenizer import Tokenizer, read_settings
from h2o_flexgen.text.tools import read_tool_use
from h2o_flexgen.text.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Heard(NamedTuple):
    """The listeners of a call, and whether its blocks may go on smaller."""

    on_stage: OnStage | None
    on_visit: OnVisit | None
    on_shrink: OnShrink | None
    may_shrink: bool


class LLM:
    """A model under a plan. `model` is a hub name or a local folder. With `dummy_weights`, weights are random and no file is
    read; then every byte of a text is a token unless a `tokenizer` is named ("bytes", a hub name or a folder). With
    percent="auto" the plan is found for the first prompts, and again for later ones that do not fit it; the machine is measured
    once for that. Nothing large is loaded before the first `generate` or `converse`; `close`, or a `with`, frees all of it."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path = AUTO,
        adapter: str | Path | Sequence[str | Path] | None = None,
        lora: Mapping[str, str | Path] | Sequence[str] | None = None,
        percent: Sequence[float] | str | None = None,
        plan: Plan | None = None,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        gpu_mem: int | str | None = None,
        cpu_mem: int | str | None = None,
        disk_mem: int | str | None = None,
        offload_dir: str | Path | None = None,
        prefix_dir: str | Path | None = None,
        prefix_dir_size: int | str = PREFIX_BYTES,
        dummy_weights: bool = False,
        overlap: bool = True,
        threads: int | None = None,
        trace: bool = False,
        on_stage: OnStage | None = None,
        **plan_options: object,
    ) -> None:
        """`threads` compute on the CPU, for the whole process (default: torch's number). `trace`: the trace of a run on a GPU
        has every task; otherwise it has those of some steps, as timing on a GPU is not free. `plan_options` are those of
        Plan.create: gpu_batch_size, buffers, ..., kv_policy, heavy, recent, kv_budget, ...; head_budgets and probe may also be
        the path of a file, or "own", the file beside the model. Without head_budgets those that are known of the model are
        taken, or measured once if that is quick; "equal" has equal budgets. `adapter`: the folder of a LoRA that is
        merged, or several; "=0.5" behind one is its weight. `lora`: the folders or GGUF files of adapters that requests ask for
        by their names. `prefix_dir`: where prefixes that requests share outlive the process. Arguments of vLLM and
        llama-cpp-python that change nothing here are accepted."""
        given = {name: value for name, value in (("model", model), ("threads", threads)) if value is not None}
        own = OwnOptions.of({**plan_options, **given})
        plan_options = {name: value for name, value in own.options.items() if name not in OF_CONSTRUCTORS}
        threads = cast("int | None", own.options.get("threads"))
        source = name_of("model", own.options.get("model"))
        how = dtype_called(dtype), name_of("tokenizer", tokenizer), adapters_of(adapter)
        asked = asked_plan(plan, percent, plan_options, arguments_of(LLM), source, dummy_weights, how[2])
        asked = asked if overlap else asked.without_overlap()
        searched = what_is_searched(asked, plan_options) if isinstance(percent, str) else None
        measures = plan is None and measures_heads(plan_options, dummy_weights, how[2])
        named = ModelRequest(source, source, dummy_weights, *how, lora_modules=loras_of(lora), measures_heads=measures)
        site = SiteRequest(device, threads, gpu_mem, cpu_mem, disk_mem, offload_dir, prefix_dir, prefix_dir_size)
        say = told_by_warnings if on_stage is None else told_by_stages
        self._hold(LoadedModel(OpenRequest(named, site, asked, trace), on_stage, say), searched)
        own.refuse_longer(self.spec.max_positions, self.name)

    @classmethod
    def of(cls, request: OpenRequest, on_stage: OnStage | None = None, say: Say = told_by_stages) -> LLM:
        """The LLM of a request, as commands make it."""
        llm = cls.__new__(cls)
        llm._hold(LoadedModel(request, on_stage, say), None)
        return llm

    def _hold(self, loaded: LoadedModel, searched: PlanRequirements | None) -> None:
        self.loaded = loaded
        self.stats: Stats | None = None
        self._auto = None if searched is None else AutoPlan(loaded.with_heads(searched), loaded)

    # -- the model under its plan ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def plan(self) -> Plan:
        """The plan in force: without a GPU, the shares of one are the CPU's."""
        return self.loaded.plan

    @property
    def device(self) -> Device:
        return self.loaded.device

    @property
    def limits(self) -> MemoryLimits:
        """The bytes that may be held."""
        return self.loaded.limits

    def adopt(self, plan: Plan) -> None:
        """Replaces the plan, as long as no weights are loaded."""
        self.loaded.adopt(plan)

    def planned(self, workload: Workload, plan: Plan | None = None) -> WorkloadPlan:
        """Plans the workload under this model's plan, or under another one."""
        return self.loaded.planned(workload, plan)

    def check(self, workload: Workload) -> WorkloadPlan:
        """Refuses a workload that the plan does not fit, before anything is loaded; otherwise returns how it is planned."""
        return self.loaded.check(workload)

    def load(self, on_stage: OnStage | None = None) -> None:
        """Loads the weights now instead of at the first generation."""
        self.loaded.ready(on_stage)

    def peaks(self) -> Peaks:
        """The most bytes held since the weights were loaded; for the host, the most that the process has ever held."""
        return self.loaded.peaks()

    def unload(self) -> None:
        """Frees all memory. The next generation loads everything again."""
        self.loaded.unload()

    def close(self) -> None:
        """Ends the disk threads, closes files and removes written ones. The object can no longer generate. In a forked process
        this does nothing: everything belongs to the parent."""
        self.loaded.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def get_tokenizer(self) -> PreTrainedTokenizerBase | Tokenizer:
        """The tokenizer of transformers, if the model has one."""
        return self.tokenizer.of_transformers if isinstance(self.tokenizer, WordTokenizer) else self.tokenizer

    # -- generation ----------------------------------------------------------------------------------------------------

    def read(self, prompts: Prompts, params: Params = None) -> list[Prompt]:
        """Tokenizes the prompts. Refuses those that no plan can run: empty or too long ones, and those with unknown tokens."""
        read = read_prompts(prompts, self.tokenizer)
        self.row_maker.rows(read, params)
        return read

    def prepare(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        streamed: bool = False,
        on_stage: OnStage | None = None,
        planned: WorkloadPlan | None = None,
        numbers: Sequence[int] | None = None,
    ) -> PreparedRows:
        """Prepares prompts for `generate`: tokenized, planned and found to fit. `streamed`: `on_token` will get their texts.
        `planned`: their workload, if `check` has planned it already. `numbers`: the prompts' numbers, if they are part of a
        larger input; completions have these numbers, and random draws depend on them."""
        rows = self.row_maker.rows(read_prompts(prompts, self.tokenizer), sampling_params, streamed, None, numbers)
        return self._prepared(rows, on_stage, planned)

    def generate(
        self,
        prompts: Prompts | PreparedRows,
        sampling_params: Params = None,
        *,
        lora_request: Adapted = None,
        seed: int | None = None,
        use_tqdm: UseTqdm = False,
        on_token: OnToken | None = None,
        on_completion: OnCompletion | None = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
        stop_at: Until | None = None,
        forced: Forced = None,
        on_logits: OnLogits | None = None,
        **unknown: object,
    ) -> list[Completion]:
        """Returns completions in the order of the prompts. A prompt is a text, a list of token ids, or a dict of one of them;
        prompts are a list, an array or an iterator of these, or what `prepare` returned. `on_token` gets every token as it
        comes; rows of one block take turns. `on_completion` gets the completion of a prompt when it ends. `use_tqdm`
        shows on stderr how many prompts are done, or on a bar made by a function like tqdm. If memory runs out in spite of the
        plan, the rest goes on in smaller blocks. This calls `on_shrink`, or else gives a warning; without `may_shrink` it is an
        error. `forced` gives the first tokens of each row, which are not picked; they count in max_tokens, and none of them
        ends the row. `lora_request`: the adapter of all prompts, or one or None for each. `on_logits` gets the logits of every
        token, in fp32 and in host memory, valid until it returns. If prompts have several completions (n), each is a row:
        listeners get its place among all rows."""
        refuse_unknown("argument", unknown, arguments_of(LLM.generate), ARGUMENTS)
        if isinstance(prompts, PreparedRows):
            prepared = prompts.for_use_under(self.plan, sampling_params, lora_request, forced)
        else:
            read = read_prompts(prompts, self.tokenizer)
            params = self._adapted(sampling_params, lora_request, len(read))
            rows = self.row_maker.rows(read, params, on_token is not None, forced)
            if not rows:
                return []
            prepared = self._prepared(rows, on_stage)
        found = []
        with shown_progress(use_tqdm, prepared.rows, (on_token, on_stage or self.loaded.stages.always)) as (
            each_token,
            each_stage,
        ):
            picker = Picker(Sampler(seed), each_token, on_logits, prepared.planned.scored_at_once)
            running = Running(self.loaded.ready(each_stage), picker, on_visit, on_shrink, may_shrink, stop_at)
            for completion in running.completions(prepared):
                found.append(completion)
                if on_completion is not None:
                    on_completion(completion)
        self.stats = Stats.of(prepared.rows, running.done, self.peaks())
        return sorted(found, key=lambda completion: completion.index)

    def generate_stream(
        self,
        requests: Requests,
        *,
        seed: int | None = None,
        on_token: OnToken | None = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_tick: OnTick | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
        stop_at: Until | None = None,
    ) -> Generator[Completion, None, None]:
        """Yields completions as they finish, each with the index of its request. Rows come and go: where one ends, the next
        takes its seat in the running block, and its prompt is read in the same pass over the weights as the others' next
        tokens. What a row may keep of its text depends on its own prompt and max_tokens, so no completion depends on the rows
        beside it. `requests` are Requests, or prompts, or a Job, which reads texts when their turn comes. `on_tick` is called
        after every pass over the weights. A caller may close the iterator early: then all memory is freed."""
        job = job_of(requests, self.row_maker)
        if not job.sizes:
            return
        stream, planned = self._planned_stream(job, on_token is not None, on_stage)
        picker, ticker = Picker(Sampler(seed), on_token, None, planned.scored_at_once), Ticker(on_tick)
        running = Running(self.loaded.ready(on_stage), picker, on_visit, on_shrink, may_shrink, stop_at, ticker)
        with closing(running.seated(planned, stream.waiting())) as ended:
            yield from stream.completions(ended, ticker)
        counts = ticker.requests_done, stream.prompt_tokens, stream.generated_tokens
        self.stats = Stats.counted(*counts, running.done, self.peaks())

    def arrivals(
        self,
        prompt_len: int,
        gen_len: int,
        *,
        rows: int | None = None,
        prefix_room: int | None = None,
        on_stage: OnStage | None = None,
    ) -> Arrivals:
        """Plans the seats of a block for requests that are not known yet, with prompts of `prompt_len` tokens and completions
        of `gen_len` at most. `rows`: the number of seats, if a plan is to be found for them (default: the plan's own).
        `prefix_room`: the tokens kept of common beginnings of requests, which are computed once for all of them (default: as
        many as are useful and fit beside the seats, but none where answers would depend on other requests)."""
        rows = (self.plan.block_size if rows is None else rows) * ROWS_PER_SEAT
        beside = room_of_states(self.spec, self.plan)
        arriving = partial(Workload.arriving, SeatNeed(prompt_len, gen_len), rows, prefix_states=beside)
        if (auto := self._auto) is not None:
            rooms = rooms_to_search(self.plan, prompt_len, prefix_room, beside)
            first_that_fits(rooms, lambda room: auto.provide(arriving(room), True, on_stage))
        scored_at_once = positions_at_once(self.plan, self.spec.vocab)
        for room in prefix_rooms(self.plan, prompt_len, prefix_room, beside):
            planned = self.loaded.planned(arriving(room), None, scored_at_once)
            if planned.fits(self.limits):
                break
        self.loaded.hold_to_limits(planned)
        return Arrivals(planned, self.row_maker)

    def generate_arriving(
        self,
        arrivals: Arrivals,
        *,
        seed: int | None = None,
        on_stage: OnStage | None = None,
        on_tick: OnTick | None = None,
        on_shrink: OnShrink | None = None,
    ) -> Iterator[Arrival]:
        """Runs a block for all requests that wait, and for those that come meanwhile, until none is left. Yields requests as
        they end. The tokens of each row are those that it has alone, as in `generate_stream`."""
        planned, ticker = arrivals.planned, Ticker(on_tick)
        picker = Picker(Sampler(seed), arrivals.on_token, None, planned.scored_at_once)
        running = Running(self.loaded.ready(on_stage), picker, on_shrink=on_shrink, ticker=ticker)
        with closing(running.seated(planned, arrivals)) as ended:
            for arrival in arrivals.over(ended):
                ticker.requests_done += 1
                yield arrival

    def plan_job(self, job: Job) -> WorkloadPlan:
        """Plans a job as `generate_stream` runs it; refuses what does not fit, before anything is loaded."""
        return self._planned_stream(job, streamed=False, on_stage=None)[1]

    def _planned_stream(self, job: Job, streamed: bool, on_stage: OnStage | None) -> tuple[Stream, WorkloadPlan]:
        """The job as it fits. Prefixes without room are not shared, the longest first, unless answers would depend on that."""
        stream = Stream(job, self.row_maker, streamed)
        planned = self._planned_for(stream.workload, stream.asks_of_prompts, on_stage)
        all_shared = stream.longest_shared
        may_share_less = not self.plan.answers_depend_on_prefixes
        while may_share_less and stream.longest_shared and not planned.fits(self.limits):
            stream = Stream(job, self.row_maker, streamed, stream.longest_shared // 2)
            planned = self._planned_for(stream.workload, stream.asks_of_prompts, on_stage)
        self.loaded.hold_to_limits(planned)
        if stream.longest_shared < all_shared:
            warnings.warn(
                f"the longest prefix that prompts share has {all_shared} tokens, and there is no room for more than "
                f"{stream.longest_shared}: such prompts are read one by one; give more memory, or a smaller batch",
                RuntimeWarning,
                stacklevel=2,
            )
        return stream, planned

    @property
    def row_maker(self) -> RowMaker:
        return RowMaker(self.spec, self.plan, self.tokenizer, self.loaded.adapters)

    def _adapted(self, params: Params, asked: Adapted, count: int) -> list[SamplingParams]:
        """The parameters of prompts with the adapters that are asked for, which are taken if they are new."""
        each, own = adapters_of_prompts(asked, count), for_each(params, count)
        for one in dict.fromkeys(each):
            if one is not None:
                self.loaded.take_adapter(one.lora_name, one.lora_path)
        return params_with_adapters(own, each)

    def _prepared(
        self, rows: Sequence[RowState], on_stage: OnStage | None, planned: WorkloadPlan | None = None
    ) -> PreparedRows:
        own = self._planned_for(workload_of(rows), any(row.params.asks_of_prompt for row in rows), on_stage)
        planned = planned if planned == own else own
        self.loaded.hold_to_limits(planned)
        return PreparedRows(rows, planned)

    def _planned_for(self, workload: Workload, asks_of_prompts: bool, on_stage: OnStage | None) -> WorkloadPlan:
        if self._auto is not None:
            self._auto.provide(workload, asks_of_prompts, on_stage)
        return self.loaded.planned(workload, None, positions_at_once(self.plan, self.spec.vocab) if asks_of_prompts else 0)

    def chat(
        self,
        messages: Iterable[object],
        sampling_params: Params = None,
        *,
        style: str = AUTO,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool = True,
        seed: int | None = None,
        use_tqdm: UseTqdm = False,
        on_token: OnToken | None = None,
        on_completion: OnCompletion | None = None,
        lora_request: Adapted = None,
        **unknown: object,
    ) -> list[Completion]:
        """Answers a chat, which is a list of {"role": ..., "content": ...}, or each of a list of chats. They are rendered by
        the model's chat template, or by the text of another one (`chat_template`). Without one they are a script of User: and
        Assistant:. `style` chooses one of these, or "plain". `tools` are functions in OpenAI's form that the model may call, or
        must (`tool_choice`). `chat_template_kwargs` are other names that the template looks at. A completion's `message` has
        the text as it was said, apart from thoughts and calls. Each call computes the whole chat again: `converse` keeps its
        cache."""
        refuse_unknown("argument", unknown, arguments_of(LLM.chat), ARGUMENTS)
        use = read_tool_use(tools, tool_choice, parallel_tool_calls)
        written = choose_style(style, self.tokenizer, template=chat_template)
        chats = read_chats(messages)
        params = self._adapted(sampling_params, lora_request, len(chats))
        settings = read_settings(chat_template_kwargs)
        asked = [written.asked(chat, one, use, settings) for chat, one in zip(chats, params)]

        def read(completion: Completion) -> Completion:
            return with_message(completion, written.reading(completion.prompt, params[completion.index], use))

        given = [{"prompt": prompt.text, "prompt_token_ids": prompt.ids} for prompt, _ in asked]
        own = [one for _, one in asked]
        hear = None if on_completion is None else lambda completion: on_completion(read(completion))
        found = self.generate(given, own, seed=seed, use_tqdm=use_tqdm, on_token=on_token, on_completion=hear)
        return [read(completion) for completion in found]

    def score(
        self,
        pairs: Pairs,
        *,
        by: str | None = None,
        lora_request: Adapted = None,
        on_token: OnToken | None = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
    ) -> list[Scored]:
        """Scores how likely each continuation is after its context, in the order of the pairs, which are texts or token ids.
        `by` is "prefill": in one pass, which is refused if the cache evicts or rounds; "decode": token by token, through the
        cache; None: prefill where it is allowed, otherwise decode. `lora_request`: the adapter of all pairs, or one or None for
        each. `on_token` gets every scored token."""
        by = way_of(self.plan, by)
        contexts, continuations = read_pairs(pairs, self.tokenizer)
        if not contexts:
            return []
        params = self._adapted(params_of(continuations), lora_request, len(contexts))
        rows = self.row_maker.rows(contexts, params, False, continuations)
        if self._auto is not None:
            self._auto.provide(workload_of(rows), True, on_stage)
        at_once = positions_at_once(self.plan, self.spec.vocab) if by == PREFILL else 0
        scorer = Scorer(rows, self.tokenizer, at_once, on_token) if by == PREFILL else None
        groups = decode_groups(rows, self.plan) if scorer is None else [scorer.texts]
        plans = {workload: self.loaded.fitting(workload, at_once) for workload in dict.fromkeys(map(workload_of, groups))}
        at_head = scorer or Picker(Sampler(0), on_token)
        running = Running(self.loaded.ready(on_stage), at_head, on_visit, on_shrink, may_shrink)
        running.to_the_end(PreparedRows(group, plans[workload_of(group)]) for group in groups)
        self.stats = Stats.of([row for group in groups for row in group], running.done, self.peaks())
        return [scored_of(row.completion()) for row in rows] if scorer is None else scorer.in_order

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: str = LAST,
        normalize: bool = True,
        truncate: Truncate = None,
        lora_request: Adapted = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
        **unknown: object,
    ) -> list[Embedding]:
        """Returns a vector for each prompt, made of the model's last hidden states, behind its last norm: that of the last
        token, their mean, or that of the first token ("cls"). No token is picked. `normalize` brings it to the length 1. A
        prompt that is longer than `truncate` loses its end, and its Embedding says how much; True stands for the longest that
        the model can read. `lora_request`: the adapter of all prompts, or one or None for each."""
        refuse_unknown("argument", unknown, arguments_of(LLM.embed), INSTEAD)
        read = read_prompts(prompts, self.tokenizer)
        asked = self._adapted(PoolingParams(pooling=pooling, normalize=normalize), lora_request, len(read))
        heard = Heard(on_stage, on_visit, on_shrink, may_shrink)
        return [row.embedded() for row in self._pooled(read, asked, truncate, heard)]

    def classify(
        self,
        prompts: Prompts,
        *,
        truncate: Truncate = None,
        lora_request: Adapted = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
        **unknown: object,
    ) -> list[Classification]:
        """Returns the scores of the model's labels for each prompt, of its last token that is no pad, with their probabilities.
        The model is a checkpoint of a ...ForSequenceClassification. `truncate` and `lora_request` are those of `embed`."""
        refuse_unknown("argument", unknown, arguments_of(LLM.classify), CLASSIFYING)
        heard = Heard(on_stage, on_visit, on_shrink, may_shrink)
        read = read_prompts(prompts, self.tokenizer)
        asked = self._adapted(ClassifyParams(), lora_request, len(read))
        return [row.classified() for row in self._pooled(read, asked, truncate, heard)]

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_n: int | None = None,
        template: str | None = None,
        truncate: Truncate = None,
        lora_request: Adapted = None,
        on_stage: OnStage | None = None,
        on_visit: OnVisit | None = None,
        on_shrink: OnShrink | None = None,
        may_shrink: bool = True,
        **unknown: object,
    ) -> list[Ranked]:
        """Returns the documents, those first that answer the query best, or the best `top_n`. The model is a checkpoint of a
        ...ForSequenceClassification with one label. A query and a document are read as the tokenizer puts pairs of texts
        together, or in a `template`, a text with {query} and {document}. `truncate` and `lora_request` are those of `embed`."""
        refuse_unknown("argument", unknown, arguments_of(LLM.rank), RANKING)
        pairs = read_documents(query, documents, template)
        heard = Heard(on_stage, on_visit, on_shrink, may_shrink)
        read = [pair.read_with(self.tokenizer) for pair in pairs]
        asked = self._adapted(ClassifyParams(ranks=True), lora_request, len(read))
        each = [row.classified() for row in self._pooled(read, asked, truncate, heard)]
        told = zip(each, pairs, strict=True)
        return best_first([Ranked(one.index, pair.document, one.probs[0], one.truncated_tokens) for one, pair in told], top_n)

    def _pooled(self, prompts: Sequence[Prompt], asked: Params, truncate: Truncate, heard: Heard) -> Sequence[RowState]:
        """The rows of prompts that are only read."""
        most = most_read(read_truncate(truncate), self.row_maker.longest_prompt)
        rows = self.row_maker.rows([shortened(one, most, self.tokenizer) for one in prompts], asked)
        if not rows:
            return []
        prepared = self._prepared(rows, heard.on_stage)
        picker = Picker(Sampler(0), prompt_positions=prepared.planned.scored_at_once)
        running = Running(self.loaded.ready(heard.on_stage), picker, heard.on_visit, heard.on_shrink, heard.may_shrink)
        running.to_the_end([prepared])
        self.stats = Stats.of(rows, running.done, self.peaks())
        return rows

    def converse(
        self,
        context: int | None = None,
        *,
        seed: int | None = None,
        lora_request: LoRARequest | None = None,
        on_stage: OnStage | None = None,
    ) -> Conversation:
        """Opens a text that continues turn by turn, and keeps its KV cache. It may grow to `context` tokens (default: the
        model's positions); with rolling positions it has no limit. `lora_request`: the adapter of all turns. Until it is closed
        nothing else can be generated."""
        if self.spec.labels is not None:
            raise ValueError(f"{self.name} scores texts by labels and picks no tokens; use classify, rank or embed")
        if self._auto is not None and not self._auto.has_plan:
            raise ValueError("percent 'auto' finds plans for generate, chat and score; for a conversation give six numbers")
        (own,) = self._adapted(None, lora_request, 1)
        adapter, extent = self.loaded.adapters.number(own.lora_name), Extent.of(self.spec, self.plan, context)
        try:
            planned = self.loaded.fitting(extent.workload)
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}; or give a shorter context, or a KV policy that keeps less") from None
        engine = self.loaded.ready(on_stage)
        self.loaded.conversation = Conversation(engine, planned, self.tokenizer, extent, seed, adapter)
        return self.loaded.conversation

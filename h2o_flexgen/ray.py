"""Engine: an LLM as an actor of Ray Data, for pipelines over more texts than one machine should read.

    dataset.map_batches(Engine, batch_size=256, num_cpus=16, compute=ray.data.ActorPoolStrategy(size=4),
        fn_constructor_kwargs={"model": "facebook/opt-1.3b"})

Each actor holds a model under a plan for its own machine.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import not_installed, shown
from h2o_flexgen.engine.generate import ListedJob
from h2o_flexgen.engine.job import BrokenRequest, Outcome, Request, without_number
from h2o_flexgen.engine.reports import OnTick
from h2o_flexgen.engine.restarted_run import RestartedRun
from h2o_flexgen.engine.row_maker import RowMaker
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.host import available_bytes, bytes_to_begin_with
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.structured_outputs import FORMAT, NAME
from h2o_flexgen.session.open_request import OpenRequest
from h2o_flexgen.text.dialogue import choose_style
from h2o_flexgen.text.prompts import Prompt, read_chats, read_prompts

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(not_installed("Ray", "ray") if error.name == "ray" else str(error)) from error

PROMPT, MESSAGES, SAMPLING, INDEX = "prompt", "messages", "sampling_params", "index"  # columns that are read
Columns: TypeAlias = "dict[str, np.ndarray]"


class Engine:
    """Answers batches of rows. A row has a `prompt` (a text or token ids) or `messages` (a chat). It may have
    `sampling_params`, a dict of parameters that differ from the usual ones, and `index`, the row's number in the whole input,
    which seeds its random draws. All columns are passed on, with those of the answers beside them. A wrong row has the reason
    in `error`, which is empty for all others."""

    def __init__(
        self,
        model: str,
        *,
        sampling_params: Mapping[str, object] | SamplingParams | None = None,
        seed: int = 0,
        style: str = AUTO,
        **options: object,
    ) -> None:
        """`options` are those of LLM. Without a plan or percent among them, a plan is found for the first batch, on this
        actor's machine. Without cpu_mem, the actor may use the share of the machine's memory that Ray has given to it."""
        params = _params(SamplingParams(), sampling_params)
        given = {} if options.keys() & {"plan", "percent"} else {"percent": AUTO}
        memory = {} if options.get("cpu_mem") else {"cpu_mem": memory_of_actor()}
        llm = LLM(model, **{**options, **given, **memory})  # type: ignore[arg-type]
        self._hold(llm, params, seed, style)

    @classmethod
    def of(cls, request: OpenRequest, seed: int, style: str) -> Engine:
        """The engine of a request, as workers of a job make it."""
        site = replace(request.site, cpu_mem=request.site.cpu_mem or memory_of_actor())
        engine = cls.__new__(cls)
        engine._hold(LLM.of(replace(request, site=site)), SamplingParams(), seed, style)
        return engine

    def _hold(self, llm: LLM, params: SamplingParams, seed: int, style: str) -> None:
        self.llm, self._params, self._seed = llm, params, seed
        self._closer = weakref.finalize(self, llm.close)
        self.style = choose_style(style, llm.tokenizer)

    def close(self) -> None:
        self._closer()

    def __call__(self, batch: Columns) -> Columns:
        rows = [dict(zip(batch, values)) for values in zip(*batch.values())]
        asked = self._asked(rows)
        requests = [one for one in asked if isinstance(one, Request)]
        answers = {one.index: one for one in self.outcomes(requests)}
        found = [answers[one.index] if isinstance(one, Request) else one for one in asked]  # type: ignore[index]
        return {**batch, **_columns([_answer(one) for one in found])}

    def outcomes(self, requests: Sequence[Request], on_tick: OnTick | None = None) -> Generator[Outcome, None, None]:
        """What becomes of each request, as they end. One that breaks does not break the others."""
        generate = partial(self.llm.generate_stream, seed=self._seed)
        return RestartedRun(generate, ListedJob.of(requests, self.row_maker), on_tick).outcomes()

    @property
    def row_maker(self) -> RowMaker:
        return self.llm.row_maker

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _asked(self, rows: Sequence[Mapping[str, object]]) -> list[Request | str]:
        """The request of each row, or the reason why the row is wrong."""
        known: Counter[int] = Counter()
        asked: list[Request | str] = []
        for row in rows:
            try:
                request = self._request(row, known)
                self._check(request)
            except ValueError as error:
                asked.append(str(error))
            else:
                asked.append(request)
        return asked

    def _request(self, row: Mapping[str, object], known: Counter[int]) -> Request:
        params = _params(self._params, row.get(SAMPLING))
        messages = row.get(MESSAGES)
        if messages is not None:
            (chat,) = read_chats([list(messages)])  # type: ignore[call-overload]
            prompt, params = self.style.asked(chat, params)
        else:
            (prompt,) = read_prompts([_prompt(row)], self.llm.tokenizer)
        return Request(prompt, params, _index(row, prompt, known))

    def _check(self, request: Request) -> None:
        """Refuses requests that cannot be run, and options for which rows have no columns."""
        assert request.index is not None and request.params is not None, "both were given"
        asked = request.params
        if asked.n != 1:
            raise ValueError(f"n is {asked.n}; a row has one answer, so write a row for each, with an index of its own")
        if asked.logprobs is not None or asked.prompt_logprobs is not None:
            raise ValueError("logprobs have no column; leave them out, or ask LLM for them")
        try:
            self.row_maker.size(request.index, request)
        except ValueError as error:  # a number that was made up means nothing to the user
            raise ValueError(without_number(str(error), request.index)) from error


# -- what a row asks -------------------------------------------------------------------------------------------------------


def _params(usual: SamplingParams, given: object) -> SamplingParams:
    """The usual parameters, replaced by those that are given. A row has None where only other rows give a parameter."""
    if given is None or isinstance(given, SamplingParams):
        return usual if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(f"{SAMPLING} is {shown(given)}; it is a dict like {{'max_tokens': 32, 'temperature': 0.7}}")
    changed = {name: _plain(value) for name, value in given.items() if value is not None}
    held = {NAME: None} if FORMAT in changed else {}  # whatever other rows are held to
    return SamplingParams(**{**{each.name: getattr(usual, each.name) for each in fields(usual)}, **held, **changed})


def _prompt(row: Mapping[str, object]) -> object:
    if row.get(PROMPT) is None:
        raise ValueError(f"the row has neither {PROMPT} nor {MESSAGES}; its columns are {shown([*row])}")
    return _plain(row[PROMPT])


def _plain(value: object) -> object:
    """A value of an array as a plain Python value."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _index(row: Mapping[str, object], prompt: Prompt, known: Counter[int]) -> int:
    """The row's number. Without one it is derived from the prompt, so that a row draws the same wherever it runs."""
    given = _plain(row.get(INDEX))
    if given is None:
        digest = blake2b(np.array(prompt.ids, np.int64).tobytes(), digest_size=7).digest()
        number = int.from_bytes(digest, "big") << 7
        known[number] += 1
        return number + known[number]
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < 1 << 63:
        raise ValueError(f"{INDEX} is {shown(given)}; it is the row's number in the whole input, from 0")
    known[given] += 1
    if known[given] > 1:
        raise ValueError(f"{INDEX} is {given}, which an earlier row has; give each row a number of its own")
    return given


# -- answers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """The columns that are added to those of a row."""

    generated_text: str = ""
    generated_tokens: tuple[int, ...] = ()
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    finish_reason: str = ""
    error: str = ""


def _answer(found: Outcome | str) -> _Answer:
    if isinstance(found, str):
        return _Answer(error=found)
    if isinstance(found, BrokenRequest):
        return _Answer(error=without_number(found.reason, found.index))
    count = len(found.token_ids)
    return _Answer(found.text, found.token_ids, len(found.prompt_token_ids), count, found.finish_reason)


def _columns(answers: Sequence[_Answer]) -> Columns:
    columns = {}
    for each in fields(_Answer):
        values = [getattr(one, each.name) for one in answers]
        if isinstance(each.default, int):
            columns[each.name] = np.array(values, np.int64)
        else:
            columns[each.name] = np.empty(len(values), object)
            for place, value in enumerate(values):
                columns[each.name][place] = list(value) if isinstance(value, tuple) else value
    return columns


# -- the share of an actor -------------------------------------------------------------------------------------------------


def memory_of_actor() -> int | None:
    """The host memory that Ray has given to this actor: the amount requested for it, or else the share that its cores or
    accelerators have of its machine's. None outside of actors."""
    if not ray.is_initialized() or (context := ray.get_runtime_context()).get_actor_id() is None:
        return None
    given = context.get_assigned_resources()
    if "memory" in given:
        return int(given["memory"])
    (node,) = (one["Resources"] for one in ray.nodes() if one["NodeID"] == context.get_node_id())
    share = max((given.get(name, 0) / node[name] for name in ("CPU", "GPU") if node.get(name)), default=1)
    return min(int((share or 1) * node["memory"]), available_bytes() + bytes_to_begin_with())

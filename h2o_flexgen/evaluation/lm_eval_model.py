"""LmEvalModel: an LLM under a plan as a model of lm-evaluation-harness. Texts become tokens exactly as in the harness's own
`hf`."""

from __future__ import annotations

import logging
import random
import re
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import TYPE_CHECKING, TypeAlias

from h2o_flexgen.core.allowed_values import AUTO, whole_number
from h2o_flexgen.core.hints import did_you_mean, not_installed, shown
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import Plan, six_numbers
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.open_request import HEAD_BUDGETS, PROBE
from h2o_flexgen.text.chat_template import render, render_unfinished
from h2o_flexgen.text.word_tokenizer import WordTokenizer

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
except ModuleNotFoundError as error:
    missing = not_installed("lm-evaluation-harness", "eval")
    raise ModuleNotFoundError(missing if error.name == "lm_eval" else str(error)) from error

from jinja2.exceptions import TemplateError
from tqdm import tqdm

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Pair: TypeAlias = "tuple[tuple[str, str] | None, list[int], list[int]]"  # the texts (None: a window of one), and their tokens
Messages: TypeAlias = "list[dict[str, str]]"

MAX_GEN_TOKS = 256  # if a task gives none: as in `hf`
NOT_FOR_EVALUATION = ("model", "plan", "on_stage", "dummy_weights", "plan_options")
SAMPLED_BY = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
WITHOUT_EFFECT: Mapping[str, object] = {"do_sample": None, "num_beams": 1, "num_return_sequences": 1, "use_cache": True}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _GenerationRequest:
    """One request to generate."""

    context: list[int]
    params: SamplingParams
    max_tokens: int
    until: list[str]


class LmEvalModel(TemplateLM):  # type: ignore[misc]  # untyped where it is installed, and unknown where it is not
    """A model of the harness. It scores in one pass if the cache keeps everything, otherwise token by token with the cache."""

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: object,
    ) -> None:
        """`options` are those of LLM: percent, dtype, cpu_mem, gpu_batch_size, kv_policy, kv_budget, ..."""
        super().__init__()
        if not pretrained:
            raise ValueError("no model is given; add pretrained=NAME or pretrained=FOLDER to the model_args")
        self.llm = LLM(str(pretrained), **_engine_options(options, batch_size, max_batch_size))  # type: ignore[arg-type]
        self._closer = weakref.finalize(self, self.llm.close)  # the harness never closes its models
        if not isinstance(self.llm.tokenizer, WordTokenizer):
            raise ValueError(
                f"{pretrained} has no tokenizer that reads words; put its files beside the model, or add tokenizer=FOLDER "
                "to the model_args"
            )
        self.tokenizer = self.llm.tokenizer.of_transformers
        if add_bos_token is not None:  # passed only if given: it changes how a tokenizer is made
            self.tokenizer = self.llm.tokenizer.made_again(adds_start=add_bos_token)
        self._add_bos = add_bos_token
        self._prefix = prefix_token_id
        self.max_length = _length(max_length, self.llm)

    def close(self) -> None:
        self._closer()

    # -- what it is ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        found = self.tokenizer.eos_token_id
        return None if found is None else int(found)

    @property
    def prefix_token_id(self) -> int:
        """The token that is put before a text without context."""
        for token in (self._prefix, self.tokenizer.bos_token_id, self.eot_token_id):
            if token is not None:
                return int(token)
        raise ValueError(f"the tokenizer of {self.llm.name} has no start and no end of text; give prefix_token_id")

    @property
    def max_gen_toks(self) -> int:
        return MAX_GEN_TOKS

    @property
    def batch_size(self) -> int:
        return self.llm.plan.gpu_batch_size

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, object]:
        """What the harness records about the model."""
        plan, spec = self.llm.plan, self.llm.spec
        kept = {one.name: value for one in fields(plan.kv_options) if (value := getattr(plan.kv_options, one.name)) is not None}
        known = plan.as_json()
        files = {name: known[name] for name in (HEAD_BUDGETS, PROBE) if known[name] is not None}
        policy = {"kv_policy": plan.kv_policy, "kv_options": kept, **files}
        codecs = {"weight_codec": plan.weight_codec, "kv_codec": plan.kv_codec, "compute": plan.compute}
        return {"model_dtype": spec.dtype, "percent": plan.percent, **policy, **codecs}

    # -- texts and tokens ------------------------------------------------------------------------------------------------

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: object) -> list[int]:
        """Encodes a text with the tokenizer's own start token, unless the text has it already or the caller chose otherwise."""
        special = self._add_bos if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self._written(self.prefix_token_id)):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer(string, verbose=False, **options)["input_ids"])

    def _written(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        """Renders the text that `hf` makes, with bounded work. Without a generation prompt the last message is continued."""
        rendered = render if add_generation_prompt else render_unfinished

        def attempt(messages: Messages) -> str:
            return rendered(self.tokenizer.get_chat_template(), messages, self.tokenizer.special_tokens_map)

        try:
            try:
                return attempt(chat_history)
            except TemplateError:
                log.warning("the chat template refuses these messages; trying again without the system messages")
                return attempt([message for message in chat_history if message["role"] != "system"])
        except Exception as error:  # a template may raise anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"the model's chat template refuses these messages ({shown(reason)})") from error

    # -- loglikelihoods --------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **unused: object
    ) -> list[tuple[float, bool]]:
        pairs = self._cut([(context, continuation) for _, context, continuation in requests])
        total = sum(len(continuation) for _, continuation in pairs)
        with tqdm(total=total, disable=disable_tqdm, desc="Running loglikelihood requests", unit=" tokens") as bar:
            scored = self.llm.score(pairs, on_token=lambda *_: bar.update())
        answers = [(one.logprob, one.greedy == tuple(after)) for one, (_, after) in zip(scored, pairs, strict=True)]
        for (texts, _, _), answer in zip(requests, answers):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _cut(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
        """Cuts the beginning off texts that are too long. The last token is scored, but is no input of the model."""
        longest = max((len(after) for _, after in pairs), default=0)
        if longest > self.max_length:
            raise ValueError(f"a continuation has {longest} tokens, but max_length is {self.max_length}; it cannot be scored")
        cut = [(before[-(self.max_length + 1 - len(after)) :], after) for before, after in pairs]
        self._warn_of_cuts(sum(len(short) < len(whole) for (short, _), (whole, _) in zip(cut, pairs)), len(pairs))
        return cut

    def _warn_of_cuts(self, count: int, of: int) -> None:
        if count:
            words = "%d of %d texts are too long for the %d tokens of a context: their left ends are cut off"
            log.warning(words, count, of, self.max_length)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[Pair] = []
        ends = []
        for (text,) in (request.args for request in requests):
            rolling = utils.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [(None, *utils.make_disjoint_window(window)) for window in rolling]
            ends.append(len(windows))
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        sums = [sum(score for score, _ in answers[start:end]) for start, end in zip([0, *ends], ends)]
        for request, total in zip(requests, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    # -- generation ------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates. Rows of one maximum length are a workload, as a budget may be a share of that length."""
        asked = [self._asked(*request.args) for request in requests]
        room = [self.max_length - one.max_tokens for one in asked]
        self._warn_of_cuts(sum(len(one.context) > kept for one, kept in zip(asked, room)), len(asked))
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for place, one in enumerate(asked):
            groups[one.max_tokens].append(place)
        texts: dict[int, str] = {}
        with tqdm(disable=disable_tqdm, desc="Running generate_until requests", unit=" tokens") as bar:
            for places in groups.values():
                completions = self.llm.generate(
                    [asked[place].context[-room[place] :] for place in places],
                    [asked[place].params for place in places],
                    seed=random.getrandbits(32),  # seeded by the harness
                    on_token=lambda *_: bar.update(),
                )
                for place, completion in zip(places, completions, strict=True):
                    text = str(self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))
                    texts[place] = postprocess_generated_text(text, asked[place].until, None)
                    self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
        return [texts[place] for place in range(len(requests))]

    def _asked(self, context: str, given: Mapping[str, object]) -> _GenerationRequest:
        options = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        end = None if self.eot_token_id is None else self._written(self.eot_token_id)
        until = [text for text in handle_stop_sequences(options.pop("until", None), eos=end) if text]
        max_tokens = options.pop("max_gen_toks")
        if max_tokens >= self.max_length:
            raise ValueError(f"max_gen_toks is {max_tokens}, but max_length is {self.max_length}; leave room for the context")
        options["temperature"] = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        sampled = {name: options.pop(name) for name in SAMPLED_BY if name in options}
        for name, value in options.items():
            if name not in WITHOUT_EFFECT or WITHOUT_EFFECT[name] not in (None, value):
                raise ValueError(
                    f"generation option {name} is {value!r}, which is not supported; known are {', '.join(SAMPLED_BY)}"
                )
        found = (self._special(text) for text in until)
        special = [token for token in found if token is not None and token < self.llm.spec.vocab]  # others cannot be generated
        texts = tuple(text for text in until if self._special(text) is None)
        params = SamplingParams(max_tokens=max_tokens, stop=texts, stop_token_ids=special, **sampled)
        return _GenerationRequest(self.tok_encode(context) or [self.prefix_token_id], params, max_tokens, until)

    def _special(self, text: str) -> int | None:
        """The token of a stop string that is a special token, and so never appears in a text."""
        token = self.tokenizer.convert_tokens_to_ids(text)
        return token if token in self.tokenizer.all_special_ids and text in self.tokenizer.all_special_tokens else None


def _engine_options(
    options: Mapping[str, object], batch_size: int | str | None, max_batch_size: int | None
) -> dict[str, object]:
    """The options of the harness as arguments of LLM."""
    own = [name for name in signature(LmEvalModel).parameters if name != "options"]
    taken = [name for name in (*signature(LLM).parameters, *Plan.option_names()) if name not in NOT_FOR_EVALUATION]
    for name in options:
        if name not in taken:
            raise ValueError(f"unknown model argument {name!r}{did_you_mean(name, [*own, *taken])}")
    chosen = dict(options)
    for name in ("cpu_mem", "gpu_mem", "disk_mem"):
        if isinstance(value := chosen.get(name), float):  # 8e9
            chosen[name] = int(value)
    if isinstance(percent := chosen.get("percent"), str) and percent != AUTO:
        chosen["percent"] = _percent(percent)
    size = _batch_size(chosen.get("gpu_batch_size"), batch_size, max_batch_size)
    return chosen if size is None else {**chosen, "gpu_batch_size": size}


def _percent(text: str) -> list[float]:
    """Six numbers, separated by anything but a comma, which would end the argument."""
    try:
        return six_numbers(re.split(r"[;:/,\s]+", text.strip(" ;:/,[]()")))
    except ValueError:
        raise ValueError(f"percent is {shown(text)}; write six numbers, like 0;50;0;100;0;100, or {AUTO}") from None


def _batch_size(of_plan: object, of_harness: int | str | None, largest: int | None) -> int | None:
    """None means the plan's own. The harness gives 1 if the user has chosen nothing."""
    leaves_it_open = of_harness is None or str(of_harness).startswith(AUTO)
    if of_plan is not None:
        if not leaves_it_open and str(of_harness) not in ("1", str(of_plan)):
            raise ValueError(f"both batch_size {of_harness} and gpu_batch_size {of_plan} are given; give one of them")
        return of_plan if isinstance(of_plan, int) else _number("gpu_batch_size", of_plan)
    if leaves_it_open:
        return None if largest is None else min(int(largest), Plan.gpu_batch_size)
    return _number("batch_size", of_harness)


def _number(name: str, value: object) -> int:
    try:
        return whole_number(str(value))
    except ValueError:
        raise ValueError(f"{name} is {shown(value)}; give a number of rows, or auto for batch_size") from None


def _length(asked: int | None, llm: LLM) -> int:
    """Length of a context, in tokens."""
    most = llm.spec.max_positions
    if asked is None:
        return most
    if not 2 <= asked <= most:
        raise ValueError(f"max_length is {asked}; {llm.name} takes 2 to {most}")
    return asked

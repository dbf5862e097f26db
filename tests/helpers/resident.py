"""The plain loop that the engine must equal bit for bit: everything resident, one batch, the model's own layer functions over
the engine's own KVCache on plain tensors. No schedule, no slots, no tiers, no threads. Where KV heads keep different shares,
those of a level are a cache, and each head's part of the outcome is put in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import probe_bytes
from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.stores.layer_judges import linear_judges
from h2o_flexgen.engine.stores.states_of_visits import EchoedStates
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kv.cache import AttentionInput, KVCache
from h2o_flexgen.kv.judges import Judge, judge_of
from h2o_flexgen.kv.key_index import KeyIndex
from h2o_flexgen.kv.slots import Coding, SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.base import Given, Matrix, Model, Weights, computed, logits, nothing_to_attend
from h2o_flexgen.models.new_tokens import NewTokens, RowStates
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.levels import Level, levels_of
from h2o_flexgen.policies.occupancy import StepSlots
from h2o_flexgen.policies.policy import PROBE, KVPolicy
from h2o_flexgen.policies.recall import ALL, INDEX
from tests.helpers.probes import probe_for


@contextmanager
def unheard() -> Iterator[None]:
    """A context in which nothing listens to what torch does: a test that listens wants to hear the engine."""
    with torch._C._DisableTorchDispatch():
        yield


Pick = Callable[[Sequence[Tensor]], Tensor]  # logits of all steps so far -> (rows,)
States = Mapping[int, Mapping[str, Tensor]]  # by layer, and by name: (rows, ...)


def likeliest(made: Sequence[Tensor]) -> Tensor:
    return made[-1].argmax(-1)


def weights_by_layer(model: Model, tensors: Mapping[str, Tensor]) -> list[Weights]:
    """Groups `tensors`, given by their names in the checkpoint, by layer."""
    dtypes = {model.spec.itemsize: getattr(torch, model.spec.dtype), 4: torch.float32}
    return [{name: tensors[spec.name].to(dtypes[spec.itemsize]) for name, spec in layer.tensors} for layer in model.spec.layers]


@unheard()
@torch.inference_mode()
def resident_generate(
    model: Model,
    weights: Sequence[Weights],
    prompts: Sequence[Sequence[int]],
    steps: int,
    by_token: bool = False,
    policy: KVPolicy | Sequence[Level] | None = None,
    prefill_tokens: int = Plan.prefill_tokens,
    kv_codec: str = PLAIN,
    forced: Sequence[Sequence[int]] | None = None,
    beside: Set[int] = frozenset(),
    pick: Pick = likeliest,
) -> list[Tensor]:
    """Generates greedily, or with forced tokens; returns for every step the logits (rows, vocab). `by_token`: caches lie slot
    by slot, as beside an accelerator. `beside`: the attentions, by number, whose decode steps the host does. `pick`: how the
    next tokens follow from the logits so far."""
    levels, device = _levels(model, policy), _device(weights)
    within = _echoes_within(model, levels)
    batch = Batch(tuple(range(len(prompts))), tuple(map(len, prompts)), echoes_within=within)
    each = [level.policy.occupancy(batch, steps) for level in levels]
    capacities = [occupancy.capacity for occupancy in each]
    caches = _caches(model, levels, len(prompts), capacities, by_token, device, kv_codec)
    states = _states(model, len(prompts), device)
    parts = [
        _last_of_prompts(model, weights, caches, states, levels, part, prompts, steps, capacities, device, prefill_tokens)
        for part in batch.parts(prefill_tokens)
    ]
    states = _kept(model, states)
    attended = caches | {layer: caches[layer].beside() for number, layer in enumerate(model.spec.kv_layers) if number in beside}
    made = [_head(model, torch.cat(parts), weights[-1])]
    for step in range(1, steps):
        picked = pick(made) if forced is None else torch.tensor([own[step - 1] for own in forced], device=device)
        tokens, now = picked[:, None], _now([occupancy.at(step) for occupancy in each], capacities, device)
        made.append(_head(model, _through_layers(model, weights, attended, now, tokens, states=states)[:, 0], weights[-1]))
    return made


def _levels(model: Model, policy: KVPolicy | Sequence[Level] | None) -> Sequence[Level]:
    spec = model.spec
    if policy is not None and not isinstance(policy, KVPolicy):
        return policy
    return levels_of(policy or Full(), None, spec)


def _echoes_within(model: Model, levels: Sequence[Level]) -> int | None:
    return model.spec.max_positions if any(level.policy.echoes for level in levels) else None


def _now(
    slots: Sequence[StepSlots],
    capacities: Sequence[int],
    device: torch.device,
    prefixes: Sequence[SharedPrefix | None] = (),
    within: int | None = None,
) -> list[KVStep]:
    """A step as each level has it."""
    each = zip(slots, capacities, strict=True)
    return [KVStep.of(own, capacity, device, prefixes, echoes_within=within) for own, capacity in each]


class _Layer:
    """The caches of a layer: the number of a level, its heads of this layer, and their cache."""

    def __init__(self, caches: Sequence[tuple[int, Sequence[int], KVCache]], is_beside: bool = False) -> None:
        self.caches = caches
        self._attended = [_Beside(cache) if is_beside else cache for _, _, cache in caches]

    def beside(self) -> _Layer:
        return _Layer(self.caches, is_beside=True)

    def part(self, rows: slice) -> _Layer:
        return _Layer([(level, heads, cache.part(rows)) for level, heads, cache in self.caches])

    def stands_behind(self, other: _Layer) -> None:
        for (_, _, cache), (_, _, prefix) in zip(self.caches, other.caches, strict=True):
            cache.prefixes = {0: prefix}

    def attend(self, now: Sequence[KVStep], tokens: NewTokens) -> Tensor:
        if len(self.caches) == 1:
            return self._attended[0].attend(now[self.caches[0][0]], tokens)
        q, k, v, sink_scores = tokens.q, tokens.k, tokens.v, tokens.sink_scores
        group, of_head = q.shape[2] // k.shape[2], {}
        for (level, heads, _), cache in zip(self.caches, self._attended):
            own_q = torch.cat([q[:, :, head * group : (head + 1) * group] for head in heads], dim=2)
            own_k, own_v = (torch.stack([x[:, :, head] for head in heads], dim=2) for x in (k, v))
            own_sinks = None
            if sink_scores is not None:
                own_sinks = torch.cat([sink_scores[head * group : (head + 1) * group] for head in heads])
            own = replace(tokens, q=own_q, k=own_k, v=own_v, sink_scores=own_sinks)
            out = cache.attend(now[level], own)
            of_head |= dict(zip(heads, out.chunk(len(heads), dim=2), strict=True))
        return torch.cat([of_head[head] for head in range(k.shape[2])], dim=2)


class _Beside:
    """A cache whose prompts are read, as the host has it, head by head: what is asked crosses the link, and the answer."""

    def __init__(self, cache: KVCache) -> None:
        noted, index = cache._scores, cache._index
        self._asking, host = cache, torch.device("cpu")
        on_host = None if noted is None else noted._each(lambda each: each.to(host))
        if index is not None and index.codes is not None:
            index = replace(index, codes=index.codes.to(host))
        self._cache = KVCache(cache.image.to(host).contiguous(), on_host, cache._coding, cap=cache._cap, index=index)

    def attend(self, now: KVStep, tokens: NewTokens) -> Tensor:
        asked = self._asking.asked(now, tokens)
        worth = None if asked.worth is None else asked.worth.cpu()
        more = asked.more and More(asked.more.scores.cpu(), None)
        v = None if asked.v is None else asked.v.cpu()
        there = AttentionInput(asked.q.cpu(), asked.k.cpu(), v, more, worth)
        return self._cache.answer(now.on(torch.device("cpu")), there, tokens.rotation).to(tokens.q.device)


def _device(weights: Sequence[Weights]) -> torch.device:
    return next(weight.device for weight in weights[0].values() if isinstance(weight, Tensor))


def _last_of_prompts(
    model: Model,
    weights: Sequence[Weights],
    caches: Mapping[int, _Layer],
    states: States,
    levels: Sequence[Level],
    part: Batch,
    prompts: Sequence[Sequence[int]],
    steps: int,
    capacities: Sequence[int],
    device: torch.device,
    at_once: int,
) -> Tensor:
    rows = slice(part.rows[0], part.rows[-1] + 1)
    own = {layer: cache.part(rows) for layer, cache in caches.items()}
    own_states = {layer: {name: one[rows] for name, one in each.items()} for layer, each in states.items()}
    padded = [[*prompts[row], *[0] * (part.prompt_len - length)] for row, length in zip(part.rows, part.lengths)]
    slots = [level.policy.occupancy(part, steps).at(0) for level in levels]
    now = _now(slots, capacities, device, within=part.echoes_within)
    tokens = [text if part.echoes_within is None else text + text for text in padded]
    hidden = _through_layers(model, weights, own, now, torch.tensor(tokens, device=device), at_once, own_states, part.lengths)
    return hidden[torch.arange(part.size, device=device), torch.tensor(part.lengths, device=device) - 1]


@unheard()
@torch.inference_mode()
def resident_talk(
    model: Model,
    weights: Sequence[Weights],
    turns: Sequence[Sequence[int]],
    steps: int,
    context: int,
    chunk: int,
    by_token: bool = False,
    policy: KVPolicy | Sequence[Level] | None = None,
    kv_codec: str = PLAIN,
) -> list[list[Tensor]]:
    """Generates greedily for one row whose caches live on; returns for every turn and step the logits (1, vocab)."""
    levels, device, seen, unread = _levels(model, policy), _device(weights), 0, list[int]()
    capacities = [level.policy.occupancy(Batch((0,), (1,), (), context), 1).capacity for level in levels]
    caches, states = _caches(model, levels, 1, capacities, by_token, device, kv_codec), _states(model, 1, device)
    talk = []
    for turn in turns:
        new, made = [*unread, *turn], []
        while new:
            piece, new = new[:chunk], new[chunk:]
            batch, grown = Batch((0,), (len(piece),), (seen,) if seen else (), context), 1 if new else steps
            each = [level.policy.occupancy(batch, grown) for level in levels]
            for step in range(grown):
                within = None if step else _echoes_within(model, levels)
                now = _now([occupancy.at(step) for occupancy in each], capacities, device, within=within)
                tokens = torch.tensor([piece * (1 if within is None else 2)], device=device)
                states = states if step else _in_full(states)
                hidden = _through_layers(model, weights, caches, now, tokens, chunk, states)
                states = states if step else _kept(model, states)
                if not new:
                    made.append(_head(model, hidden[:, len(piece) - 1], weights[-1]))
                    piece = [int(made[-1].argmax())]
            seen = each[0].taken_in[0] + grown - 1
        unread = piece
        talk.append(made)
    return talk


@unheard()
@torch.inference_mode()
def resident_behind(
    model: Model,
    weights: Sequence[Weights],
    prompt: Sequence[int],
    shared: int,
    steps: int,
    policy: KVPolicy | Sequence[Level],
    copies: bool = False,
    kv_codec: str = PLAIN,
) -> list[Tensor]:
    """Generates greedily behind a prompt of which the first tokens are read by themselves: the rest attends them in a cache of
    their own, or takes a copy of that. Returns for every step the logits (1, vocab)."""
    levels, device, prefix = _levels(model, policy), _device(weights), SharedPrefix(0, shared)
    judged = [replace(level, policy=level.policy if copies and level.policy.score_bytes else Full()) for level in levels]
    beginnings = _caches(model, judged, 1, [shared] * len(levels), False, device, kv_codec)
    whole, states = (
        _now([level.policy.whole(shared) for level in levels], [shared] * len(levels), device),
        _states(model, 1, device),
    )
    _through_layers(model, weights, beginnings, whole, torch.tensor([prompt[:shared]], device=device), states=states)
    need = SeatNeed.behind(prefix, len(prompt), steps, copies)
    each, piece, made = [level.policy.alone(need) for level in levels], list(prompt[shared:]), list[Tensor]()
    capacities = [occupancy.capacity for occupancy in each]
    caches = _caches(model, levels, 1, capacities, False, device, kv_codec)
    for layer, cache in caches.items():
        cache.stands_behind(beginnings[layer])
    for step in range(steps):
        copied = shared if copies and not step else 0
        slots = [own.at(step).behind(copied) if copied else own.at(step) for own in each]
        within = None if step else _echoes_within(model, levels)
        now = _now(slots, capacities, device, () if step and copies else (prefix,), within)
        tokens = torch.tensor([piece * (1 if within is None else 2)], device=device)
        hidden = _through_layers(model, weights, caches, now, tokens, states=states)
        states = states if step else _kept(model, states)
        made.append(_head(model, hidden[:, len(piece) - 1], weights[-1]))
        piece = [int(made[-1].argmax())]
    return made


def _through_layers(
    model: Model,
    weights: Sequence[Weights],
    caches: Mapping[int, _Layer],
    now: Sequence[KVStep],
    tokens: Tensor,
    at_once: int = Plan.prefill_tokens,
    states: States | None = None,
    lengths: Sequence[int] = (),
) -> Tensor:
    """The hidden states behind all layers. A prompt of more tokens than are computed at once goes through each in pieces.
    `lengths`: of the rows' prompts."""
    hidden, pieces = tokens, now[0].pieces(at_once) or (slice(None),)
    real = torch.tensor(lengths, device=tokens.device) if len(set(lengths)) > 1 else None
    for layer, spec in enumerate(model.spec.layers[:-1]):
        attend = partial(caches[layer].attend, now) if spec.has_kv else nothing_to_attend
        own_states = {} if states is None else states.get(layer, {})
        echoes = bool(own_states) and now[0].echoes_within is not None
        of_rows = EchoedStates(own_states, real, step=now[0]) if echoes else RowStates(own_states, real)
        usual = partial(Given, attend=attend, in_heads=now[0].is_prefill, states=of_rows)
        given = (usual(now[0].text_positions[:, piece]) for piece in pieces)
        each = [computed(model, spec, hidden[:, piece], weights[layer], own) for piece, own in zip(pieces, given)]
        hidden = torch.cat(each, dim=1)
    return hidden


def _head(model: Model, hidden: Tensor, weights: Weights) -> Tensor:
    """The logits; a packed matrix goes part by part as in the engine: other products may have other last bits."""
    spec = model.spec.layers[-1]
    name = spec.logit_matrix or ""
    names = [own for own in (name, spec.logit_bias) if own is not None]
    parts = [{**weights, **{own: _part(weights[own], rows) for own in names}} for rows in spec.logit_parts]
    return logits(model, spec, hidden, parts or [weights])


def _part(matrix: Tensor | Matrix, rows: slice) -> Tensor | Matrix:
    if isinstance(matrix, Tensor):
        return matrix[rows]
    assert isinstance(matrix, PackedMatrix)
    assert matrix.room is not None
    return matrix.part(rows, DecodeBuffer(torch.empty_like(matrix.room.values[rows])))


def _caches(
    model: Model,
    levels: Sequence[Level],
    rows: int,
    capacities: Sequence[int],
    by_token: bool,
    device: torch.device,
    kv_codec: str,
) -> dict[int, _Layer]:
    def coding_of(layer: int) -> Coding:
        return Coding.of(replace(model.spec.at(layer), kv_codec=kv_codec))

    def cache(level: Level, place: int, slots: int) -> KVCache:
        heads, layer = level.heads[place], model.spec.kv_layers[place]
        shape, judge = (rows, len(heads), slots), _judges(model, level.policy, device).get(layer)
        judge = None if judge is None else judge.of_heads(torch.tensor(heads, device=device))
        noted, coding = _scores(level.policy, shape, device), coding_of(layer)
        image, index = _image(coding, shape, by_token, device), index_of(level.policy, coding, shape, device)
        return KVCache(image, noted, coding, judge=judge, cap=model.spec.attention_cap, index=index)

    return {
        layer: _Layer(
            [
                (number, level.heads[place], cache(level, place, slots))
                for number, (level, slots) in enumerate(zip(levels, capacities, strict=True))
                if level.heads[place]
            ]
        )
        for place, layer in enumerate(model.spec.kv_layers)
    }


def _states(model: Model, rows: int, device: torch.device) -> States:
    """The states of rows, each tensor by itself."""
    layers = ((layer, model.spec.layers[layer].states) for layer in model.spec.state_layers)
    return {layer: {one.name: torch.zeros(rows, *one.shape, device=device) for one in own} for layer, own in layers}


def _kept(model: Model, states: States) -> States:
    """States as they are kept behind a prompt, which passes them in fp32."""
    layers = ((layer, model.spec.layers[layer].states) for layer in model.spec.state_layers)
    return {layer: {one.name: states[layer][one.name].to(getattr(torch, one.dtype)) for one in own} for layer, own in layers}


def _in_full(states: States) -> States:
    return {layer: {name: one.float() for name, one in own.items()} for layer, own in states.items()}


def _judges(model: Model, policy: KVPolicy, device: torch.device) -> dict[int, Judge]:
    spec = model.spec
    if policy.judge == PROBE:
        region = torch.zeros(probe_bytes(spec), dtype=torch.uint8, device=device)
        return dict(zip(spec.kv_layers, linear_judges(probe_for(spec), range(len(spec.kv_layers)), region)))
    judge = judge_of(policy)
    return {} if judge is None else dict.fromkeys(spec.kv_layers, judge)


def _image(coding: Coding, shape: tuple[int, int, int], by_token: bool, device: torch.device) -> Tensor:
    (rows, heads, slots), width, dtype = shape, coding.width, coding.kept_dtype
    if by_token:
        return torch.zeros(slots, coding.sets, rows, heads, width, dtype=dtype, device=device).permute(1, 2, 3, 0, 4)
    return torch.zeros(coding.sets, rows, heads, slots, width, dtype=dtype, device=device)


def index_of(policy: KVPolicy, coding: Coding, shape: tuple[int, int, int], device: torch.device) -> KeyIndex | None:
    if policy.recall == ALL:
        return None
    codes = replace(coding, format=INDEX)
    region = None if coding == codes else torch.zeros(prod(shape) * codes.width, dtype=torch.uint8, device=device)
    return KeyIndex.over(region, policy, coding, shape)


def _scores(policy: KVPolicy, shape: tuple[int, int, int], device: torch.device) -> SlotScores | None:
    region = torch.zeros(prod(shape) * policy.score_bytes, dtype=torch.uint8, device=device)
    return SlotScores.over(region, policy, shape) if policy.score_bytes else None

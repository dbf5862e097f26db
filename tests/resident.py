"""The plain loop that the engine must equal bit for bit: everything resident, one batch, the model's own layer functions over
the engine's own KVCache on plain tensors. No schedule, no slots, no tiers, no threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.core.layout import probe_bytes
from h2o_flexgen.core.prefixes import SharedPrefix
from h2o_flexgen.core.seats import Need
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.stores.judges import linear_judges
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix
from h2o_flexgen.kv.cache import Asked, KVCache
from h2o_flexgen.kv.coding import Coding
from h2o_flexgen.kv.judges.judge import Judge
from h2o_flexgen.kv.judges.value_norms import ValueNorms
from h2o_flexgen.kv.scores import SlotScores
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.base import Given, Matrix, Model, Rotation, Weights, computed, logits
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.full import Full
from h2o_flexgen.policies.policy import PROBE, VALUE_NORMS, KVPolicy
from h2o_flexgen.quant.codec import PLAIN
from tests.probes import probe_for


@contextmanager
def unheard() -> Iterator[None]:
    """A context in which nobody listens to what torch does: a test that listens wants to hear the engine."""
    with torch._C._DisableTorchDispatch():
        yield


@unheard()
@torch.inference_mode()
def resident_generate(
    model: Model,
    weights: Sequence[Weights],
    prompts: Sequence[Sequence[int]],
    steps: int,
    by_token: bool = False,
    policy: KVPolicy | None = None,
    prefill_tokens: int = Plan.prefill_tokens,
    kv_codec: str = PLAIN,
    forced: Sequence[Sequence[int]] | None = None,
    beside: Set[int] = frozenset(),
) -> list[Tensor]:
    """Generates greedily, or with forced tokens; returns for every step the logits (rows, vocab). `by_token`: caches lie slot
    by slot, as beside an accelerator. `beside`: the attentions, by number, whose decode steps the host does."""
    policy = policy or Full()
    device = _device(weights)
    within = _echoes_within(model, policy)
    batch = Batch(tuple(range(len(prompts))), tuple(map(len, prompts)), echoes_within=within)
    occupancy = policy.occupancy(batch, steps)
    caches = _caches(model, policy, len(prompts), occupancy.capacity, by_token, device, kv_codec)
    parts = [
        _last_of_prompts(model, weights, caches, policy, part, prompts, steps, occupancy.capacity, device)
        for part in batch.parts(prefill_tokens)
    ]
    attended = dict(caches) | {
        layer: _Beside(caches[layer]) for number, layer in enumerate(model.spec.kv_layers) if number in beside
    }
    made = [_head(model, torch.cat(parts), weights[-1])]
    for step in range(1, steps):
        picked = made[-1].argmax(-1) if forced is None else torch.tensor([own[step - 1] for own in forced], device=device)
        tokens, now = picked[:, None], KVStep.of(occupancy.at(step), occupancy.capacity, device)
        made.append(_head(model, _through_layers(model, weights, attended, now, tokens)[:, 0], weights[-1]))
    return made


def _echoes_within(model: Model, policy: KVPolicy) -> int | None:
    return model.spec.max_positions if policy.echoes else None


class _Beside:
    """A cache whose prompts are read, as the host has it, head by head: what is asked crosses the link, and the answer."""

    def __init__(self, cache: KVCache) -> None:
        noted = cache._scores
        self._asking, host = cache, torch.device("cpu")
        on_host = None if noted is None else noted._each(lambda each: each.to(host))
        self._cache = KVCache(cache.image.to(host).contiguous(), on_host, cache._coding)

    def attend(
        self, now: KVStep, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None = None, x: Tensor | None = None
    ) -> Tensor:
        asked = self._asking.asked(now, q, k, v, rotation, x)
        worth = None if asked.worth is None else asked.worth.cpu()
        there = Asked(asked.q.cpu(), asked.k.cpu(), asked.v.cpu(), None, worth)
        return self._cache.answer(now.on(torch.device("cpu")), there, rotation).to(q.device)


def _device(weights: Sequence[Weights]) -> torch.device:
    return next(weight.device for weight in weights[0].values() if isinstance(weight, Tensor))


def _last_of_prompts(
    model: Model,
    weights: Sequence[Weights],
    caches: Mapping[int, KVCache],
    policy: KVPolicy,
    part: Batch,
    prompts: Sequence[Sequence[int]],
    steps: int,
    capacity: int,
    device: torch.device,
) -> Tensor:
    own = {layer: cache.part(slice(part.rows[0], part.rows[-1] + 1)) for layer, cache in caches.items()}
    padded = [[*prompts[row], *[0] * (part.prompt_len - length)] for row, length in zip(part.rows, part.lengths)]
    now = KVStep.of(policy.occupancy(part, steps).at(0), capacity, device, echoes_within=part.echoes_within)
    tokens = [text + text if policy.echoes else text for text in padded]
    hidden = _through_layers(model, weights, own, now, torch.tensor(tokens, device=device))
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
    policy: KVPolicy | None = None,
    kv_codec: str = PLAIN,
) -> list[list[Tensor]]:
    """Generates greedily for one row whose caches live on; returns for every turn and step the logits (1, vocab)."""
    policy = policy or Full()
    device, seen, unread = _device(weights), 0, list[int]()
    capacity = policy.occupancy(Batch((0,), (1,), (), context), 1).capacity
    caches = _caches(model, policy, 1, capacity, by_token, device, kv_codec)
    talk = []
    for turn in turns:
        new, made = [*unread, *turn], []
        while new:
            piece, new = new[:chunk], new[chunk:]
            occupancy = policy.occupancy(Batch((0,), (len(piece),), (seen,) if seen else (), context), 1 if new else steps)
            for step in range(occupancy.gen_len):
                within = None if step else _echoes_within(model, policy)
                now = KVStep.of(occupancy.at(step), capacity, device, echoes_within=within)
                tokens = torch.tensor([piece * (1 if within is None else 2)], device=device)
                hidden = _through_layers(model, weights, caches, now, tokens)
                if not new:
                    made.append(_head(model, hidden[:, len(piece) - 1], weights[-1]))
                    piece = [int(made[-1].argmax())]
            seen += occupancy.taken_in[0] - seen + occupancy.gen_len - 1
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
    policy: KVPolicy,
    copies: bool = False,
    kv_codec: str = PLAIN,
) -> list[Tensor]:
    """Generates greedily behind a prompt of which the first tokens are read by themselves: the rest attends them in a cache of
    their own, or takes a copy of that. Returns for every step the logits (1, vocab)."""
    device, prefix = _device(weights), SharedPrefix(0, shared)
    judged = policy if copies and policy.score_bytes else Full()
    beginnings = _caches(model, judged, 1, shared, False, device, kv_codec)
    whole = KVStep.of(policy.whole(shared), shared, device)
    _through_layers(model, weights, beginnings, whole, torch.tensor([prompt[:shared]], device=device))
    need = Need.behind(prefix, len(prompt), steps, copies)
    occupancy, piece, made = policy.alone(need), list(prompt[shared:]), list[Tensor]()
    caches = _caches(model, policy, 1, occupancy.capacity, False, device, kv_codec)
    for layer, cache in caches.items():
        cache.prefixes = {0: beginnings[layer]}
    for step in range(steps):
        slots = occupancy.at(step) if step or not copies else occupancy.at(0).behind(shared)
        within = None if step else _echoes_within(model, policy)
        now = KVStep.of(slots, occupancy.capacity, device, () if step and copies else (prefix,), echoes_within=within)
        tokens = torch.tensor([piece * (1 if within is None else 2)], device=device)
        hidden = _through_layers(model, weights, caches, now, tokens)
        made.append(_head(model, hidden[:, len(piece) - 1], weights[-1]))
        piece = [int(made[-1].argmax())]
    return made


def _through_layers(
    model: Model, weights: Sequence[Weights], caches: Mapping[int, KVCache | _Beside], now: KVStep, tokens: Tensor
) -> Tensor:
    hidden = tokens
    for layer, spec in enumerate(model.spec.layers[:-1]):
        places = now.text_positions
        given = Given(places, partial(caches[layer].attend, now)) if spec.has_kv else Given(places)
        hidden = computed(model, spec, hidden, weights[layer], given)
    return hidden


def _head(model: Model, hidden: Tensor, weights: Weights) -> Tensor:
    """The logits; a packed matrix goes part by part as in the engine: other products may have other last bits."""
    spec = model.spec.layers[-1]
    name = spec.logit_matrix or ""
    parts = [{**weights, name: _part(weights[name], rows)} for rows in spec.logit_parts]
    return logits(model, spec, hidden, parts or [weights])


def _part(matrix: Tensor | Matrix, rows: slice) -> Tensor | Matrix:
    if isinstance(matrix, Tensor):
        return matrix[rows]
    assert isinstance(matrix, PackedMatrix)
    assert matrix.room is not None
    return matrix.part(rows, DecodeBuffer(torch.empty_like(matrix.room.values[rows])))


def _caches(
    model: Model, policy: KVPolicy, rows: int, slots: int, by_token: bool, device: torch.device, kv_codec: str
) -> dict[int, KVCache]:
    coding = Coding(kv_codec, getattr(torch, model.spec.dtype), model.spec.head_dim)
    judges = _judges(model, policy, device)
    return {
        layer: KVCache(
            _image(model, coding, rows, slots, by_token, device),
            _scores(model, policy, rows, slots, device),
            coding,
            judge=judges.get(layer),
        )
        for layer in model.spec.kv_layers
    }


def _judges(model: Model, policy: KVPolicy, device: torch.device) -> dict[int, Judge]:
    spec = model.spec
    if policy.judge == PROBE:
        region = torch.zeros(probe_bytes(spec), dtype=torch.uint8, device=device)
        return dict(zip(spec.kv_layers, linear_judges(probe_for(spec), range(len(spec.kv_layers)), region)))
    return dict.fromkeys(spec.kv_layers, ValueNorms()) if policy.judge == VALUE_NORMS else {}


def _image(model: Model, coding: Coding, rows: int, slots: int, by_token: bool, device: torch.device) -> Tensor:
    heads, width, dtype = model.spec.kv_heads, coding.width, coding.kept_dtype
    if by_token:
        return torch.zeros(slots, 2, rows, heads, width, dtype=dtype, device=device).permute(1, 2, 3, 0, 4)
    return torch.zeros(2, rows, heads, slots, width, dtype=dtype, device=device)


def _scores(model: Model, policy: KVPolicy, rows: int, slots: int, device: torch.device) -> SlotScores | None:
    shape = (rows, model.spec.kv_heads, slots)
    region = torch.zeros(rows * model.spec.kv_heads * slots * policy.score_bytes, dtype=torch.uint8, device=device)
    return SlotScores.over(region, policy, shape) if policy.score_bytes else None

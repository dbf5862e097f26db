"""Reading texts layer by layer: one layer's weights are loaded, and every reader goes through it before the next layer; and the
attention of a text that is read with everything kept: its probabilities, some queries at a time, and what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import LayerSpec
from h2o_flexgen.core.site import DEVICE
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.formats.kernel_sizes import SCORED_BYTES
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kernels.prompt_attention import probabilities
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models.base import Given, computed
from h2o_flexgen.models.new_tokens import Attend, NewTokens
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Visit
from h2o_flexgen.schedule.traffic import Traffic

OnLayer = Callable[[int, int], None]  # called with the number of layers done, and of all
ONLY = Visit(step=0, layer=0, batch=0)  # the only visit of a model with one layer


class TextReading(NamedTuple):
    """One reader's way through one text."""

    ids: Sequence[int]
    attend: Attend


def read_texts(llm: LLM, readings: Sequence[TextReading], on_layer: OnLayer | None = None) -> None:
    """Each reading has its own hidden states, since they depend on its attention. Logits are not computed."""
    if llm.spec.attention_cap is not None:
        raise ValueError(
            f"the scores of attention of {llm.spec.name} have a cap, {llm.spec.attention_cap:g}, which studies and "
            "calibrations do not compute; take a model without one"
        )
    if llm.spec.state_layers:
        raise ValueError(f"rows of {llm.spec.name} have a state in some layers, which studies and calibrations do not keep")
    first, *others = llm.spec.layers[:-1]
    with _opened(llm, first) as store:
        hidden = [_begun(llm, first, store, reading.ids) for reading in readings]
    for done, layer in enumerate(others, start=1):
        with _opened(llm, layer) as store:
            weights = store.views(ONLY)
            for number, (ids, attend) in enumerate(readings):
                given = Given(_positions(llm, ids), attend)
                hidden[number] = computed(llm.loaded.model, layer, hidden[number], weights, given)
        if on_layer is not None:
            on_layer(done, len(others))


def _begun(llm: LLM, first: LayerSpec, store: WeightStore, ids: Sequence[int]) -> Tensor:
    tokens = torch.tensor([ids], device=llm.device.torch_device)
    return computed(llm.loaded.model, first, *store.look_up(ONLY, tokens), Given(_positions(llm, ids)))


def _positions(llm: LLM, ids: Sequence[int]) -> Tensor:
    return torch.arange(len(ids), device=llm.device.torch_device).unsqueeze(0)


@contextmanager
def _opened(llm: LLM, layer: LayerSpec) -> Iterator[WeightStore]:
    """Opens the layer as a model of its own, with all its weights on the device, and closes it afterwards."""
    spec = replace(llm.spec, layers=(layer,))
    memories = Memories(llm.device, llm.loaded.offload_folder, llm.plan.pin_weight)
    try:
        store = WeightStore(spec, dict.fromkeys(spec.tensors, DEVICE), llm.loaded.source, memories)
        store.prepare(SCHEDULES["zigzag"](Traffic(steps=1, layers=1, batches=1)))
        yield store
    finally:
        memories.close()


class WholeText(NamedTuple):
    """One layer of a text that is read at once, with everything kept. Queries and keys are rotated."""

    q: Tensor  # (heads, tokens, dim)
    k: Tensor  # (kv_heads, tokens, dim)
    sums: Tensor  # (kv_heads, tokens), fp32: the attention that each token got
    out: Tensor  # as models.attention.Attend returns it
    sink_scores: Tensor | None  # (heads,)


def attend_whole(tokens: NewTokens) -> WholeText:
    """Takes the tokens of one row."""
    (q, k, v), sink_scores = turned(tokens), tokens.sink_scores
    nothing, every_query = torch.zeros(1, dtype=torch.int64, device=q.device), torch.ones(1, q.shape[2], device=q.device)
    more = None if sink_scores is None else More.of_sink_scores(sink_scores, 1, q.shape[2])
    out, sums = prompt_attention(q, k, v, nothing, every_query, more)
    assert sums is not None
    return WholeText(q[0], k[0], sums[0], out, sink_scores)


def turned(tokens: NewTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (1, heads, tokens, dim), rotated to their positions in the text."""
    q, k = tokens.q, tokens.k
    positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
    q = q if tokens.of_queries is None else tokens.of_queries(q, positions)
    q = q if tokens.query_norm is None else tokens.query_norm(q)
    k = k if tokens.rotation is None else tokens.rotation(k, positions)
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, tokens.v))
    return q, k, v


THRESHOLD = 0.01  # of negligible entries, relative to the largest share of a query: the paper's


class Attention(NamedTuple):
    """The attention of some neighbouring queries in one layer."""

    first: int  # the place of the first query in the text
    shares: Tensor  # (kv_heads, group, queries, keys up to the last of the queries), fp32; 0 for keys after a query


def attention_in_blocks(
    q: Tensor, k: Tensor, held_bytes: int = SCORED_BYTES, sink_scores: Tensor | None = None
) -> Iterator[Attention]:
    """q (heads, tokens, dim), k (kv_heads, tokens, dim), both rotated. At most `held_bytes` of shares are held at once."""
    heads, tokens, _ = q.shape
    queries = max(1, held_bytes // (4 * heads * tokens))
    for start in range(0, tokens, queries):
        yield attention_of(q, k, start, min(start + queries, tokens), sink_scores)


def attention_of(q: Tensor, k: Tensor, start: int, end: int, sink_scores: Tensor | None = None) -> Attention:
    """The attention of the queries from `start` on and before `end`; q and k as above."""
    heads, _, dim = q.shape
    part = q[:, start:end].reshape(1, len(k), heads // len(k), end - start, dim)
    shares = probabilities(part, k[:, :end].unsqueeze(0), None, sink_scores)
    return Attention(start, shares.view(len(k), heads // len(k), end - start, end))


def negligible_entries(attention: Attention) -> Tensor:
    """The number of negligible entries per head, among the keys that each query can see. (heads,)"""
    shares = attention.shares.flatten(0, 1)
    queries, keys = shares.shape[1:]
    behind = sum(keys - 1 - query for query in range(attention.first, attention.first + queries))  # zeros no query sees
    return (shares < THRESHOLD * shares.amax(-1, keepdim=True)).sum((1, 2)) - behind


def visible_entries(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def captured(attention: Attention, gone: Tensor, prompt_len: int) -> Tensor:
    """Attention captured from all queries after the prompt (each has 1 to give), averaged over a group's heads. (kv_heads,)"""
    skipped = max(0, prompt_len - attention.first)
    shares = attention.shares[:, :, skipped:].mean(1)  # (kv_heads, queries, keys)
    queries, keys = shares.shape[1:]
    query = torch.arange(keys - queries, keys, device=shares.device)
    is_held = gone[:, None, :keys] > query[:, None]  # before the query's own token comes, which it always sees
    return (shares * is_held).sum((1, 2))

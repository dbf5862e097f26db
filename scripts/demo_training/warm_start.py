"""A start that knows how to look back. From random weights a model this small reads millions of tokens before it finds out that
what followed a token once may follow it again; here two layers are made to do so, and training has only to make it better.

    layer 0: heads look at the token before, by its place alone, and write what it is beside the token
    layer 1: heads look for places with this token right before them, and say what stands there

What differs between the architectures is how a head can go by places, and which of its values do not turn with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM, OPTForCausalLM, PreTrainedModel

SPREAD = 0.1  # standard deviation of values in the embedding
CONSTANT = 0.4  # in column 0 of every token, for heads without biases
WAVE = 0.3  # size of the waves in a table of positions
FAST, SLOW = 0.05, 0.0015  # radians a position: one tells neighbours apart, the other hardly turns within a text
CONTRAST = 60.0  # unscaled contrast between the token before and this one
MATCH = 14.0  # scaled score of a token with itself
BEFORE, SAID = 0.3, 0.6  # strengths of what the two layers write
ALIKE = 0.01  # heads of a group differ by this, or they would stay the same for ever


@dataclass(frozen=True)
class Head:
    """A KV head with its queries, as views: their rows of the projections, and their columns of the output."""

    query: Tensor  # (queries * size, width)
    key: Tensor  # (size, width)
    value: Tensor
    out: Tensor  # (width, queries * size)
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.key)

    @property
    def queries(self) -> list[Tensor]:
        """The queries of a group, which all look at the same: their scores add up and stand out in the KV head."""
        return list(self.query.split(self.size))

    def write(self, what: Tensor) -> None:
        """Writes what (width, size), a part by each of the queries."""
        self.out.copy_(what.repeat(1, len(self.queries)) / len(self.queries))


def warm_start(model: PreTrainedModel, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, SPREAD, generator=draw)
        for name, weight in model.named_parameters():  # silences everything that is not set below
            if name.endswith(
                ("o_proj.weight", "out_proj.weight", "dense.weight", "down_proj.weight", "fc2.weight", "4h_to_h.weight")
            ):
                weight.zero_()
        kind = {LlamaForCausalLM: _Llama, OPTForCausalLM: _Opt, GPTNeoXForCausalLM: _NeoX}[type(model)](model)
        kind.prepare()
        size, width = kind.heads(0)[0].size, model.config.hidden_size
        seen, told = _orthonormal(size, width, draw), _orthonormal(size, width, draw)
        seen[:, kind.reserved] = told[:, kind.reserved] = 0
        before = kind.heads(0)[0]
        kind.look_at_the_token_before(before)
        before.value.copy_(seen)
        before.write(BEFORE * told.T)
        places = kind.still
        gain = (MATCH * math.sqrt(size) / (0.9 * len(places))) ** 0.5
        for head in kind.heads(1):
            rows, said = torch.randperm(size, generator=draw)[: len(places)], _orthonormal(size, width, draw)
            for weight, what in ((head.key, told), *((query, seen) for query in head.queries)):
                weight.normal_(0, ALIKE, generator=draw)
                weight[places] = gain * what[rows]
            head.value.copy_(said)
            head.write(SAID * said.T)


class _Llama:
    """Rotary, without biases: a column that is the same in every token takes their place."""

    reserved = slice(0, 1)

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.layers, self.table, config = model.model.layers, model.model.embed_tokens.weight, model.config
        self.size, self.group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        self.angles = config.rope_parameters["rope_theta"] ** (-torch.arange(0, self.size, 2) / self.size)
        slow = torch.nonzero(self.angles < SLOW).flatten()
        self.still = torch.cat([slow, slow + self.size // 2])

    def prepare(self) -> None:
        self.table[:, 0] = CONSTANT

    def heads(self, layer: int) -> list[Head]:
        own, size = self.layers[layer].self_attn, self.size
        found = []
        for place in range(len(own.k_proj.weight) // size):
            kv = slice(place * size, (place + 1) * size)
            query = slice(kv.start * self.group, kv.stop * self.group)
            weights = own.q_proj.weight[query], own.k_proj.weight[kv], own.v_proj.weight[kv]
            found.append(Head(*weights, own.o_proj.weight[:, query]))
        return found

    def look_at_the_token_before(self, head: Head) -> None:
        """Sets a key that is the same everywhere, and a query that is turned back by one position."""
        width, half, fast = self.table.shape[1], self.size // 2, (self.angles > FAST).float()
        behind_the_norm = CONSTANT / ((CONSTANT**2 + SPREAD**2 * (width - 1)) / width) ** 0.5
        gain = (CONTRAST / (fast * (1 - torch.cos(self.angles))).sum()) ** 0.5 / behind_the_norm
        head.key.zero_()
        head.key[:half, 0] = fast * gain
        for query in head.queries:
            query.zero_()
            query[:half, 0] = fast * gain * torch.cos(self.angles)
            query[half:, 0] = -fast * gain * torch.sin(self.angles)


class _NeoX:
    """Rotary in a part of a head's values, with biases."""

    reserved = slice(0, 0)

    def __init__(self, model: GPTNeoXForCausalLM) -> None:
        config = model.config
        self.layers, self.size = model.gpt_neox.layers, config.hidden_size // config.num_attention_heads
        turning = int(self.size * config.rope_parameters["partial_rotary_factor"])
        self.angles = config.rope_parameters["rope_theta"] ** (-torch.arange(0, turning, 2) / turning)
        self.still = torch.arange(turning, self.size)

    def prepare(self) -> None:
        """Does nothing: there are biases."""

    def heads(self, layer: int) -> list[Head]:
        own, size = self.layers[layer].attention, self.size
        found = []
        for place in range(len(own.query_key_value.weight) // (3 * size)):
            query, key, value = (own.query_key_value.weight[start : start + size] for start in _starts(place, size))
            biases = [own.query_key_value.bias[start : start + size] for start in _starts(place, size)]
            found.append(Head(query, key, value, own.dense.weight[:, place * size : (place + 1) * size], *biases[:2]))
        return found

    def look_at_the_token_before(self, head: Head) -> None:
        assert head.query_bias is not None and head.key_bias is not None
        half = len(self.angles)
        gain = (CONTRAST / (1 - torch.cos(self.angles)).sum()) ** 0.5
        head.key.zero_()
        head.query.zero_()
        head.key_bias[:half] = gain
        head.query_bias[:half] = gain * torch.cos(self.angles)
        head.query_bias[half : 2 * half] = -gain * torch.sin(self.angles)


class _Opt:
    """A table of positions: waves, from which a query can be turned back."""

    waves = 8
    reserved = slice(0, 2 * waves)

    def __init__(self, model: OPTForCausalLM) -> None:
        decoder, config = model.model.decoder, model.config
        self.layers, self.positions, self.table = decoder.layers, decoder.embed_positions.weight, decoder.embed_tokens.weight
        self.size = config.hidden_size // config.num_attention_heads
        self.angles = torch.logspace(math.log10(2.0), -2, self.waves)
        self.still = torch.arange(self.size)

    def prepare(self) -> None:
        turns = torch.arange(len(self.positions))[:, None] * self.angles
        self.positions.zero_()
        self.positions[:, : self.waves] = WAVE * torch.cos(turns)
        self.positions[:, self.waves : 2 * self.waves] = WAVE * torch.sin(turns)
        self.table[:, self.reserved] = 0

    def heads(self, layer: int) -> list[Head]:
        own, size = self.layers[layer].self_attn, self.size
        rows = [slice(start, start + size) for start in range(0, len(own.q_proj.weight), size)]
        return [
            Head(own.q_proj.weight[row], own.k_proj.weight[row], own.v_proj.weight[row], own.out_proj.weight[:, row])
            for row in rows
        ]

    def look_at_the_token_before(self, head: Head) -> None:
        width, waves = self.table.shape[1], self.waves
        behind_the_norm = WAVE / ((waves * WAVE**2 + SPREAD**2 * (width - 2 * waves)) / width) ** 0.5
        gain = (CONTRAST / (1 - torch.cos(self.angles)).sum()) ** 0.5 / behind_the_norm
        head.key.zero_()
        head.query.zero_()
        for wave, angle in enumerate(self.angles.tolist()):
            cosine, sine = wave, waves + wave
            head.key[cosine, cosine] = head.key[sine, sine] = gain
            head.query[cosine, cosine] = head.query[sine, sine] = gain * math.cos(angle)
            head.query[cosine, sine], head.query[sine, cosine] = gain * math.sin(angle), -gain * math.sin(angle)


def _starts(place: int, size: int) -> tuple[int, int, int]:
    first = 3 * place * size
    return first, first + size, first + 2 * size


def _orthonormal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(columns, rows, generator=draw))[0].T.contiguous()

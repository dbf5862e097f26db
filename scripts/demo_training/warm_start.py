"""A start that knows how to look back. From random weights a model this small reads millions of tokens before it finds out that what
followed a token once may follow it again; here its first layers are made to do so, and training has only to make it better.

    layer 0: some heads look at the token before, by its place alone, and write what it is beside the token
    layer 1: a head looks for places whose token before is this token, and says what stands there
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

SPREAD = 0.1  # of values in the embedding
CONSTANT = 0.4  # in column 0 of every token, so that a head can go by places alone
FAST, SLOW = 0.05, 0.0015  # radians a position: what tells neighbours apart, and what hardly turns within a text
CONTRAST = 60.0  # between the token before and this one, before it is scaled
MATCH = 112.0  # of a token with itself
BEFORE, SAID = 0.3, 0.6  # how loud the two layers write


def warm_start(model: LlamaForCausalLM, seed: int) -> None:
    config, draw = model.config, torch.Generator().manual_seed(seed)
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table.normal_(0, SPREAD, generator=draw)
        table[:, 0] = CONSTANT
        for layer in model.model.layers:  # nothing speaks but what is said below
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        seen, told = (_orthonormal(size, config.hidden_size, draw) for _ in range(2))
        seen[:, 0] = told[:, 0] = 0
        first, second = (layer.self_attn for layer in model.model.layers[:2])
        _look_at_the_token_before(first, size, group, angles, config.hidden_size)
        first.v_proj.weight[:size] = seen
        first.o_proj.weight[:, :size] = BEFORE * told.T
        slow = torch.nonzero(angles < SLOW).flatten()
        places = torch.cat([slow, slow + size // 2])
        gain = (MATCH / (0.9 * len(places))) ** 0.5
        for head in range(config.num_key_value_heads):
            rows = torch.randperm(size, generator=draw)[: len(places)]
            own, query = slice(head * size, (head + 1) * size), slice(head * group * size, (head * group + 1) * size)
            said = _orthonormal(size, config.hidden_size, draw)
            for weight, what in ((second.k_proj.weight[own], told), (second.q_proj.weight[query], seen)):
                weight.zero_()
                weight[places] = gain * what[rows]
            second.v_proj.weight[own] = said
            second.o_proj.weight[:, query] = SAID * said.T


def _look_at_the_token_before(attention: torch.nn.Module, size: int, group: int, angles: Tensor, width: int) -> None:
    """The heads of the first KV head: a key that is the same everywhere, and a query that is turned back by one position."""
    fast = (angles > FAST).float()
    constant = CONSTANT / ((CONSTANT**2 + SPREAD**2 * (width - 1)) / width) ** 0.5  # behind the norm
    gain = (CONTRAST / (fast * (1 - torch.cos(angles))).sum()) ** 0.5 / constant
    key, half = attention.k_proj.weight[:size], size // 2
    key.zero_()
    key[:half, 0] = fast * gain
    for head in range(group):
        query = attention.q_proj.weight[head * size : (head + 1) * size]
        query.zero_()
        query[:half, 0] = fast * gain * torch.cos(angles)
        query[half:, 0] = -fast * gain * torch.sin(angles)


def _orthonormal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(columns, rows, generator=draw))[0].T

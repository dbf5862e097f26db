"""LayerSpecs from parameters: what architectures share when they say which layers they consist of.

Inside a layer a tensor goes by its name in the checkpoint less the prefix of its block, so attention and mlp never collide. A
new kind of layer is one more function here, beside `attention` and `mlp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from h2o_flexgen.core.model_spec import (
    ATTENTION_VISIT,
    DTYPE_BYTES,
    AttentionHalves,
    LayerSpec,
    ModelSpec,
    StateTensor,
    TensorSpec,
)
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.models.base import HeadFunction, InHalves, LayerFunction
from h2o_flexgen.models.config_values import Config

LABEL_MATRIX = "score"  # as checkpoints have it, outside of the model
MLP_STATES = 3  # of the inner width, at once: what goes up, the gate beside it, and what an activation makes of them


@dataclass(frozen=True)
class Parameter:
    """A tensor, and the share of a visit's tokens that are multiplied with it: 0 for biases, norms and tables."""

    shape: tuple[int, ...]
    share: float = 0.0
    is_never_packed: bool = False
    is_wide: bool = False  # float32 in every model


Parameters = Mapping[str, Parameter]  # by their names inside the layer


def linear(name: str, out_width: int, in_width: int, bias: bool, share: float = 1.0) -> Parameters:
    weight = {f"{name}.weight": Parameter((out_width, in_width), share)}
    return {**weight, f"{name}.bias": Parameter((out_width,))} if bias else weight


def router(name: str, out_width: int, in_width: int, bias: bool = False, is_wide: bool = False) -> Parameters:
    """The matrix of a router: its products choose what is computed."""
    weight = {f"{name}.weight": Parameter((out_width, in_width), 1.0, is_never_packed=True, is_wide=is_wide)}
    return {**weight, f"{name}.bias": Parameter((out_width,), is_wide=is_wide)} if bias else weight


def norm(name: str, *shape: int, weight: bool = True, bias: bool = True) -> Parameters:
    present = {"weight": weight, "bias": bias}
    return {f"{name}.{part}": Parameter(shape) for part, is_there in present.items() if is_there}


def scores(name: str, heads: int) -> Parameters:
    """A number for each query head."""
    return {name: Parameter((heads,))}


def wide(name: str, *shape: int) -> Parameters:
    """Values that lose their meaning in 16 bits."""
    return {name: Parameter(shape, is_wide=True)}


def table(name: str, rows: int, width: int) -> Parameters:
    return {f"{name}.weight": Parameter((rows, width))}


def joined(*parts: Parameters) -> Parameters:
    return {name: parameter for part in parts for name, parameter in part.items()}


@dataclass(frozen=True)
class Origin:
    """The names of a layer's tensors in a checkpoint: prefix and own name, unless `stored_as` has another one."""

    dtype: str
    prefix: str
    block: int | None = None
    stored_as: Mapping[str, str] = field(default_factory=dict)

    def with_names(self, within: Mapping[str, str]) -> Origin:
        """The same for a layer that has its own names for some tensors; the block has these."""
        return replace(self, stored_as={own: self.prefix + there for own, there in within.items()})

    def tensor(self, name: str, parameter: Parameter) -> TensorSpec:
        stored, stored_as = DTYPE_BYTES[self.dtype], self.stored_as.get(name, self.prefix + name)
        itemsize = FLOAT_BYTES if parameter.is_wide else stored
        return TensorSpec(stored_as, parameter.shape, itemsize, stored, is_never_packed=parameter.is_never_packed)


def layer(function: LayerFunction | HeadFunction, parameters: Parameters, out_width: int, origin: Origin) -> LayerSpec:
    """A layer that works on hidden states token by token. `function` is a method of the model."""
    return LayerSpec(
        functions=(function.__name__,),
        tensors=tuple((name, origin.tensor(name, one)) for name, one in parameters.items()),
        products=tuple((name, one.share) for name, one in parameters.items() if one.share),
        out_width=out_width,
        block=origin.block,
    )


def embedding(function: LayerFunction, tokens: Parameters, others: Parameters, out_width: int, origin: Origin) -> LayerSpec:
    """Takes tokens; `tokens` is the table that has a row for each."""
    return replace(layer(function, joined(tokens, others), out_width, origin), token_table=next(iter(tokens)))


def attention(before: Parameters, behind: Parameters, out_width: int, origin: Origin, window: int | None = None) -> LayerSpec:
    """The attention of an architecture in halves; the parameters `behind` are used when all is attended."""
    whole = layer(InHalves.attention, joined(before, behind), out_width, origin)
    functions = InHalves.attention, InHalves.before_attended, InHalves.behind_attended
    both, first, then = (function.__name__ for function in functions)
    halves = AttentionHalves(both, first, then, out_width, frozenset(behind))
    return replace(whole, has_kv=True, window=window, visits=(ATTENTION_VISIT,), halves=halves)


def attending_by(layer: LayerSpec, whole: str, first_half: str) -> LayerSpec:
    """A layer of attention with other methods of its model."""
    assert layer.halves is not None
    return replace(layer, functions=(whole,), halves=replace(layer.halves, whole=whole, before=first_half))


def stateful(
    function: LayerFunction,
    parameters: Parameters,
    states: Sequence[StateTensor],
    out_width: int,
    passing_width: int,
    origin: Origin,
) -> LayerSpec:
    """A layer in which rows have a state. `passing_width`: values per token that it holds at once."""
    made = layer(function, parameters, out_width, origin)
    return replace(made, states=tuple(states), visits=(ATTENTION_VISIT,), passing_width=passing_width)


def beside(function: LayerFunction, attending: LayerSpec, other: LayerSpec) -> LayerSpec:
    """One layer of two that are computed of the same hidden states, by a method that does both. What the host would need to
    attend for it is not told."""
    return replace(_in_one([attending, other]), functions=(function.__name__,), halves=None)


def mlp(function: LayerFunction, parameters: Parameters, out_width: int, inner_width: int, origin: Origin) -> LayerSpec:
    return replace(layer(function, parameters, out_width, origin), passing_width=MLP_STATES * inner_width)


def head(function: HeadFunction, others: Parameters, logits: Parameters, origin: Origin) -> LayerSpec:
    """Makes logits, by the first matrix of `logits`."""
    name, matrix = next(iter(logits.items()))
    return replace(layer(function, joined(others, logits), matrix.shape[0], origin), logit_matrix=name)


def in_order(
    embed: LayerSpec, blocks: int, parts: Callable[[int], Sequence[LayerSpec]], last: LayerSpec, sep_layer: bool
) -> tuple[LayerSpec, ...]:
    """Embedding, then the parts of each block (as layers of their own or as one layer), then the head."""
    middle = (parts(index) if sep_layer else [_in_one(parts(index))] for index in range(blocks))
    return (embed, *(layer for block in middle for layer in block), last)


def _in_one(parts: Sequence[LayerSpec]) -> LayerSpec:
    return replace(
        parts[-1],
        part=", ".join(part.part or ", ".join(part.functions) for part in parts) if any(part.part for part in parts) else "",
        experts=parts[-1].experts if len(parts) == 1 else (),  # they are there before the router of this layer has chosen
        halves=_halves_in_one(parts),
        functions=tuple(name for part in parts for name in part.functions),
        tensors=tuple(pair for part in parts for pair in part.tensors),
        products=tuple(product for part in parts for product in part.products),
        has_kv=any(part.has_kv for part in parts),
        kv_heads=next((part.kv_heads for part in parts if part.has_kv), None),
        window=next((part.window for part in parts if part.has_kv), None),
        states=tuple(state for part in parts for state in part.states),
        visits=tuple(visit for part in parts for visit in part.visits),
        passing_width=max(part.passing_width for part in parts),
        least_passing=max(part.least_passing for part in parts),
        reads_back=next((part.reads_back for part in parts if part.reads_back), ""),
        turns=next((part.turns for part in parts if part.turns is not None), None),
    )


def _halves_in_one(parts: Sequence[LayerSpec]) -> AttentionHalves | None:
    """What stands behind the attention of a part is behind that of the whole."""
    for place, part in enumerate(parts):
        if part.halves is not None:
            after = frozenset(name for later in parts[place + 1 :] for name, _ in later.tensors)
            return replace(part.halves, used_behind=part.halves.used_behind | after, used_after=after)
    return None


def model_spec(config: Config, dtype: str, name: str, ffn: int, layers: tuple[LayerSpec, ...], **own: Any) -> ModelSpec:
    """What all configs say in the same words; `own` are the fields in which an architecture differs."""
    width, heads = config.hidden_size, config.num_attention_heads
    usual = {"kv_heads": heads, "head_dim": width // heads}
    if "max_positions" not in own:
        usual["max_positions"] = config.max_position_embeddings
    return ModelSpec(
        name=name,
        architecture=config.model_type,
        width=width,
        ffn=ffn,
        heads=heads,
        vocab=config.vocab_size,
        dtype=dtype,
        layers=layers,
        **(usual | own),
    )

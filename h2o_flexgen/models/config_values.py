"""Configs of models, the bounds of what they say, and the windows of layers that they name. Missing sizes, values that are no
numbers and sizes beyond those of any model are refused here, before anything is built from them, so that no later code divides
by zero or counts to 2**62."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from h2o_flexgen.checkpoints.stored_architecture import GgufModel
from h2o_flexgen.core.allowed_values import EOS, eos_ids_of
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.labels import KIND, Labels
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH

BLOCKS, HEADS, VOCAB, POSITIONS = 1 << 12, 1 << 14, 1 << 26, 1 << 30  # as with those of a width: far more than any model has
MOST_EXPERTS = 1 << 12


class Config(Protocol):
    """A PretrainedConfig of transformers, or anything with its attributes: they differ by architecture and version."""

    def __getattr__(self, name: str) -> Any: ...


class Whole(NamedTuple):
    """The bounds of a whole number, usually from 1 on."""

    most: int
    is_required: bool = False
    may_be_zero: bool = False  # which stands for none
    of_each: bool = False  # or a list of one for each layer
    least: int = 1


class Number(NamedTuple):
    least: float
    most: float


class Flag(NamedTuple):
    """The bounds of what is true or false."""


Bounds = Mapping[str, Whole | Number | Flag]  # of the keys of a config
CONVOLVED_TOKENS = Whole(1 << 10, least=2)  # that a short convolution mixes: of one alone rows would keep nothing
FACTOR = Number(1e-3, 1e3)
SOFTCAP = Number(1e-3, 1e6)

# of the keys that several architectures read
SHARED_BOUNDS: Bounds = {
    "num_hidden_layers": Whole(BLOCKS, is_required=True),
    "hidden_size": Whole(MOST_WIDTH, is_required=True),
    "num_attention_heads": Whole(HEADS, is_required=True),
    "vocab_size": Whole(VOCAB, is_required=True),
    "max_position_embeddings": Whole(POSITIONS, is_required=True),
    "intermediate_size": Whole(MOST_WIDTH, is_required=True),
    "num_key_value_heads": Whole(HEADS),
    "head_dim": Whole(MOST_HEAD_DIM),
    "sliding_window": Whole(POSITIONS, may_be_zero=True),
    "original_max_position_embeddings": Whole(POSITIONS),
    "moe_intermediate_size": Whole(MOST_WIDTH),
    "rope_theta": Number(1.0, 1e12),
    "rotary_emb_base": Number(1.0, 1e12),
    "rotary_pct": Number(0.0, 1.0),
    "partial_rotary_factor": Number(0.0, 1.0),
    "rms_norm_eps": Number(0.0, 1.0),
    "layer_norm_eps": Number(0.0, 1.0),
    "routed_scaling_factor": Number(0.0, 1e6),
}
EXPERTS, CHOSEN = ("num_experts", "num_local_experts", "n_routed_experts"), "num_experts_per_tok"  # transformers reads any name
TEXT_PART, NO_PARTS = "text_config", ("quantization_config", "generation_config")


def labels_of(config: Config) -> Labels | None:
    """What its head scores a text by; None if it has one for tokens."""
    named = getattr(config, "architectures", None)
    if not isinstance(named, (list, tuple)) or not any(str(one).endswith(KIND) for one in named):
        return None
    names, problem, pad = (getattr(config, key, None) for key in ("id2label", "problem_type", "pad_token_id"))
    return Labels.of(names, problem, pad, f"the config of {config.model_type}")


def check_config(values: Mapping[str, Any], own: Bounds, name: str) -> None:
    """`values` are the contents of config.json, `own` the bounds that its architecture has beside the shared ones."""
    bounds = {**SHARED_BOUNDS, **own}
    try:
        for key, bound in bounds.items():
            if isinstance(bound, Whole):
                _check_whole(key, values.get(key), bound)
            elif isinstance(bound, Flag):
                _check_flag(key, values.get(key))
        numbers = {key: bound for key, bound in bounds.items() if isinstance(bound, Number)}
        for place in _places_of_numbers(values):
            _check_numbers(place, numbers)
        if values.get("sliding_window") == 1:
            raise ValueError("sliding_window is 1, in which a token would see itself alone")
        _check_heads(values, own)
        _check_experts(values, own)
        eos_ids_of(values.get(EOS))
    except ValueError as error:
        raise ValueError(f"the config of {shown(name)} is not valid: {error}; download the model again") from error


def refuse_short(config: Config, key: str) -> None:
    """Refuses a list that says something of each block, and has too few entries."""
    entries, blocks = len(getattr(config, key, None) or ()), config.num_hidden_layers
    if entries < blocks:
        raise ValueError(f"{key} has {entries} entries for {blocks} blocks; download the model again")


def refuse_beyond(config: Config, bounds: Bounds) -> None:
    """Refuses sizes beyond their bounds that a config may have in another place, from where transformers takes them."""
    for key, bound in bounds.items():
        if isinstance(bound, Whole):
            try:
                _check_whole(key, getattr(config, key, None), bound)
            except ValueError as error:
                raise ValueError(f"{error}; download the model again") from error


def what_is_unsupported(values: Mapping[str, Any], own: Bounds) -> str | None:
    """The setting of a config that its architecture here does not know, if it has one. `own`: the bounds of what it reads."""
    if "kv_lora_rank" not in own and (rank := values.get("kv_lora_rank")):
        return f"kv_lora_rank is {shown(rank)}: keys and values that are made of one latent vector are"
    groups = values.get("n_group")
    if "n_group" not in own and groups not in (None, 0, 1):
        chosen = f" and topk_group {shown(values['topk_group'])}" if "topk_group" in values else ""
        return f"n_group is {shown(groups)}{chosen}: experts that are chosen by groups are"
    return None


def parts_beside_text(values: Mapping[str, Any]) -> list[str]:
    """The parts of a model that has a config for each of them; nothing for one that is its text part alone."""
    if not isinstance(values.get(TEXT_PART), Mapping):
        return []
    own = [key for key, value in values.items() if key.endswith("_config") and key != TEXT_PART and isinstance(value, Mapping)]
    named = [key for key in own if key not in NO_PARTS]
    return named or ["other parts"]


def refuse_other_heads(config: Config) -> None:
    """Refuses heads of another width, where all heads are together as wide as the hidden states."""
    width = config.hidden_size // config.num_attention_heads
    if getattr(config, "head_dim", None) not in (None, width):
        raise ValueError(
            f"head_dim is {config.head_dim}, but heads of {config.model_type} have {width} values; give another model"
        )


def _check_whole(key: str, value: object, bound: Whole) -> None:
    if value is None and bound.is_required:
        raise ValueError(f"{key} is missing")
    if bound.of_each and isinstance(value, list):
        for one in value:
            _check_whole(key, one, bound._replace(is_required=True, of_each=False))
        return
    is_none = value is None or (bound.may_be_zero and value == 0)
    if not is_none and (type(value) is not int or not bound.least <= value <= bound.most):
        raise ValueError(f"{key} is {shown(value)}, which is no whole number from {bound.least} to {bound.most}")


def _check_flag(key: str, value: object) -> None:
    if value is not None and type(value) is not bool:
        raise ValueError(f"{key} is {shown(value)}, which is neither true nor false")


def _places_of_numbers(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The values, and those that say how positions are rotated, by kinds of layers where these differ."""
    yield values
    for place in (values.get("rope_parameters"), values.get("rope_scaling")):
        if isinstance(place, Mapping):
            yield place
            yield from (own for own in place.values() if isinstance(own, Mapping))


def _check_numbers(values: Mapping[str, Any], bounds: Mapping[str, Number]) -> None:
    for key, (least, most) in bounds.items():
        value = values.get(key)
        if value is not None and (type(value) not in (int, float) or not least <= value <= most):
            raise ValueError(f"{key} is {shown(value)}, which is no number from {least:g} to {most:g}")


def _check_heads(values: Mapping[str, Any], own: Bounds) -> None:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if values.get("head_dim") is None and "kv_lora_rank" not in own and width % heads:
        raise ValueError(f"hidden_size {width} is no multiple of num_attention_heads {heads}")
    kv_heads = values.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")


def _check_experts(values: Mapping[str, Any], own: Bounds) -> None:
    may_lack = [key for key, bound in own.items() if isinstance(bound, Whole) and bound.may_be_zero and values.get(key) == 0]
    for key in (key for key in EXPERTS if values.get(key) is not None and key not in may_lack):
        _check_whole(key, values[key], Whole(MOST_EXPERTS))
        _check_whole(CHOSEN, values.get(CHOSEN), Whole(values[key], is_required=CHOSEN in values))  # null is not the default


# -- the windows of layers: which have one, and how wide it is ----------------------------------------------------------

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"  # what configs call layers
Windows: TypeAlias = tuple[int | None, ...] | None  # of each layer, the tokens that a token sees; None: all that are before it


def same_windows(config: Config) -> Windows:
    """The windows of an architecture where all layers have the window that the config names, if it names one."""
    is_there = config.sliding_window is not None
    return _windows(config, [is_there] * config.num_hidden_layers)


def windows_by_kind(config: Config) -> Windows:
    """The windows of an architecture where the config says for each layer whether it has a window."""
    kinds, blocks = getattr(config, "layer_types", None), config.num_hidden_layers
    if kinds is None:  # transformers 4 says how many layers have none
        kinds = [SLIDING if block >= config.max_window_layers and config.sliding_window else FULL for block in range(blocks)]
    return _windows(config, [kind == SLIDING for kind in kinds])


def _windows(config: Config, slides: Sequence[bool]) -> Windows:
    """Windows that no text can be longer than are none."""
    window = config.sliding_window
    if any(slides) and not window:
        raise ValueError(f"sliding_window is {shown(window)}, but layers have one; download the model again")
    if not any(slides) or window >= config.max_position_embeddings:
        return None
    return tuple(window if has_one else None for has_one in slides)


def kinds_in(said: GgufModel, every: int) -> list[str]:
    """The kind of each layer as a GGUF file says it. Where it does not, each last one of so many has no window."""
    return [SLIDING if slides else FULL for slides in said.sliding_blocks(every)]

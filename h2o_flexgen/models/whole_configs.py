"""What configs mean where they do not say it, for architectures that are run most. transformers knows it of all, but takes
seconds to import. So it is asked only where a config says something that is not understood here, and for models of several
parts.

Of several parts one makes text: images go through others, which are not read. The text part has a config of its own in that of
the model, or beside the other parts' ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple

from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.core.hints import one_line, shown
from h2o_flexgen.core.labels import KIND as LABELS
from h2o_flexgen.models.config_values import FULL, SHARED_BOUNDS, SLIDING, Bounds, check_config

ROPES = "rope_parameters", "rope_scaling"
OWN_SWITCH = "use_sliding_window"  # of windows, which most architectures do not read
ORIGINAL = "original_max_position_embeddings"
PLAIN_ROPES: Mapping[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": (ORIGINAL,)}  # and what they say
ELSEWHERE = (ORIGINAL, "partial_rotary_factor", "rotary_pct", "rope_interleave", "per_layer_config")  # said of a rotation, too


class Usual(NamedTuple):
    """What a key of a config means where it is missing."""

    value: object
    kinds: tuple[type, ...]  # of the values that it may have; none: what it says is left to transformers
    only: tuple[object, ...] = ()  # the values that are understood here; nothing: all of these kinds
    follows: Callable[[Mapping[str, Any]], object] | None = None  # from the config, where it is missing or null

    def understands(self, value: object) -> bool:
        return type(value) in self.kinds and (not self.only or value in self.only)


FLAG, COUNT, SEVERAL, NUMBERS, TEXT = (bool,), (int, NoneType), (list, NoneType), (int, float), (str,)
OFF, ON, ONE = Usual(False, FLAG), Usual(True, FLAG), Usual(1.0, NUMBERS)
LEFT = Usual(None, ())  # another name of a key, which transformers translates


def end_of_text(token: int | None) -> Usual:
    return Usual(token, (int, list, NoneType))


DECODERS: Mapping[str, Usual] = {
    "num_key_value_heads": Usual(None, COUNT),
    "head_dim": Usual(None, COUNT),
    "hidden_act": Usual("silu", TEXT),
    "rms_norm_eps": Usual(1e-6, (float,)),
    "rope_theta": Usual(10000.0, NUMBERS),
    "tie_word_embeddings": OFF,
    **dict.fromkeys(ROPES, Usual(None, (dict, NoneType))),
}
LLAMA: Mapping[str, Usual] = {**DECODERS, "attention_bias": OFF, "mlp_bias": OFF, EOS: end_of_text(2)}
MISTRAL: Mapping[str, Usual] = {
    **DECODERS,
    "num_key_value_heads": Usual(8, (int,)),
    "sliding_window": Usual(4096, COUNT),
    EOS: end_of_text(2),
}
QWEN2: Mapping[str, Usual] = {
    **DECODERS,
    "num_key_value_heads": Usual(32, COUNT),
    OWN_SWITCH: OFF,
    "sliding_window": Usual(4096, COUNT),
    "max_window_layers": Usual(28, (int,)),
    "layer_types": Usual(None, SEVERAL),
    EOS: end_of_text(None),
}
QWEN3: Mapping[str, Usual] = {**QWEN2, "head_dim": Usual(128, (int,)), "attention_bias": OFF}


def whole_config(
    values: Mapping[str, Any], usual: Mapping[str, Usual], called: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """A config with all that it means, if all that it says is understood here. `called`: the usual names of keys -> its own."""
    if not usual or _has_labels(values) or not _rotates_plainly(values) or not _are_kinds_of_layers(values):
        return None
    if any(not one.understands(values[key]) for key, one in usual.items() if key in values):
        return None
    own = {key: values[name] for key, name in (called or {}).items() if name in values}
    if any(values.get(key, value) != value for key, value in own.items()):
        return None
    whole = {**{key: one.value for key, one in usual.items()}, **values, **own}
    whole |= {key: one.follows(whole) for key, one in usual.items() if one.follows and whole[key] is None}
    if OWN_SWITCH in usual and not whole[OWN_SWITCH]:
        whole["sliding_window"] = None
    return whole


def _has_labels(values: Mapping[str, Any]) -> bool:
    """Whether it may be of a model that scores texts by labels, of which configs say little."""
    named = values.get("architectures")
    return named is not None and not (isinstance(named, list) and not any(str(one).endswith(LABELS) for one in named))


def _rotates_plainly(values: Mapping[str, Any]) -> bool:
    """Whether all layers rotate whole heads in the same way, with all numbers that it takes in the config."""
    ropes = [rope for key in ROPES if (rope := values.get(key))]
    if len(ropes) > 1 or any(key in values for key in ELSEWHERE):
        return False
    said = ropes[0] if ropes else {}
    if not isinstance(said, dict) or any(key in said for key in ELSEWHERE[1:]):
        return False
    kind, theta = said.get("rope_type", said.get("type", "default")), said.get("rope_theta", 1.0)
    of_kind = PLAIN_ROPES.get(kind) if isinstance(kind, str) else None
    is_flat = not any(isinstance(one, dict) for one in said.values())
    return of_kind is not None and is_flat and type(theta) in NUMBERS and all(key in said for key in of_kind)


def _are_kinds_of_layers(values: Mapping[str, Any]) -> bool:
    kinds = values.get("layer_types")
    if kinds is None:
        return values.get("sliding_window") != 0  # which stands for a window there
    return (
        isinstance(kinds, list)
        and len(kinds) == values.get("num_hidden_layers")
        and all(kind in (SLIDING, FULL) for kind in kinds)
    )


TEXT_PART, TIED = "text_config", "tie_word_embeddings"
SEVERAL_AXES = "mrope"  # a rotation by a position in an image and in time; those of a text are all the same
LONGEST_OBJECTION = 300  # characters of what transformers says


class TextPart(NamedTuple):
    """What a model of several parts may have as its text part: model_types of transformers, and what these are here. The first
    is meant where a config does not say."""

    kinds: Mapping[str, str]
    is_tied: bool = False  # where no config says it
    is_beside: bool = False  # older configs have its keys beside those of the other parts


TEXT_PARTS: Mapping[str, TextPart] = {
    "gemma3": TextPart({"gemma3_text": "gemma3_text"}, is_tied=True),
    "gemma4": TextPart({"gemma4_text": "gemma4_text"}, is_tied=True),
    "gemma4_unified": TextPart({"gemma4_unified_text": "gemma4_unified_text"}, is_tied=True),
    "llama4": TextPart({"llama4_text": "llama4_text"}),
    "mistral3": TextPart({"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"}),
    "qwen2_vl": TextPart({"qwen2_vl_text": "qwen2"}, is_beside=True),
    "qwen2_5_vl": TextPart({"qwen2_5_vl_text": "qwen2"}, is_beside=True),
    "qwen3_vl": TextPart({"qwen3_vl_text": "qwen3"}),
    "qwen3_5": TextPart({"qwen3_5_text": "qwen3_5_text"}),
    "qwen3_5_moe": TextPart({"qwen3_5_moe_text": "qwen3_5_moe_text"}),
}


def text_part(values: Mapping[str, Any], bounds_of: Callable[[str], Bounds], name: str) -> Mapping[str, Any]:
    """The config of the text part of a model, and any other config as it is. `bounds_of`: those of a model_type."""
    known = TEXT_PARTS.get(str(values.get("model_type")))
    inner = values.get(TEXT_PART)
    if known is None or not (isinstance(inner, Mapping) or known.is_beside):
        return values
    own = dict(inner) if isinstance(inner, Mapping) else {key: one for key, one in values.items() if key != "model_type"}
    kind = own.get("model_type") or next(iter(known.kinds))
    if not isinstance(kind, str) or kind not in known.kinds:
        raise ValueError(
            f"the text part of the model {name!r} is of the architecture {shown(kind)}, which is not supported; "
            f"of {values['model_type']} it may be {' or '.join(known.kinds)}"
        )
    ties = [place[TIED] for place in (values, own) if isinstance(place.get(TIED), bool)]
    found = {**_whole(own, kind, bounds_of(known.kinds[kind]), name), "model_type": known.kinds[kind]}
    found[TIED] = ties[0] if ties else known.is_tied
    return {**found, EOS: values.get(EOS, own.get(EOS))}


def _whole(own: Mapping[str, Any], kind: str, bounds: Bounds, name: str) -> dict[str, Any]:
    """All keys of a text part, with what transformers means where it does not say."""
    from transformers import CONFIG_MAPPING

    usual, required = CONFIG_MAPPING[kind], (key for key, one in SHARED_BOUNDS.items() if getattr(one, "is_required", False))
    check_config({**{key: getattr(usual, key, None) for key in required}, **own}, bounds, name)
    turned = {key: _of_a_text(own[key]) for key in ROPES if isinstance(own.get(key), Mapping)}
    try:
        found: dict[str, Any] = usual.from_dict({**own, **turned}).to_dict()
    except Exception as error:  # whatever transformers objects to stands in a file of the user's
        raise ValueError(f"the config of {name!r} is not valid: {one_line(error)[:LONGEST_OBJECTION]}") from error
    return found


def _of_a_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "default" if key in ("type", "rope_type") and one == SEVERAL_AXES else one for key, one in rope.items()}

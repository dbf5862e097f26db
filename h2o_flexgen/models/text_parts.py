"""Models of several parts, of which one makes text: images go through others, which are not read. The text part has a config of
its own in that of the model, or beside the other parts' ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.core.hints import one_line, shown
from h2o_flexgen.models.config_values import SHARED_BOUNDS, Bounds, check_config

TEXT_PART, TIED = "text_config", "tie_word_embeddings"
ROPES = "rope_parameters", "rope_scaling"
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
    "mistral3": TextPart({"mistral": "mistral", "ministral3": "ministral3"}),
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

"""The windows of layers: how configs say which layers have one, and how wide it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from h2o_flexgen.checkpoints.stored_architecture import GgufModel
from h2o_flexgen.core.hints import shown
from h2o_flexgen.models.config_values import Config

SLIDING, FULL = "sliding_attention", "full_attention"
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

"""Layers of which KV heads have a number and a width of their own: what they hold is counted layer by layer, in own levels."""

from __future__ import annotations

import pytest

from h2o_flexgen.core.buffer_layout import PrefixLayout
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.models import create_model
from h2o_flexgen.planning.placement import HeldKV
from h2o_flexgen.planning.plan import Plan
from tests.helpers.contract import FEW_LOOK_BACK, head_budgets
from tests.helpers.probes import probe_for
from tests.helpers.tiny import tiny_config

HEADS = ((1, 16), (2, 12), (1, 16))  # number and width, in each layer
KINDS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.fixture
def spec() -> ModelSpec:
    return create_model(tiny_config("gemma4", layer_types=KINDS), "float32").spec


def test_a_model_is_asked_for_the_heads_of_a_layer(spec: ModelSpec) -> None:
    assert [(spec.at(layer).kv_heads, spec.at(layer).head_dim) for layer in spec.kv_layers] == [*HEADS]
    assert spec.at(spec.kv_layers[1]) is spec and len(spec.of_heads) == 2
    assert spec.kv_bytes_per_token == 4 * sum(2 * number * width for number, width in HEADS)
    queries = [layer.out_width - spec.width for layer in spec.cut_at_attention().layers if layer.has_kv]
    assert queries == [spec.heads * width for _, width in HEADS]


def test_a_model_with_the_heads_of_a_layer_knows_those_of_the_others(spec: ModelSpec) -> None:
    for own in map(spec.at, spec.kv_layers):
        assert [(own.at(layer).kv_heads, own.at(layer).head_dim) for layer in spec.kv_layers] == [*HEADS]


@pytest.mark.parametrize("within", [False, True])
def test_what_layers_hold_is_counted_by_their_own_heads(spec: ModelSpec, within: bool) -> None:
    """Within windows all layers keep equally many tokens, and are yet of two levels."""
    model = spec.within_windows() if within else spec
    (block,) = Workload((4, 3), 3).blocks(2, 1)
    kv = HeldKV.of(model, Plan(), block)
    assert [(own.kv_heads, own.head_dim) for own in kv.specs] == [*HEADS[:2]]
    for layer, (number, width) in zip(model.kv_layers, HEADS, strict=True):
        (layout,) = (own for own in kv.layouts(layer, 0) if own is not None)
        assert layout.heads == number and kv.image_bytes(layer, 0) == 2 * layout.slots * 2 * number * width * model.itemsize


def test_prefixes_have_an_image_of_each_layer(spec: ModelSpec) -> None:
    layout = PrefixLayout.of(spec, 5, 4)
    images = [5 * 2 * number * width * spec.itemsize for number, width in HEADS]
    assert [layout.image_bytes(place) for place in range(3)] == images
    assert [layout.image_start(place) for place in range(3)] == [0, images[0], sum(images[:2])]
    assert [layout.notes_bytes(place) for place in range(3)] == [5 * 4 * number for number, _ in HEADS]
    assert layout.nbytes == sum(images) + 5 * 4 * 4


def test_what_is_told_of_each_head_is_refused(spec: ModelSpec) -> None:
    shares = head_budgets(FEW_LOOK_BACK, spec.kv_heads)
    for refuse, what in ((shares.refuse_other, "head budgets"), (probe_for(spec).refuse_other, "a probe")):
        with pytest.raises(ValueError, match=f"{what}: layers of .* have 1 or 2 KV heads"):
            refuse(spec)
    equal = create_model(tiny_config("gemma4-dense"), "float32").spec
    shares.refuse_other(equal)
    probe_for(equal).refuse_other(equal)

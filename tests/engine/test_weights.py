"""WeightStore: whatever tier a tensor lies on and in however many slices it comes, a layer sees the checkpoint's values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.checkpoints.packed import PackedCheckpoint
from h2o_flexgen.core import buffer_layout
from h2o_flexgen.core.buffer_layout import ALIGNMENT, VIEW_ALIGNMENT
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.core.site import DISK, Site
from h2o_flexgen.core.workload import Block, Workload
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.matrix import PackedMatrix
from h2o_flexgen.memory.disk import DiskFiles, FilePiece
from h2o_flexgen.memory.pack import TORCH_DTYPES
from h2o_flexgen.models import create_model, load_config
from h2o_flexgen.models.base import Weights
from h2o_flexgen.planning.placement import place, place_weights, traffic
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op, Visit
from h2o_flexgen.schedule.schedule import Schedule
from tests.engine.stores import opened_memories
from tests.helpers.contract import Checkpoints, opened
from tests.helpers.pairwise import on_devices
from tests.kernels.variants import used

ALL_ON_DISK, MIXED, IN_MEMORY = (0, 0, 100, 0, 100, 0), (30, 30, 100, 0, 100, 0), (40, 60, 100, 0, 100, 0)


def block_of_batches(count: int) -> Block:
    return Workload.uniform(2 * count, 4, 3).blocks(2, count)[0]


@contextmanager
def opened_store(
    kind: str,
    percent: tuple[float, ...],
    device: str,
    checkpoints: Checkpoints,
    offload: Path,
    stored: str = "float32",
    dtype: str = "float32",
    schedule: str = "zigzag",
    buffers: int = 2,
    batches: int = 3,
    format: str = PLAIN,
) -> Iterator[tuple[WeightStore, Schedule, ModelSpec]]:
    folder = checkpoints.folder(kind, stored)
    checkpoint = opened(folder)
    spec = create_model(load_config(str(folder)), dtype).spec.packed(format)
    spec = spec.map_tensors(lambda tensor: replace(tensor, stored_itemsize=checkpoint.stored_as(tensor.name).itemsize))
    source = checkpoint if format == PLAIN else PackedCheckpoint(checkpoint, spec)
    plan, block = (
        Plan(num_gpu_batches=batches, buffers=buffers, schedule=schedule).with_percent(percent),
        block_of_batches(batches),
    )
    with opened_memories(device, offload) as memories:
        site = Site(memories.device.accelerator)
        plan = plan.at(site)
        made = SCHEDULES[schedule](traffic(spec, plan, block, place(spec, plan, block), site))
        store = WeightStore(spec, place_weights(spec, plan), source, memories)
        store.prepare(made)
        yield store, made, spec


def run_and_compare(
    store: WeightStore,
    schedule: Schedule,
    checkpoints: Checkpoints,
    kind: str,
    stored: str,
    dtype: str,
    format: str = PLAIN,
    aligned_to: int = VIEW_ALIGNMENT,
) -> Counter[Op]:
    """Does the transfers in order of issue and looks at every COMPUTE's weights."""
    model, expected = checkpoints.model(kind, stored, dtype, format=format)
    moved: Counter[Op] = Counter()
    for task in schedule.tasks():
        if task.op is Op.READ_W:
            moved[task.op] += store.read(task)
        elif task.op is Op.LOAD_W:
            moved[task.op] += store.load(task)
        elif task.op is Op.COMPUTE:
            views = all_views(store, task.visit, model.spec.layers[task.layer])
            assert views.keys() == expected[task.layer].keys()
            for name, view in views.items():
                assert torch.equal(view.cpu(), expected[task.layer][name]), f"{name} at {task}"
                assert view.dtype == TORCH_DTYPES[dtype] and view.data_ptr() % aligned_to == 0
    return moved


def all_views(store: WeightStore, visit: Visit, layer: LayerSpec) -> dict[str, torch.Tensor]:
    """A packed table as well: of an embedding every row is looked up, of a head every part is put behind the one before."""
    if not layer.in_pieces:
        return values_of(store.views(visit))
    (name,) = layer.in_pieces
    if layer.takes_tokens:
        every = torch.arange(dict(layer.tensors)[name].shape[0], device=store._memories.device.torch_device)
        places, weights = store.look_up(visit, every[None])
        assert torch.equal(places[0], every)
        return values_of(weights)
    parts = [values_of(weights)[name].clone() for weights in store.logit_parts(visit)]
    assert [len(part) for part in parts] == [rows.stop - rows.start for rows in layer.logit_parts]
    return values_of(store.views(visit)) | {name: torch.cat(parts)}


def values_of(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: one.values() if isinstance(one, PackedMatrix) else one for name, one in weights.items()}


PACKED = {
    "format": ["group4", "group8"],
    "schedule": list(SCHEDULES),
    "percent": [ALL_ON_DISK, MIXED, IN_MEMORY],
    "kind": ["opt-350m", "qwen2-wordy", "neox-parallel"],
}


@pytest.mark.parametrize("values", on_devices(PACKED))
def test_packed_weights_and_every_row_of_tables_are_what_decoding_all_gives(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    kind, percent, device, schedule = (values[name] for name in ("kind", "percent", "device", "schedule"))
    opened = opened_store(kind, percent, device, checkpoints, offload, schedule=schedule, format=values["format"])
    with used(TORCH), opened as (store, made, _):  # without kernels matrices are decoded before they are multiplied
        run_and_compare(store, made, checkpoints, kind, "float32", "float32", values["format"])


def test_rows_are_looked_up_for_each_token_wherever_it_stands(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    _, expected = checkpoints.model("qwen2-wordy", "float32", "bfloat16", format="group4")
    resident, tokens = (100, 0, 100, 0, 100, 0), torch.tensor([[7, 1099, 0], [7, 7, 512]])
    opened = opened_store("qwen2-wordy", resident, any_device, checkpoints, offload, dtype="bfloat16", format="group4")
    with opened as (store, _, spec):
        places, weights = store.look_up(Visit(0, 0, 0), tokens.to(store._memories.device.torch_device))
        table = values_of(weights)["embed_tokens.weight"]
        assert table.shape == (6, spec.width)
        assert torch.equal(table[places].cpu(), expected[0]["embed_tokens.weight"][tokens])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("percent", [ALL_ON_DISK, MIXED, IN_MEMORY])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_every_visit_sees_the_values_of_the_checkpoint(
    schedule: str, percent: tuple[float, ...], buffers: int, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with opened_store("opt", percent, any_device, checkpoints, offload, schedule=schedule, buffers=buffers) as (store, made, _):
        run_and_compare(store, made, checkpoints, "opt", "float32", "float32")


@pytest.mark.parametrize(("stored", "dtype"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("percent", [ALL_ON_DISK, MIXED, IN_MEMORY])
def test_types_are_converted_on_the_way(
    stored: str, dtype: str, percent: tuple[float, ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with opened_store("llama-gqa", percent, any_device, checkpoints, offload, stored, dtype) as (store, made, _):
        run_and_compare(store, made, checkpoints, "llama-gqa", stored, dtype)


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_slices_move_every_byte_of_a_layer_once_per_step(
    batches: int, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with opened_store("qwen2", ALL_ON_DISK, any_device, checkpoints, offload, "bfloat16", batches=batches) as (
        store,
        made,
        spec,
    ):
        moved = run_and_compare(store, made, checkpoints, "qwen2", "bfloat16", "float32")
        stored = sum(tensor.stored_nbytes for layer in spec.layers for _, tensor in layer.tensors)
    assert moved[Op.READ_W] == 3 * stored
    assert moved[Op.LOAD_W] == (0 if any_device == "cpu" else 3 * 2 * stored)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize(("dtype", "is_straight"), [("bfloat16", True), ("float16", False), ("float32", False)])
def test_values_of_16_bits_are_read_straight_to_where_they_lie_in_a_page(
    dtype: str, is_straight: bool, batches: int, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in slices. What is converted, and what shares its pages with others, goes through a buffer."""
    straight, through_buffer = set[int](), set[int]()
    read_to_buffer, read_chunk = DiskFiles._read_to_buffer, DiskFiles._read_chunk

    def watched(self: DiskFiles, piece: FilePiece) -> None:
        (through_buffer if piece.pages is None else straight).add(piece.nbytes)
        read_chunk(self, piece)

    def to_buffer(self: DiskFiles, wanted: FilePiece) -> memoryview:
        assert wanted.pages is None
        return read_to_buffer(self, wanted)

    monkeypatch.setattr(buffer_layout, "PAGE_ALIGNED_FROM", SMALL := 1024)
    monkeypatch.setattr(DiskFiles, "_read_chunk", watched)
    monkeypatch.setattr(DiskFiles, "_read_to_buffer", to_buffer)
    opened = opened_store("qwen2", ALL_ON_DISK, "cpu", checkpoints, offload, "bfloat16", dtype, batches=batches)
    with opened as (store, made, _):
        offsets = [segment.stored.offset for one in store._stored.values() for segment in one.segments]
        run_and_compare(store, made, checkpoints, "qwen2", "bfloat16", dtype, aligned_to=2)
    assert any(offset % ALIGNMENT for offset in offsets)
    assert bool(straight) == is_straight and (max(through_buffer) < SMALL) == is_straight


def test_only_what_lies_on_disk_has_files(checkpoints: Checkpoints, offload: Path) -> None:
    with opened_store("opt", IN_MEMORY, "cpu", checkpoints, offload) as (store, _, _):
        assert store.files == ()
    with opened_store("opt", MIXED, "cpu", checkpoints, offload) as (store, _, spec):
        tiers = place_weights(spec, Plan().with_percent(MIXED).folded())
        assert DISK in tiers.values()
        assert set(store.files) <= set(checkpoints.folder("opt").glob("*.safetensors")) and store.files


def test_buffers_are_made_once_for_all_blocks(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    with opened_store("opt", ALL_ON_DISK, any_device, checkpoints, offload) as (store, made, _):
        tiers = (store._memories.host, store._memories.weights)
        before = [tier.meter.used_bytes for tier in tiers]
        store.prepare(made)
        run_and_compare(store, made, checkpoints, "opt", "float32", "float32")
        assert [tier.meter.used_bytes for tier in tiers] == before and sum(before) > 0

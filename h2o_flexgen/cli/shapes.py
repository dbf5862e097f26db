"""The shapes of a model under a plan: from its config and, where they are there, the headers of its files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from h2o_flexgen.cli.flags import AUTO
from h2o_flexgen.cli.requests import ModelRequest
from h2o_flexgen.core.model_spec import ModelSpec, usual_dtype
from h2o_flexgen.models import create_model, known_config, load_config
from h2o_flexgen.models.checkpoint import Checkpoint
from h2o_flexgen.models.layout import Config
from h2o_flexgen.planning.plan import Plan


@dataclass(frozen=True)
class Shapes:
    """A function of a plan, as a search asks for it: each answer is made once."""

    name: str
    config: Config
    dtype: str
    checkpoint: Checkpoint | None  # says what is stored in another type than it is computed with
    _known: dict[tuple[bool, str, str], ModelSpec] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, chosen: ModelRequest, accelerator: bool) -> Shapes:
        seen = chosen.without_weights()
        checkpoint = None if seen.dummy_weights else Checkpoint(chosen.folder)
        config = (
            load_config(str(checkpoint.folder)) if checkpoint else known_config(chosen.source) or load_config(chosen.source)
        )
        stored = checkpoint.dtype if checkpoint else None
        dtype = usual_dtype(accelerator, stored) if chosen.dtype == AUTO else chosen.dtype
        return cls(chosen.source, config, dtype, checkpoint)

    def __call__(self, plan: Plan) -> ModelSpec:
        kind = plan.sep_layer, plan.weight_codec, plan.kv_codec
        if kind not in self._known:
            self._known[kind] = self._made(plan.sep_layer).written_as(plan.weight_codec, plan.kv_codec)
        return self._known[kind]

    def _made(self, sep_layer: bool) -> ModelSpec:
        spec = create_model(self.config, self.dtype, sep_layer, self.name).spec
        if self.checkpoint is None:
            return spec
        stored = self.checkpoint.stored_itemsize
        return spec.map_tensors(lambda tensor: replace(tensor, stored_itemsize=stored(tensor.name)))

"""PrefixFolder: the folder in which the prefixes of a model outlive the process. It bears a mark that says of which model they
are, and is refused for any other."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch

import h2o_flexgen
from h2o_flexgen.checkpoints.derived import model_name
from h2o_flexgen.checkpoints.stale_files import written_beside
from h2o_flexgen.core.buffer_layout import PrefixLayout
from h2o_flexgen.core.files import local_path, parse_json
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.engine.row_adapters import RowAdapters
from h2o_flexgen.engine.stores.prefix_files import PrefixFiles
from h2o_flexgen.formats.kernel_sizes import shared
from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.session.open_request import SiteRequest
from h2o_flexgen.session.opened_model import OpenedModel

MARK = "prefixes.json"
FORMAT = 1  # of what lies in a file


@dataclass(frozen=True)
class PrefixFolder:
    path: Path
    limit: int  # bytes of all files
    opened: OpenedModel

    @classmethod
    def of(cls, site: SiteRequest, opened: OpenedModel) -> PrefixFolder | None:
        """The folder that is asked for, if one is. That of another model is refused."""
        if site.prefix_dir is None:
            return None
        folder = cls(local_path(site.prefix_dir), parse_bytes(site.prefix_dir_size), opened)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder._mark(site.named("prefix_dir"))
        except OSError as error:
            given = site.named("prefix_dir")
            raise ValueError(
                f"prefix folder {folder.path} cannot be written ({reason(error)}); give another {given}"
            ) from error
        return folder

    def _mark(self, flag: str) -> None:
        """Refuses a folder with the mark of another model, and marks one that has none."""
        opened, file = self.opened, self.path / MARK
        name = model_name(Path(opened.name) if opened.folder is None else opened.folder)
        own, found = {"model": name, "config": opened.config_digest}, None
        with suppress(FileNotFoundError, ValueError, AttributeError):  # what cannot be read marks nothing
            found = parse_json(file.read_bytes()).get("config", opened.config_digest)
        if found is None:
            with written_beside(file) as descriptor:
                os.write(descriptor, json.dumps(own).encode())
        elif found != opened.config_digest:
            other = shown(parse_json(file.read_bytes()).get("model"))
            raise ValueError(
                f"prefix folder {self.path} has prefixes of {other}, and this model is {name!r}; give another {flag}"
            )

    def files(self, spec: ModelSpec, plan: Plan, site: Site, device: Device, adapters: RowAdapters) -> PrefixFiles:
        """The prefixes of the model under this plan, as this device of the site computes them, with and without adapters."""
        return PrefixFiles(self.path, self.limit, self.kind(spec, plan, site, device), lambda: adapters.identities)

    def kind(self, spec: ModelSpec, plan: Plan, site: Site, device: Device) -> str:
        """What the names of these prefixes begin with."""
        said = json.dumps(self._depends_on(spec, plan, site, device), sort_keys=True, default=str)
        return blake2b(said.encode(), digest_size=8).hexdigest()

    def _depends_on(self, spec: ModelSpec, plan: Plan, site: Site, device: Device) -> dict[str, object]:
        """All that the bytes of a prefix depend on beside its tokens, and how they lie. Their last bits also depend on what it
        was computed behind: a prefix that begins with a copy of another has that one's bits."""
        read = [None if one is None else one.checksum for one in (plan.head_budgets, plan.probe)]
        return {
            "format": FORMAT,
            "model": self.opened.identity,
            "dtype": spec.dtype,
            "weights": [plan.weight_codec, plan.compute],
            "kv": [plan.kv_codec, asdict(PrefixLayout.of(spec, 1, plan.prefix_note_bytes))],
            "policy": [plan.kv_policy, asdict(plan.kv_options), plan.prefix_policy, *read],
            "passes": plan.prefill_tokens,
            "computed by": [describe_machine(device)["device"], site.processor.device, site.threads, torch.__version__],
            "kernels": [site.processor.kernels, shared().kernels_version, h2o_flexgen.__version__],
        }

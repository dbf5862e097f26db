"""MachineSource: the machine that a plan is found for. It is named, or it is this one, which is measured once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.host import whole_bytes
from h2o_flexgen.memory.memories import own_site
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.profiling.profile_cache import machine_before_profile, profile_at_hand, this_machine
from h2o_flexgen.session.open_request import SiteRequest, refuse_other_device


@dataclass
class MachineSource:
    named: Machine | None  # None: this machine
    device: Device | None  # that would compute; None: that of the named machine, which is another one
    offload_folder: Path
    dtype: str  # as it was asked for
    processes: int = 1  # that share the machine
    _known: Machine | None = field(default=None, repr=False)
    _saved: dict[str, Machine] = field(default_factory=dict, repr=False)  # by dtype: profiles that were read

    def __post_init__(self) -> None:
        if self.named is not None and self.device is not None:
            refuse_other_device(self.named, self.device.kind)

    @classmethod
    def at_site(cls, named: Machine | None, site: SiteRequest, dtype: str) -> MachineSource:
        """The machine for a model that is not open."""
        return cls(named, None if named else open_device(site.device), site.offload_folder, dtype, site.gpus)

    def before_measuring(self) -> Machine:
        """The machine as far as it is known without a measurement."""
        if self.named is not None:
            return self.named
        assert self.device is not None
        return self.at_hand(self._measured_dtype) or machine_before_profile(self.device, self.offload_folder)

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes that the machine has, free or not, by tier."""
        if self.named is not None:
            return {DEVICE: self.named.device_bytes, HOST: self.named.host_bytes}
        assert self.device is not None
        on_device = self.device.whole_bytes()
        return {HOST: whole_bytes()} if on_device is None else {DEVICE: on_device, HOST: whole_bytes()}

    def at_hand(self, dtype: str | None) -> Machine | None:
        """This machine's saved profile, of which the file is read once; None if there is none."""
        assert self.device is not None
        dtype = dtype or own_site(self.device.kind, self.device.accelerator).usual_dtype()
        if dtype not in self._saved:
            found = profile_at_hand(self.device, self.offload_folder, dtype)
            if found is None:
                return None
            self._saved[dtype] = found
        return self._saved[dtype]

    def measured(self, progress: Progress) -> Machine:
        """The named machine; otherwise this one, by its saved profile or measured now, which is shown."""
        if self._known is None:
            found = self.named
            if found is None:
                assert self.device is not None
                found = this_machine(self.device, self.offload_folder, self._measured_dtype, progress)
            self._known = found.shared_by(self.processes)
        return self._known

    @property
    def _measured_dtype(self) -> str | None:
        """None: the one that is usual there."""
        return None if self.dtype == AUTO else self.dtype

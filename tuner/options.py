"""The options of a study, and the refusal of bad ones before anything is opened or written."""

from __future__ import annotations

from dataclasses import dataclass

from backends.base import SessionSpec
from tuner.devices import check_device
from tuner.errors import OptionError
from tuner.sampling import SAMPLERS
from tuner.storage import parse_location
from workloads import registry
from workloads.graph import OpGraph

BACKENDS = ("cmp",)
MAX_SEED = 2**31 - 1  # samplers and input generators take 32 bits


@dataclass(frozen=True)
class Options:
    """How a study runs.

    Attributes:
        trials: trials that cost device time.
        timeout_s: most seconds of searching, or None.
        storage: storage option, or None for the default journal.
        sampler: `tpe` or `random`.
        seed: of the sampler.
        backend: of the configs.
    """

    trials: int
    timeout_s: float | None = None
    storage: str | None = None
    sampler: str = "tpe"
    seed: int = 0
    backend: str = "cmp"

    def check(self) -> None:
        """Refuses what cannot be.

        Raises:
            OptionError: names the option and what would be right.
        """
        parse_location(self.storage)
        if self.sampler not in SAMPLERS:
            raise OptionError(f"unknown sampler {self.sampler!r}: use {' or '.join(SAMPLERS)}")
        if self.backend not in BACKENDS:
            raise OptionError(f"unknown backend {self.backend!r}: use {' or '.join(BACKENDS)}")
        if self.trials < 1:
            raise OptionError(f"trials={self.trials} is out of range: use 1 or more")
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError(f"seed={self.seed} is out of range: use 0 to {MAX_SEED}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise OptionError(f"timeout={self.timeout_s:g} is out of range: use more than 0 seconds")


def graph_of(spec: SessionSpec) -> OpGraph:
    """The op graph that a spec asks for; refuses malformed specs without opening a device.

    Raises:
        InputError: unknown workload, op or device name, or a shape out of range.
    """
    workload = registry.get(spec.workload)
    graph = workload.graph(workload.shape(spec.params))
    check_device(spec.device)
    return graph.subgraph(spec.ops) if spec.ops is not None else graph

"""The branches of the error tree that running raises.

SpantuneError
+- InputError
|  +- DeviceError        the named device does not exist or cannot run spantune
|  +- BuildUnavailable   a compiler or the CUDA libraries are missing
+- BackendError
   +- BuildFailed        a binary does not compile (carries the compiler's log)
   +- UnsafePlan         the plan verifier found a witness
   +- GraphMismatch      the edges read back differ from the plan's
   +- CudaFailed         a driver call failed (carries the call and the code)
   +- MeasurementVoid    throttling, another process, or clock drift spoiled a round
"""

from __future__ import annotations

from workloads.errors import InputError, SpantuneError


class DeviceError(InputError):
    """No such device, or one that cannot run what is asked for."""


class BuildUnavailable(InputError):
    """What building needs is not installed; names it and the extra that brings it."""


class BackendError(SpantuneError):
    """Running a legal config failed."""


class BuildFailed(BackendError):
    """A binary does not compile.

    Attributes:
        log: the compiler's output.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class UnsafePlan(BackendError):
    """A plan that could race or deadlock; the text names the witness."""


class GraphMismatch(BackendError):
    """The graph that the driver holds is not the plan's."""


class CudaFailed(BackendError):
    """A driver call failed.

    Attributes:
        call: the entry point.
        code: the driver's numeric result.
    """

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} failed with {name or code}")
        self.call = call
        self.code = code

    @property
    def sticky(self) -> bool:
        """Whether the context is lost (illegal address, launch failure, and the like)."""
        return self.code in {700, 702, 714, 715, 716, 717, 718, 719, 999}


class MeasurementVoid(BackendError):
    """A round whose readings must not be used; it is repeated, never held against the config."""

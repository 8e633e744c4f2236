"""The branch of the error tree that tuning raises.

SpantuneError
+- InputError
|  +- OptionError       an option of a study is malformed: storage, sampler, backend, budget
|  +- SessionRefused    the measuring process could not open what was asked for
+- TunerError
   +- DeviceBusy        another process measures on the same GPU
   +- StorageBusy       another process runs the same study on the same journal
   +- StudyFailed       the reference config or the measuring process fails, so that no ratio exists
"""

from __future__ import annotations

from workloads.errors import InputError, SpantuneError


class OptionError(InputError):
    """A malformed option; names it and what would be right."""


class SessionRefused(InputError):
    """The device, the workload or what it needs is missing, as the measuring process found."""


class TunerError(SpantuneError):
    """Tuning cannot go on."""


class DeviceBusy(TunerError):
    """Another process holds the measuring lock of the GPU."""


class StorageBusy(TunerError):
    """Another process runs this study: both would measure what the other has measured."""


class StudyFailed(TunerError):
    """What every trial depends on does not work."""

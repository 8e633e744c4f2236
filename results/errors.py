"""The branch of the error tree that stored results raise.

SpantuneError
+- InputError
   +- BestFileError      a best file is corrupted, incomplete, newer than this spantune, or must not be written
   +- ResultsPathError   a results folder that was named does not exist or cannot be written
   +- NoConfigError      no stored config matches and no default can be made
   +- TensorError        a tensor given to a layer is missing, unknown, or of another shape, dtype, device or layout
   +- LayerClosedError   a layer was run after it had been closed
"""

from __future__ import annotations

from workloads.errors import InputError


class BestFileError(InputError):
    """A best file cannot be read or must not be written; names the file and what is wrong."""


class ResultsPathError(InputError):
    """A folder of results that cannot be used; names the folder and who named it."""


class NoConfigError(InputError):
    """Nothing stored matches and no default can be made; says what is missing."""


class TensorError(InputError):
    """A tensor that a layer cannot run on; names the tensor and what it must be."""


class LayerClosedError(InputError):
    """A layer that has given its graph and memory back is asked to run."""

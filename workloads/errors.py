"""The root of the error tree and the branch that workloads raise.

SpantuneError
+- InputError            what the caller asked for is not possible; one line, exit code 2
|  +- WorkloadError      unknown workload, shape out of range, sub-graph not closed, malformed graph
|  +- ...                `search_spaces`, `backends`, `results` and `tuner` add their own branches
+- ...
"""

from __future__ import annotations


class SpantuneError(Exception):
    """Every error that spantune raises on purpose."""


class InputError(SpantuneError):
    """Bad input: names what was wrong and what would be right, in one line."""


class WorkloadError(InputError):
    """An unknown workload, an impossible shape, or a malformed op graph."""

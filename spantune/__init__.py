"""spantune: finds the fastest way to launch a decode-time kernel graph, and loads what it found.

The public names load what they need when they are first used, so that `import spantune` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backends.base import SessionSpec
    from results.load import load_layer
    from tuner.study import StudyResult
    from tuner.study import run_study as tune

__all__ = ["SessionSpec", "StudyResult", "load_layer", "tune"]

_HOMES = {
    "SessionSpec": ("backends.base", "SessionSpec"),
    "StudyResult": ("tuner.study", "StudyResult"),
    "load_layer": ("results.load", "load_layer"),
    "tune": ("tuner.study", "run_study"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spantune' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

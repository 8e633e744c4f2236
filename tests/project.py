"""What the tests of the project itself agree on: its packages, and which of its modules must stay light."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("spantune", "tuner", "results", "backends", "search_spaces", "workloads")
# Standard library alone: these load in milliseconds, and where nothing else is installed.
LIGHT_MODULES = ("spantune", "workloads.registry", "search_spaces.cmp", "backends.sessions", "results.record")

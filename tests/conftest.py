"""What all tests share: GPU tests are skipped, with the reason, where the GPUs are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import settings

# Shared runners are slow and uneven, so an example has no deadline of its own; the test's timeout covers it.
# A failing example is found again on every machine, because the seed comes from the test itself.
settings.register_profile("spantune", deadline=None, derandomize=True)
settings.load_profile("spantune")

# In a process of its own: a driver that is initialised here would be broken in every child that a test forks.
COUNT_GPUS = """
import ctypes
count = ctypes.c_int(0)
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    print(count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0)
"""


@lru_cache(maxsize=1)
def num_gpus() -> int:
    """Counts the GPUs that the CUDA driver shows; 0 without a driver."""
    answer = subprocess.run([sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, timeout=60, check=True)
    return int(answer.stdout)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` or `multi_gpu` that lack their GPUs."""
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed and num_gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {num_gpus()}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Warns of records that were measured on other device sources than those in the tree."""
    from backends.cuda.jit import source_hash

    folder = Path(__file__).parent.parent / "benchmarks" / "records"
    for path in sorted(folder.rglob("*.json")):
        provenance = json.loads(path.read_text()).get("provenance", {})
        measured = provenance.get("source_hash", "")
        if measured and not provenance.get("simulated") and measured != source_hash():
            name = path.relative_to(folder)
            terminalreporter.write_line(
                f"WARNING: {name} was measured on device sources {measured}; the tree has {source_hash()}", yellow=True
            )

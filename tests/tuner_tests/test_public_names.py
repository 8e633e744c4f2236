"""The public surface is short, sorted, lazy, and every name leads somewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spantune


def test_the_list_is_sorted_and_complete() -> None:
    assert spantune.__all__ == sorted(spantune.__all__) == dir(spantune)


@pytest.mark.parametrize("name", spantune.__all__)
def test_every_name_leads_somewhere(name: str) -> None:
    assert callable(getattr(spantune, name))


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spantune.nothing


def test_importing_loads_nothing_else() -> None:
    code = "import spantune, sys; print([m for m in ('tuner', 'results', 'backends', 'optuna') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

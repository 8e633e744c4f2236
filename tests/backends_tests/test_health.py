"""What voids a round, and that a machine without NVML can tell nothing."""

from __future__ import annotations

import ctypes

import pytest

from backends.cuda.health import Health, Reading, judge


@pytest.mark.parametrize(
    ("reading", "busy", "word"),
    [
        (Reading(1980, 0x4, 0), 1980, "power cap"),
        (Reading(1980, 0x40, 0), 1980, "thermal"),
        (Reading(1980, 0, 1), 1980, "1 other process on"),
        (Reading(1980, 0, 3), None, "3 other processes"),
        (Reading(1950, 0, 0), 1980, "fell from 1980 to 1950"),
    ],
)
def test_a_disturbed_round_is_named(reading: Reading, busy: int | None, word: str) -> None:
    assert word in (judge(reading, busy) or "")


@pytest.mark.parametrize(
    ("reading", "busy"), [(Reading(1980, 0, 0), 1980), (Reading(1965, 0, 0), 1980), (Reading(345, 1, 0), None)]
)
def test_a_quiet_round_counts(reading: Reading, busy: int | None) -> None:
    assert judge(reading, busy) is None


def test_without_nvml_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", missing)
    health = Health("00" * 16)
    assert health.read() is None
    assert health.disturbance() is None


class FakeNvml:
    """The one entry point that tells the driver's release."""

    @staticmethod
    def nvmlSystemGetDriverVersion(text: ctypes.Array[ctypes.c_char], size: int) -> int:  # noqa: N802 - NVML's name
        assert size == len(text)
        text.value = b"580.95.05"
        return 0


def test_versions_name_the_driver_release_and_the_libraries() -> None:
    from backends.cuda.session import _versions

    health = Health("00" * 16)
    assert _versions("13.0", health.driver()).keys() >= {"driver_cuda", "nvrtc", "python", "torch", "numpy"}
    health._nvml = FakeNvml()
    assert _versions("13.0", health.driver())["driver"] == "580.95.05"

"""What can be decided about a config without a device: whether it is legal, and which plan it is."""

from __future__ import annotations

from dataclasses import dataclass

from backends.plan import launches
from search_spaces.cmp import CmpSpace
from search_spaces.config import CmpConfig
from search_spaces.errors import ConfigError, IllegalConfig


@dataclass(frozen=True)
class Screened:
    """A plan key, or the reason why there is no plan."""

    plan_key: str = ""
    reason: str = ""


def screen(space: CmpSpace, config: CmpConfig) -> Screened:
    """Checks and lowers a config; equal plan keys need not be measured twice."""
    try:
        space.check(config)
        return Screened(launches.lower(space.graph, config, space.gpu.arch).key())
    except (IllegalConfig, ConfigError) as error:
        return Screened(reason=str(error))

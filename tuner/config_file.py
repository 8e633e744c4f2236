"""A config from a file: alone, or among published best configs."""

from __future__ import annotations

import json
from pathlib import Path

from backends.base import SessionSpec
from results import best
from search_spaces.config import CmpConfig, from_json
from tuner.errors import OptionError
from tuner.identity import shape_key
from workloads.graph import OpGraph


def read_config(path: Path, spec: SessionSpec, graph: OpGraph, *, any_shape: bool = False) -> CmpConfig:
    """The cmp config of a workload in a file.

    Args:
        path: a file with one config, or with best configs.
        spec: workload, shape and device that an entry must be for.
        graph: the spec's op graph.
        any_shape: where the file has no entry of this shape, takes its first entry.

    Raises:
        OptionError: the file holds none; the text says what it holds.
        ConfigError: the config is malformed.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"config {path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise OptionError(f"config {path} is neither a config nor a best file")
    if "entries" in document:
        wanted = (shape_key(spec), graph.digest(), spec.l2)
        published = best.load(path)
        entries = [e for e in published if (e.shape_key, e.graph_digest, e.l2) == wanted]
        if any_shape:
            entries += published
        if not entries:
            raise OptionError(f"config {path} holds no entry for {spec.workload} {shape_key(spec)}, L2 {spec.l2}")
        document = dict(entries[0].config)
    config = from_json(document)
    if not isinstance(config, CmpConfig):
        raise OptionError(f"config {path} is of backend {config.backend}: only cmp configs can be read here")
    return config

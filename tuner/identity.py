"""What a study is called and where its numbers come from."""

from __future__ import annotations

import hashlib
from typing import Any

from backends.base import SessionSpec
from results.best import device_slug
from results.record import Provenance
from search_spaces.cmp import CmpSpace
from workloads import registry


def shape_key(spec: SessionSpec) -> str:
    """Short name of a spec's shape."""
    return registry.get(spec.workload).shape(spec.params).key()


def provenance_of(spec: SessionSpec, described: dict[str, Any]) -> Provenance:
    """Where numbers of an executor come from."""
    simulated = bool(described["simulated"])
    protocol = {"l2": spec.l2, **described["protocol"]}
    return Provenance(
        device=spec.device if simulated else described["gpu"]["name"],
        device_id=spec.device,
        uuid=described["uuid"],
        simulated=simulated,
        versions=dict(described["versions"]),
        protocol=protocol,
        source_hash=str(protocol.get("source_hash", "")),
        clocks={"before": described["clocks"]},
    )


def study_name(spec: SessionSpec, space: CmpSpace, provenance: Provenance, backend: str, sampler: str) -> str:
    """workload/shape/device/backend/space-hash/source-hash: another space or other sources make another study."""
    what = f"{space.digest_text()} {spec.l2}"
    if spec.construction != "direct":
        what += f" {spec.construction}"  # other plans under the same configs
    space_hash = hashlib.sha256(what.encode()).hexdigest()[:8]
    source_hash = provenance.source_hash[:8] or "none"
    parts = [spec.workload, shape_key(spec), device_slug(provenance.device), backend, space_hash, source_hash]
    return "/".join(parts if sampler == "tpe" else [*parts, sampler])

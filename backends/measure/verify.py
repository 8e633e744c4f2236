"""The verifier: outputs against the reference once per numerics key, then bit for bit.

Every check runs with poisoned outputs and workspaces, on more than one variant of inputs, positions, slots and caches,
so that nothing stale can pass. It takes no time readings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backends.base import Verdict

POISON = 0xFF  # NaN in bf16, e4m3 and f32
KEPT_KEYS = 64  # numerics keys whose output bits are kept on the device

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """Inputs of one check and the answer to them."""

    tensors: Tensors
    want: Tensors


class Verifier:
    """Checks executables of one session.

    Args:
        variants: inputs with reference outputs.
        load: makes a variant's inputs and caches current on the device, and poisons everything that ops write.
        outputs: views of what ops write, by tensor name.
        compare: the workload's comparison of (got, want, numerics key); returns mismatches, printable.
    """

    def __init__(
        self,
        variants: list[Variant],
        load: Callable[[Variant], None],
        outputs: Callable[[], Tensors],
        compare: Callable[[Tensors, Tensors, str], list[Any]],
    ) -> None:
        self._variants = variants
        self._load = load
        self._outputs = outputs
        self._compare = compare
        self._golden: OrderedDict[str, list[dict[str, torch.Tensor]]] = OrderedDict()

    def check(self, numerics_key: str, replay: Callable[[], None]) -> Verdict:
        """Runs `replay` (which returns when the device is done) on every variant and judges what it wrote."""
        golden = self._golden.get(numerics_key)
        kept: list[dict[str, torch.Tensor]] = []
        for i, variant in enumerate(self._variants):
            self._load(variant)
            replay()
            got = self._outputs()
            if golden is not None:
                message = _differing_bits(got, golden[i])
                if message:
                    return Verdict(False, "bits", f"{message} (inputs {i}), at numerics key {numerics_key}")
                continue
            mine = {name: tensor for name, tensor in got.items() if name in variant.want}
            mismatches = self._compare(mine, variant.want, numerics_key)
            if mismatches:
                return Verdict(False, "reference", f"{mismatches[0]} (inputs {i})")
            kept.append({name: tensor.clone() for name, tensor in got.items()})
        if golden is not None:
            self._golden.move_to_end(numerics_key)
            return Verdict(True, "bits")
        # The first plan of a key is replayed once more: it must repeat its own bits.
        self._golden[numerics_key] = kept
        if len(self._golden) > KEPT_KEYS:
            self._golden.popitem(last=False)
        again = self.check(numerics_key, replay)
        if not again.passed:
            del self._golden[numerics_key]
            return again
        return Verdict(True, "reference")

    def outputs_for(self, index: int, replay: Callable[[], None]) -> dict[str, torch.Tensor]:
        """Copies of everything that a replay on variant `index` writes."""
        self._load(self._variants[index])
        replay()
        return {name: tensor.clone() for name, tensor in self._outputs().items()}


def _differing_bits(got: Tensors, want: Tensors) -> str:
    for name, tensor in got.items():
        mine, other = tensor.reshape(-1).view(torch.uint8), want[name].reshape(-1).view(torch.uint8)
        if not torch.equal(mine, other):
            bad = (mine != other).nonzero()
            return f"{name}: {len(bad)} bytes differ, the first at byte {int(bad[0])}"
    return ""

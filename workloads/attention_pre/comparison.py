"""Compares what a run of the attention-pre layer wrote with the reference, tensor by tensor.

Limits, and the two bands of rows that they have, are in `tolerances`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from workloads.attention_pre import tolerances as limits
from workloads.attention_pre.numerics import E4M3, Quantised, Tensors, paged_score
from workloads.attention_pre.shapes import INDEX_TOKEN_BYTES, MLA_TOKEN_BYTES, PAGE_TOKENS, AttentionPreShape
from workloads.attention_pre.tolerances import Band
from workloads.mismatch import Mismatch


def compare(
    shape: AttentionPreShape,
    got: Tensors,
    want: Tensors,
    *,
    names: Iterable[str] | None = None,
    core: str = "mma_sync",
) -> list[Mismatch]:
    """Mismatches between a run's tensors and the reference's; empty when the run is right.

    Args:
        shape: of the step.
        got: what the run wrote, by name; logits were NaN before it and caches held the inputs.
        want: the result of `reference`.
        names: tensors to check. Without it the layer's outputs, which must be there, and whatever inner tensors are.
        core: the MMA core of the FP8 products; `wgmma` where any of them used it.
    """
    known = (*limits.REQUIRED, *limits.OPTIONAL)
    chosen = set(names) if names is not None else {*limits.REQUIRED, *(name for name in known if name in got)}
    found, usable = usable_tensors(known, chosen, got, want)
    judge = _LayerJudge(shape, usable, want, core)
    judge.run()
    return found + [m for m in judge.found if m.tensor in chosen]


def usable_tensors(
    known: Iterable[str], chosen: set[str], got: Tensors, want: Tensors
) -> tuple[list[Mismatch], dict[str, torch.Tensor]]:
    """Mismatches of tensors that are missing or of another kind than the reference's, and the others."""
    found: list[Mismatch] = []
    usable: dict[str, torch.Tensor] = {}
    for name in known:
        if name not in got:
            if name in chosen:
                found.append(Mismatch(name, "is missing", 1, (), float("nan"), float("nan")))
        elif got[name].shape != want[name].shape or got[name].dtype != want[name].dtype:
            rule = f"is {_kind(got[name])} in place of {_kind(want[name])}"
            found.append(Mismatch(name, rule, 1, (), float("nan"), float("nan")))
        else:
            usable[name] = got[name]
    return found, usable


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class Judge:
    """Checks tensors with one row a token against the reference, carrying which rows are settled."""

    def __init__(self, rows: int, got: Tensors, want: Tensors, core: str) -> None:
        self.rows, self.got, self.want = rows, got, want
        self.fp8_flips, self.mixed_flips = limits.FP8_FLIPS[core], limits.FP8_MIXED_FLIPS[core]
        self.found: list[Mismatch] = []
        self.settled = next(iter(want.values())).new_ones(rows, dtype=torch.bool)

    def _value(self, name: str) -> torch.Tensor | None:
        return self.got[name].double() if name in self.got else None

    def _rows_equal(self, name: str) -> torch.Tensor:
        """Which token rows of a tensor equal the reference's; none where the tensor is not given."""
        if name not in self.got:
            return torch.zeros_like(self.settled)
        return (self.got[name].float() == self.want[name].float()).flatten(1).all(1)

    def _add(self, name: str, rule: str, bad: torch.Tensor, error: torch.Tensor, values: list[torch.Tensor]) -> None:
        """Reports the elements of `bad`, worst by `error`; all of one shape."""
        if not bad.any():
            return
        ranked = torch.where(bad, error.double().nan_to_num(nan=torch.inf), -1.0)
        index = tuple(int(i) for i in torch.unravel_index(ranked.argmax(), bad.shape))
        got, want = (float(v[index].double()) for v in values)
        if name in ("h_sf", "q_sf"):  # judged as [M, k-blocks], stored as [k-blocks, M]
            index = index[::-1]
        self.found.append(Mismatch(name, rule, int(bad.sum()), index, got, want))

    def _finite(self, name: str, got: torch.Tensor, want: torch.Tensor) -> bool:
        """Reports NaN and infinity where the reference is finite."""
        bad = ~got.isfinite() & want.isfinite()
        self._add(name, "is not finite", bad, bad.double(), [got, want])
        return not bool(bad.any())

    def _band(self, band: Band, settled: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The limit of each row, shaped to broadcast over `like`."""
        limit = torch.where(settled, band.settled, band.unsettled).double()
        return limit.view(-1, *[1] * (like.dim() - 1))

    def _exact(self, name: str) -> None:
        got, want = self.got[name].double(), self.want[name].double()
        if self._finite(name, got, want):
            self._add(name, "differs where it must be exact", got != want, (got - want).abs(), [got, want])

    def _close(self, name: str, settled: torch.Tensor) -> None:
        if name in self.got:
            self._close_values(name, self.got[name].double(), self.want[name].double(), settled)

    def _close_values(self, name: str, got: torch.Tensor, want: torch.Tensor, settled: torch.Tensor) -> None:
        if not self._finite(name, got, want):
            return
        error = (got - want).abs()
        atol, rtol = (self._band(band, settled, got) for band in (limits.BF16_ATOL, limits.BF16_RTOL))
        excess = error - (atol + rtol * want.abs())
        self._add(name, "is outside of atol and rtol", excess > 0, excess, [got, want])
        self._relative_l2(name, got, want, limits.BF16_REL_L2, settled)

    def _relative_l2(self, name: str, got: torch.Tensor, want: torch.Tensor, band: Band, settled: torch.Tensor) -> None:
        sizes = [x.flatten(1).norm(dim=1) for x in (got - want, want)]
        bad = sizes[0] > self._band(band, settled, sizes[0]) * sizes[1]
        rule = f"has rows with a relative L2 error over {band.settled:g} ({band.unsettled:g} if unsettled)"
        relative = sizes[0] / sizes[1]
        self._add(name, rule, bad, relative, [relative, torch.zeros_like(relative)])

    def _near(self, name: str, got: torch.Tensor | None, settled: torch.Tensor) -> None:
        """Checks float32 values [M, heads] to the tolerance of the head gate."""
        want = self.want[name].double()
        if got is None or not self._finite(name, got, want):
            return
        size = want.abs() + want.square().mean(1, keepdim=True).sqrt()
        excess = (got - want).abs() - self._band(limits.GATE_TOLERANCE, settled, want) * size
        self._add(name, "is outside of the gate's tolerance", excess > 0, excess, [got, want])

    def _flips(self, name: str, rule: str, differs: torch.Tensor, band: Band, free: int, settled: torch.Tensor) -> None:
        """Caps the share of differing elements among the settled rows and among the others."""
        for rows, share in ((settled, band.settled), (~settled, band.unsettled)):
            part = differs[rows]
            if int(part.sum()) > max(free, share * part.numel()):
                bad = differs & rows.view(-1, *[1] * (differs.dim() - 1))
                count = bad.flatten(1).sum(1)
                where = torch.zeros_like(bad)
                where.view(len(bad), -1)[:, 0] = count > 0
                values = [count.view(-1, *[1] * (bad.dim() - 1)).expand_as(bad), torch.zeros_like(bad)]
                self._add(name, f"{rule} in more than {share:.1%}: rows", where, values[0], values)

    def _dequantised(self, name: str, got: torch.Tensor, want: torch.Tensor, settled: torch.Tensor) -> None:
        """Checks dequantised values [M, ...]: finite, at most a step apart each, few apart at all, close by row."""
        if not self._finite(name, got, want):
            return
        error = (got - want).abs()
        rms = want.flatten(1).square().mean(1).sqrt().view(-1, *[1] * (want.dim() - 1))
        step = limits.FP8_STEP * torch.maximum(got.abs(), want.abs())
        excess = error - step - self._band(limits.FP8_SMALL, settled, want) * rms
        self._add(name, "is more than one e4m3 step off", excess > 0, excess, [got, want])
        self._relative_l2(name, got, want, limits.FP8_REL_L2, settled)

    def _activations(self, name: str, scale_name: str, settled: torch.Tensor) -> torch.Tensor:
        """Checks quantised activations and their MN-major scales; returns the rows that equal the reference's."""
        scales = [side.get(scale_name, self.want[scale_name])[:, : self.rows].T for side in (self.got, self.want)]
        if scale_name in self.got:
            self._pow2_scales(scale_name, scales[0], scales[1], settled)
        if name not in self.got:
            return torch.zeros_like(settled)
        sides = zip((self.got[name], self.want[name]), scales, strict=True)
        got, want = (Quantised(values, scale).dequantise(torch.float64) for values, scale in sides)
        self._dequantised(name, got, want, settled)
        self._flips(name, "differs", got != want, self.fp8_flips, limits.FP8_FREE_FLIPS, settled)
        return (got == want).all(1)

    def _pow2_scales(self, name: str, got: torch.Tensor, want: torch.Tensor, settled: torch.Tensor) -> None:
        """Checks scales [M, groups]: equal, or off by one power of two where a tie flipped."""
        if not self._finite(name, got, want):
            return
        ratio = got / want
        legal = (ratio == 1) | (ratio == 0.5) | (ratio == 2)
        self._add(name, "is a wrong scale", ~legal, (got - want).abs(), [got, want])
        self._flips(name, "is off by a power of two", ratio != 1, limits.SCALE_FLIPS, 1, settled)


class _LayerJudge(Judge):
    """Walks the layer in data order."""

    def __init__(self, shape: AttentionPreShape, got: Tensors, want: Tensors, core: str) -> None:
        super().__init__(shape.m, got, want, core)
        self.shape = shape

    def run(self) -> None:
        inputs_known = self.settled
        if "residual_out" in self.got:
            self._exact("residual_out")
        normed = self._rows_equal("norm_out")
        self._close("norm_out", inputs_known)
        h = inputs_known & self._activations("h_fp8", "h_sf", inputs_known)
        self._near("gate_raw", self._value("gate_raw"), normed)
        q = h & self._activations("q_fp8", "q_sf", h)
        self._latents(h)
        keys = h & self._keys(h)
        self._close("q_nope", q)
        self._close("q_for_sparse_mla", q)
        query = q & normed & self._index_query(q, normed)
        # A token's scores read every key that this step wrote for its request.
        together = keys.view(self.shape.requests, -1).all(1).repeat_interleave(self.shape.tokens)
        self._logits(query & together)

    def _written(self) -> torch.Tensor:
        """Tokens that write the caches, int64."""
        return (self.want["slot_mapping"] >= 0).nonzero().squeeze(1)

    def _untouched(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Checks that cache rows [slots, bytes] which no token writes kept every byte."""
        differs = got != want
        differs[self.want["slot_mapping"][self._written()]] = False
        self._add(name, "changed in rows [slot, byte] that no token writes", differs, differs.double(), [got, want])

    def _latents(self, h: torch.Tensor) -> None:
        if "mla_cache" not in self.got:
            return
        caches = [side["mla_cache"].view(-1, MLA_TOKEN_BYTES) for side in (self.got, self.want)]
        self._untouched("mla_cache", *caches)
        tokens = self._written()
        settled = h[tokens]
        rows = [cache[self.want["slot_mapping"][tokens]] for cache in caches]
        values = [r[:, :512].contiguous().view(E4M3) for r in rows]
        scales = [r[:, 512:528].contiguous().view(torch.float32) for r in rows]
        keys = [r[:, 528:].contiguous().view(torch.bfloat16).double() for r in rows]
        self._close_values("mla_cache", keys[0], keys[1], settled)
        if not self._finite("mla_cache", *scales):
            return
        error = (scales[0] - scales[1]).abs() / scales[1]
        bad = error > self._band(limits.LATENT_SCALE_RTOL, settled, error)
        self._add("mla_cache", "has a wrong latent scale", bad, error, scales)
        got, want = (Quantised(v, s).dequantise(torch.float64) for v, s in zip(values, scales, strict=True))
        self._dequantised("mla_cache", got, want, settled)
        differs = values[0].view(torch.uint8) != values[1].view(torch.uint8)
        self._flips("mla_cache", "differs", differs, self.fp8_flips, limits.FP8_FREE_FLIPS, settled)

    def _keys(self, h: torch.Tensor) -> torch.Tensor:
        """Checks the indexer cache; returns the tokens whose written keys equal the reference's."""
        equal = torch.zeros_like(self.settled)
        if "indexer_cache" not in self.got:
            return equal
        dim = self.shape.dims.index_dim
        caches = [_index_rows(side["indexer_cache"], dim) for side in (self.got, self.want)]
        self._untouched("indexer_cache", *caches)
        tokens = self._written()
        settled = h[tokens]
        rows = [cache[self.want["slot_mapping"][tokens]] for cache in caches]
        scales = [r[:, dim:].contiguous().view(torch.float32) for r in rows]
        self._pow2_scales("indexer_cache", scales[0], scales[1], settled)
        values = [r[:, :dim].contiguous().view(E4M3) for r in rows]
        got, want = (Quantised(v, s).dequantise(torch.float64) for v, s in zip(values, scales, strict=True))
        self._dequantised("indexer_cache", got, want, settled)
        self._flips("indexer_cache", "differs", got != want, self.mixed_flips, limits.FP8_FREE_FLIPS, settled)
        equal = torch.ones_like(equal)
        equal[tokens] = (got == want).all(1)
        return equal

    def _index_query(self, q: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Checks the indexer's queries and head weights; returns the tokens whose queries equal the reference's.

        The query's scale lives in the head weight alone, so a scale off by one power is read from the query itself.
        """
        power = torch.ones_like(self.want["head_weights"], dtype=torch.float64)
        equal = torch.zeros_like(self.settled)
        if "indexer_q_fp8" in self.got:
            got, want = (side["indexer_q_fp8"].double() for side in (self.got, self.want))
            best = (got - want).norm(dim=2)
            for candidate in (0.5, 2.0):
                error = (got * candidate - want).norm(dim=2)
                power = torch.where(error < best, candidate, power)
                best = torch.minimum(error, best)
            scaled = got * power.unsqueeze(-1)
            self._dequantised("indexer_q_fp8", scaled, want, q)
            self._flips("indexer_q_fp8", "differs", scaled != want, self.mixed_flips, limits.FP8_FREE_FLIPS, q)
            self._flips("indexer_q_fp8", "has another scale", power != 1, limits.SCALE_FLIPS, 1, q)
            equal = (scaled == want).flatten(1).all(1)
        weights = self._value("head_weights")
        self._near("head_weights", None if weights is None else weights / power, normed)
        return equal

    def _logits(self, settled: torch.Tensor) -> None:
        if "logits" not in self.got:
            return
        raw, context = self.got["logits"], self.want["context_lens"].long()[:, None]
        columns = torch.arange(raw.shape[1], device=raw.device)
        scored = columns < context
        tile_end = (context + limits.LOGITS_TILE - 1) // limits.LOGITS_TILE * limits.LOGITS_TILE
        touched = (columns >= tile_end) & ~raw.isnan()
        self._add(
            "logits", "was written past the context's tile", touched, touched.double(), [raw, self.want["logits"]]
        )
        got = torch.where(scored, raw.double(), 0.0)
        want = torch.where(scored, self.want["logits"].double(), 0.0)
        if not self._finite("logits", got, want):
            return
        self._scores("", got, want, context.squeeze(1), settled)
        inner = ("indexer_q_fp8", "head_weights", "indexer_cache")
        if all(name in self.got for name in inner):
            query, weights, cache = (self.got[name] for name in inner)
            # What the run itself scored with: strict for every row, so one stale key cannot hide in the wide band.
            own = torch.where(scored, paged_score(self.shape, query, weights, cache, self.want).double(), 0.0)
            if own.isfinite().all():
                everything = torch.ones_like(settled)
                self._scores(" of the run's own queries and keys", got, own, context.squeeze(1), everything)

    def _scores(
        self, of: str, got: torch.Tensor, want: torch.Tensor, context: torch.Tensor, settled: torch.Tensor
    ) -> None:
        """Checks scores [M, columns], zero past each context, one by one and by row."""
        error, energy = (got - want).abs(), want.square().sum(1)
        rms = (energy / context).sqrt()[:, None]
        excess = error - self._band(limits.LOGITS_TOLERANCE, settled, want) * (want.abs() + rms)
        self._add("logits", f"is outside of the tolerance{of}", excess > 0, excess, [got, want])
        total = got.square().sum(1) + energy
        diff = torch.where(total > 0, error.square().sum(1) / total, 0.0)
        bad = diff > self._band(limits.LOGITS_DIFF, settled, diff)
        self._add("logits", f"has rows with a too large calc_diff{of}", bad, diff, [diff, torch.zeros_like(diff)])


def _index_rows(cache: torch.Tensor, dim: int) -> torch.Tensor:
    """The page-blocked indexer cache as [slots, 132]: key bytes, then scale bytes."""
    pages = len(cache)
    data = cache[:, : PAGE_TOKENS * dim].reshape(pages, PAGE_TOKENS, dim)
    scales = cache[:, PAGE_TOKENS * dim :].reshape(pages, PAGE_TOKENS, INDEX_TOKEN_BYTES - dim)
    return torch.cat((data, scales), 2).view(pages * PAGE_TOKENS, INDEX_TOKEN_BYTES)

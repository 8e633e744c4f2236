"""The attention-pre layer once more, in plain Python: loops over floats, nothing shared with the torch reference.

Each quantised op runs unfused on lists of Python floats (float64). FP8 is encoded by search in the table of all values,
bf16 by scaling the mantissa, the Hadamard transform is a matrix of bit parities.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left

import torch

from workloads.attention_pre.shapes import AttentionPreShape

Matrix = list[list[float]]

MAGNITUDES = [b % 8 / 8 * 2.0**-6 if b < 8 else (1 + b % 8 / 8) * 2.0 ** (b // 8 - 7) for b in range(127)]


def decode(byte: int) -> float:
    """The value of one e4m3 byte."""
    if byte & 0x7F == 0x7F:
        return math.nan
    return -MAGNITUDES[byte & 0x7F] if byte & 0x80 else MAGNITUDES[byte]


def encode(x: float) -> int:
    """The nearest e4m3 byte; ties go to the even one, what is too large to the largest."""
    size = min(abs(x), 448.0)
    above = bisect_left(MAGNITUDES, size)
    below = max(above - 1, 0)
    down, up = size - MAGNITUDES[below], MAGNITUDES[above] - size
    nearest = above if up < down or (up == down and above % 2 == 0) else below
    return nearest | (0x80 if math.copysign(1.0, x) < 0 else 0)


def bf16(x: float) -> float:
    """The nearest bf16; ties go to the even one."""
    mantissa, exponent = math.frexp(x)
    return math.copysign(math.ldexp(round(mantissa * 256), exponent - 8), x)


def f32(x: float) -> float:
    """The nearest float32."""
    result: float = struct.unpack("f", struct.pack("f", x))[0]
    return result


def pow2_scale(values: list[float]) -> float:
    mantissa, exponent = math.frexp(max(max(map(abs, values)), f32(1e-4)) / 448)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def quantise(row: list[float]) -> tuple[list[int], list[float]]:
    """Bytes of a row, and one power-of-two scale per 128."""
    scales = [pow2_scale(row[i : i + 128]) for i in range(0, len(row), 128)]
    return [encode(x / scales[i // 128]) for i, x in enumerate(row)], scales


def dequantise(row: tuple[list[int], list[float]]) -> list[float]:
    return [decode(byte) * row[1][i // 128] for i, byte in enumerate(row[0])]


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def rms_norm(row: list[float], weight: list[float], eps: float) -> list[float]:
    inverse = 1 / math.sqrt(dot(row, row) / len(row) + eps)
    return [bf16(x * inverse * w) for x, w in zip(row, weight, strict=True)]


def rotate(row: list[float], cos_sin: list[float], neox: bool) -> list[float]:
    result = list(row)
    for i in range(32):
        a, b = (i, i + 32) if neox else (2 * i, 2 * i + 1)
        cos, sin = cos_sin[i], cos_sin[32 + i]
        result[a] = bf16(row[a] * cos - row[b] * sin)
        result[b] = bf16(row[b] * cos + row[a] * sin)
    return result


def hadamard(row: list[float]) -> list[float]:
    return [
        sum(-x if (i & j).bit_count() % 2 else x for j, x in enumerate(row)) / math.sqrt(len(row))
        for i in range(len(row))
    ]


class Oracle:
    """Runs the layer on tensors by name; keeps every result as a tensor of the run's dtype in `results`."""

    def __init__(
        self, shape: AttentionPreShape, tensors: dict[str, torch.Tensor], *, use_hadamard: bool = True
    ) -> None:
        self.shape, self.use_hadamard = shape, use_hadamard
        plain = {n: t for n, t in tensors.items() if t.dtype not in (torch.float8_e4m3fn, torch.uint8)}
        self.inputs = {name: tensor.double().tolist() for name, tensor in plain.items()}
        self.weights = {name[:-3]: self._weight(tensors, name[:-3]) for name in tensors if name.endswith("_sf")}
        self.mla = bytearray(tensors["mla_cache"].flatten().tolist())
        self.index = bytearray(tensors["indexer_cache"].flatten().tolist())
        self.rows: dict[str, list[list[float]]] = {}

    @staticmethod
    def _weight(tensors: dict[str, torch.Tensor], name: str) -> Matrix:
        scales = tensors[f"{name}_sf"].tolist()
        rows = tensors[name].view(torch.uint8).tolist()
        return [[decode(byte) * scales[n // 128][k // 128] for k, byte in enumerate(row)] for n, row in enumerate(rows)]

    def _keep(self, name: str, row: list[float]) -> None:
        self.rows.setdefault(name, []).append(row)

    def run(self) -> dict[str, torch.Tensor]:
        """Everything that the reference returns but the pass-through inputs."""
        for token in range(self.shape.m):
            self._token(token)
        for token in range(self.shape.m):
            self._score(token)
        m, d, shape = self.shape.m, self.shape.dims, self.shape
        results: dict[str, torch.Tensor] = {}
        for name in ("residual_out", "norm_out", "q_nope", "q_for_sparse_mla"):
            results[name] = torch.tensor(self.rows[name]).bfloat16()
        for name in ("h_fp8", "q_fp8", "indexer_q_fp8"):
            results[name] = torch.tensor(self.rows[name], dtype=torch.uint8).view(torch.float8_e4m3fn)
        for name in ("h_sf", "q_sf"):
            results[name] = torch.tensor(self.rows[name]).T
        for name in ("gate_raw", "head_weights", "logits"):
            results[name] = torch.tensor(self.rows[name])
        results["q_nope"] = results["q_nope"].view(m, shape.heads, d.nope)
        results["q_for_sparse_mla"] = results["q_for_sparse_mla"].view(m, shape.heads, 576)
        results["indexer_q_fp8"] = results["indexer_q_fp8"].view(m, d.index_heads, 128)
        results["mla_cache"] = torch.tensor(list(self.mla), dtype=torch.uint8).view(-1, 64, 656)
        results["indexer_cache"] = torch.tensor(list(self.index), dtype=torch.uint8).view(-1, 64 * 132)
        return results

    def _token(self, token: int) -> None:
        x, d = self.inputs, self.shape.dims
        cos_sin, slot = x["cos_sin"][int(x["positions"][token])], int(x["slot_mapping"][token])
        total = [bf16(a + b) for a, b in zip(x["hidden"][token], x["residual"][token], strict=True)]
        normed = rms_norm(total, x["ln_w"], d.eps)
        h = quantise(normed)
        projected = [bf16(dot(dequantise(h), row)) for row in self.weights["w_b0"]]
        q = quantise(rms_norm(projected[: d.q_lora], x["q_a_ln_w"], d.eps))
        latent = rms_norm(projected[d.q_lora : d.q_lora + 512], x["kv_a_ln_w"], d.eps)
        gate = [dot(normed, row) for row in x["w_c0"]]
        for name, row in (("residual_out", total), ("norm_out", normed), ("h_fp8", h[0]), ("h_sf", h[1])):
            self._keep(name, row)
        for name, row in (("q_fp8", q[0]), ("q_sf", q[1]), ("gate_raw", gate)):
            self._keep(name, row)
        self._write_latent(slot, latent, rotate(projected[d.q_lora + 512 :], cos_sin, False))
        self._main_query(dequantise(q), cos_sin)
        self._index_key(slot, dequantise(h), cos_sin)
        self._index_query(dequantise(q), gate, cos_sin)

    def _write_latent(self, slot: int, latent: list[float], key: list[float]) -> None:
        if slot < 0:
            return
        at = slot * 656
        for group in range(4):
            values = latent[128 * group : 128 * group + 128]
            scale = max(f32(max(map(abs, values)) / 448), 2.0**-126)
            begin = at + 128 * group
            self.mla[begin : begin + 128] = bytes(encode(f32(v / scale)) for v in values)
            self.mla[at + 512 + 4 * group : at + 516 + 4 * group] = struct.pack("f", scale)
        self.mla[at + 528 : at + 656] = b"".join(struct.pack("f", v)[2:] for v in key)

    def _main_query(self, q: list[float], cos_sin: list[float]) -> None:
        d, nopes, sparse = self.shape.dims, [], []
        for head in range(self.shape.heads):
            first = head * self.shape.head_rows
            rows = [dot(q, row) for row in self.weights["w_d0"][first : first + self.shape.head_rows]]
            nope = [bf16(v) for v in rows[: d.nope]]
            columns = zip(*self.inputs["w_d2"][head], strict=True)
            nopes += nope
            sparse += [bf16(dot(nope, list(column))) for column in columns] + rotate(rows[d.nope :], cos_sin, False)
        self._keep("q_nope", nopes)
        self._keep("q_for_sparse_mla", sparse)

    def _transformed(self, row: list[float], cos_sin: list[float]) -> list[float]:
        turned = rotate(row[:64], cos_sin, self.shape.dims.index_neox) + row[64:]
        return hadamard(turned) if self.use_hadamard else turned

    def _index_key(self, slot: int, h: list[float], cos_sin: list[float]) -> None:
        key = [bf16(dot(h, row)) for row in self.weights["w_b1"]]
        mean = math.fsum(key) / 128
        inverse = 1 / math.sqrt(math.fsum((k - mean) ** 2 for k in key) / 128 + self.shape.dims.index_eps)
        affine = zip(self.inputs["k_norm_w"], self.inputs["k_norm_b"], strict=True)
        normed = [bf16((k - mean) * inverse * w + b) for k, (w, b) in zip(key, affine, strict=True)]
        data, scales = quantise(self._transformed(normed, cos_sin))
        if slot >= 0:
            page = slot // 64 * 64 * 132
            self.index[page + slot % 64 * 128 : page + slot % 64 * 128 + 128] = bytes(data)
            at = page + 64 * 128 + slot % 64 * 4
            self.index[at : at + 4] = struct.pack("f", scales[0])

    def _index_query(self, q: list[float], gate: list[float], cos_sin: list[float]) -> None:
        heads, values, weights = self.shape.dims.index_heads, [], []
        for head in range(heads):
            row = [bf16(dot(q, w)) for w in self.weights["w_d1"][128 * head : 128 * head + 128]]
            data, scales = quantise(self._transformed(row, cos_sin))
            values += data
            weights.append(gate[head] * scales[0] / math.sqrt(heads) / math.sqrt(128))
        self._keep("indexer_q_fp8", values)
        self._keep("head_weights", weights)

    def _score(self, token: int) -> None:
        pages = self.inputs["block_table"][token // self.shape.tokens]
        query = [decode(int(b)) for b in self.rows["indexer_q_fp8"][token]]
        logits = [math.nan] * self.shape.logits_stride
        for s in range(int(self.inputs["context_lens"][token])):
            page = int(pages[s // 64]) * 64 * 132
            key = [decode(b) for b in self.index[page + s % 64 * 128 : page + s % 64 * 128 + 128]]
            scale = struct.unpack_from("f", self.index, page + 64 * 128 + s % 64 * 4)[0]
            heads = enumerate(self.rows["head_weights"][token])
            logits[s] = scale * sum(w * max(0.0, dot(query[128 * i : 128 * i + 128], key)) for i, w in heads)
        self._keep("logits", logits)

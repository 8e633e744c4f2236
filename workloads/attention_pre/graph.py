"""The op graph of the attention-pre layer: 11 ops from residual-add to indexer score.

A0 add + RMSNorm + quant; B0 fused QKV-A projection and B0f its finaliser; C0 head gate; B1 indexer key projection and
B1f its finaliser; D0 query projection with rotary epilogue; D1 indexer query projection and D1f its finaliser; D2
absorbed query BMM; E1 paged indexer score.
"""

from __future__ import annotations

from workloads.attention_pre.shapes import (
    INDEX_TOKEN_BYTES,
    MLA_TOKEN_BYTES,
    PAGE_TOKENS,
    SCALE_BLOCK,
    AttentionPreShape,
)
from workloads.graph import OpGraph, Role
from workloads.ops.add_rmsnorm_quant import add_rmsnorm_quant
from workloads.ops.bmm_bf16 import bmm_bf16
from workloads.ops.gemm_fp8 import gemm_fp8_partial, gemm_fp8_query
from workloads.ops.head_gate import head_gate
from workloads.ops.index_key_finalise import index_key_finalise
from workloads.ops.index_query_finalise import index_query_finalise
from workloads.ops.paged_score import paged_score
from workloads.ops.qkv_finalise import qkv_finalise

# The order in which the published ablation of this layer adds ops.
STAGES = (("A0",), ("C0",), ("B1", "B1f"), ("B0", "B0f"), ("D0",), ("D1", "D1f"), ("D2",), ("E1",))
SPARE_PAGES = 4  # pages that no request owns, so that a stray write is seen


def num_pages(shape: AttentionPreShape) -> int:
    """Pages of each cache."""
    return shape.requests * shape.pages_per_request + SPARE_PAGES


def build_graph(shape: AttentionPreShape, *, hadamard: bool = True) -> OpGraph:
    """Captures the layer at a shape."""
    graph = OpGraph("attention_pre")
    _declare(graph, shape)
    d = shape.dims
    add_rmsnorm_quant(
        graph,
        "A0",
        hidden="hidden",
        residual="residual",
        weight="ln_w",
        eps=d.eps,
        residual_out="residual_out",
        norm_out="norm_out",
        quantised="h_fp8",
        scale="h_sf",
    )
    gemm_fp8_partial(graph, "B0", x="h_fp8", x_scale="h_sf", weight="w_b0", weight_scale="w_b0_sf", out="b0_partial")
    head_gate(graph, "C0", x="norm_out", weight="w_c0", out="c0_partial")
    gemm_fp8_partial(graph, "B1", x="h_fp8", x_scale="h_sf", weight="w_b1", weight_scale="w_b1_sf", out="b1_partial")
    qkv_finalise(
        graph,
        "B0f",
        partial="b0_partial",
        q_weight="q_a_ln_w",
        kv_weight="kv_a_ln_w",
        positions="positions",
        slots="slot_mapping",
        cos_sin="cos_sin",
        eps=d.eps,
        q="q_fp8",
        q_scale="q_sf",
        cache="mla_cache",
    )
    index_key_finalise(
        graph,
        "B1f",
        partial="b1_partial",
        weight="k_norm_w",
        bias="k_norm_b",
        positions="positions",
        slots="slot_mapping",
        cos_sin="cos_sin",
        eps=d.index_eps,
        hadamard=hadamard,
        neox=d.index_neox,
        cache="indexer_cache",
    )
    gemm_fp8_query(
        graph,
        "D0",
        x="q_fp8",
        x_scale="q_sf",
        weight="w_d0",
        weight_scale="w_d0_sf",
        positions="positions",
        cos_sin="cos_sin",
        nope=d.nope,
        q_nope="q_nope",
        q_rope="q_for_sparse_mla",
    )
    gemm_fp8_partial(graph, "D1", x="q_fp8", x_scale="q_sf", weight="w_d1", weight_scale="w_d1_sf", out="d1_partial")
    bmm_bf16(graph, "D2", x="q_nope", weight="w_d2", out="q_for_sparse_mla")
    index_query_finalise(
        graph,
        "D1f",
        partial="d1_partial",
        gate_partial="c0_partial",
        positions="positions",
        cos_sin="cos_sin",
        hadamard=hadamard,
        neox=d.index_neox,
        quantised="indexer_q_fp8",
        head_weights="head_weights",
    )
    paged_score(
        graph,
        "E1",
        q="indexer_q_fp8",
        head_weights="head_weights",
        cache="indexer_cache",
        block_table="block_table",
        context_lens="context_lens",
        logits="logits",
        tokens=shape.tokens,
    )
    return graph


def _declare(graph: OpGraph, shape: AttentionPreShape) -> None:
    """Tensors with the names, shapes and dtypes of docs/attention_pre.md, section 'Tensors'."""
    d, m, h = shape.dims, shape.m, shape.dims.hidden
    query_rows, index_rows, pages = shape.heads * shape.head_rows, d.index_heads * d.index_dim, num_pages(shape)
    weights = {
        "ln_w": ((h,), "bf16"),
        "w_b0": ((d.qkv_a_rows, h), "e4m3"),
        "w_b0_sf": ((-(-d.qkv_a_rows // SCALE_BLOCK), h // SCALE_BLOCK), "f32"),
        "w_c0": ((d.index_heads, h), "bf16"),
        "q_a_ln_w": ((d.q_lora,), "bf16"),
        "kv_a_ln_w": ((d.kv_lora,), "bf16"),
        "w_d0": ((query_rows, d.q_lora), "e4m3"),
        "w_d0_sf": ((-(-query_rows // SCALE_BLOCK), d.q_lora // SCALE_BLOCK), "f32"),
        "w_d2": ((shape.heads, d.nope, d.kv_lora), "bf16"),
        "w_b1": ((d.index_dim, h), "e4m3"),
        "w_b1_sf": ((1, h // SCALE_BLOCK), "f32"),
        "k_norm_w": ((d.index_dim,), "f32"),
        "k_norm_b": ((d.index_dim,), "f32"),
        "w_d1": ((index_rows, d.q_lora), "e4m3"),
        "w_d1_sf": ((index_rows // SCALE_BLOCK, d.q_lora // SCALE_BLOCK), "f32"),
        "cos_sin": ((max(shape.kv, 1), d.rope), "f32"),
    }
    inputs = {
        "hidden": ((m, h), "bf16"),
        "residual": ((m, h), "bf16"),
        "positions": ((m,), "i32"),
        "slot_mapping": ((m,), "i64"),
        "block_table": ((shape.requests, shape.pages_per_request), "i32"),
        "context_lens": ((m,), "i32"),
    }
    state = {
        "mla_cache": ((pages, PAGE_TOKENS, MLA_TOKEN_BYTES), "u8"),
        "indexer_cache": ((pages, PAGE_TOKENS * INDEX_TOKEN_BYTES), "u8"),
    }
    inner = {
        "norm_out": ((m, h), "bf16"),
        "h_fp8": ((m, h), "e4m3"),
        "h_sf": ((h // SCALE_BLOCK, shape.m_aligned), "f32"),
        "q_fp8": ((m, d.q_lora), "e4m3"),
        "q_sf": ((d.q_lora // SCALE_BLOCK, shape.m_aligned), "f32"),
        "q_nope": ((m, shape.heads, d.nope), "bf16"),
        "indexer_q_fp8": ((m, d.index_heads, d.index_dim), "e4m3"),
        "head_weights": ((m, d.index_heads), "f32"),
    }
    outputs = {
        "residual_out": ((m, h), "bf16"),
        "q_for_sparse_mla": ((m, shape.heads, d.kv_lora + d.rope), "bf16"),
        "logits": ((m, shape.logits_stride), "f32"),
    }
    pages_used = shape.requests * shape.pages_per_request
    least = {"mla_cache": pages_used, "indexer_cache": pages_used, "cos_sin": shape.kv}
    groups = {Role.WEIGHT: weights, Role.INPUT: inputs, Role.STATE: state, Role.INNER: inner, Role.OUTPUT: outputs}
    for role, tensors in groups.items():
        for name, (extents, dtype) in tensors.items():
            graph.tensor(name, extents, dtype, role, least=least.get(name))

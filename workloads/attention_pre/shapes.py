"""Dimensions of the attention-pre layer: model constants and the decode shape.

Model constants come from the public model configurations (GLM-5: hidden 6144, 64 heads of 192 + 64;
DeepSeek-V3.2: hidden 7168, 128 heads of 128 + 64), see docs/attention_pre.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from workloads.errors import WorkloadError

PAGE_TOKENS = 64
MLA_TOKEN_BYTES = 656  # 512 e4m3 latent, 4 fp32 scales, 64 bf16 rotary key
INDEX_TOKEN_BYTES = 132  # 128 e4m3 key, 1 fp32 scale (page-blocked, not interleaved)
SCALE_BLOCK = 128  # K values, and weight rows, that share one scale


@dataclass(frozen=True)
class ModelDims:
    """Constants of one model family; every size in elements."""

    name: str
    hidden: int
    heads: int
    q_lora: int
    nope: int
    index_heads: int
    eps: float
    index_neox: bool
    kv_lora: int = 512
    rope: int = 64
    index_dim: int = 128
    index_eps: float = 1e-6

    @property
    def qkv_a_rows(self) -> int:
        """Rows of the fused q_a | kv_a | k_pe projection (GLM-5: 2624)."""
        return self.q_lora + self.kv_lora + self.rope


MODELS = {
    "glm5": ModelDims("glm5", hidden=6144, heads=64, q_lora=2048, nope=192, index_heads=32, eps=1e-5, index_neox=False),
    "dsv32": ModelDims(
        "dsv32", hidden=7168, heads=128, q_lora=1536, nope=128, index_heads=64, eps=1e-6, index_neox=True
    ),
}


@dataclass(frozen=True)
class AttentionPreShape:
    """One decode step of one layer: `requests` sequences, `tokens` new tokens each, `kv` cached positions each.

    `kv` counts this step's tokens too: token j of a request sees `kv - tokens + j + 1` positions.
    `tp` divides the main attention heads; the indexer is replicated.
    """

    requests: int = 2
    tokens: int = 8
    kv: int = 8192
    tp: int = 1
    model: str = "glm5"

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise WorkloadError(f"unknown model {self.model!r}: use one of {', '.join(MODELS)}")
        for name, low, high in (("requests", 1, 256), ("tokens", 1, 8), ("kv", 1, 131072)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise WorkloadError(f"{name}={value} is out of range: use {low} to {high}")
        if self.m > 256:
            raise WorkloadError(f"requests x tokens = {self.m} is out of range: use at most 256")
        if self.tokens > self.kv:
            raise WorkloadError(f"kv={self.kv} is out of range: it counts this step's {self.tokens} tokens too")
        if self.tp not in (1, 2, 4, 8):
            raise WorkloadError(f"tp={self.tp} is out of range: use 1, 2, 4 or 8")

    @property
    def dims(self) -> ModelDims:
        return MODELS[self.model]

    @property
    def m(self) -> int:
        """Token rows of the step."""
        return self.requests * self.tokens

    @property
    def m_aligned(self) -> int:
        """Stride in floats of one k-block of activation scales (MN-major, 16-byte rows)."""
        return (self.m + 3) // 4 * 4

    @property
    def heads(self) -> int:
        """Main attention heads on this rank."""
        return self.dims.heads // self.tp

    @property
    def head_rows(self) -> int:
        """Rows of q_b per head: nope then rope."""
        return self.dims.nope + self.dims.rope

    @property
    def pages_per_request(self) -> int:
        return -(-self.kv // PAGE_TOKENS)

    @property
    def logits_stride(self) -> int:
        """Row stride of the logits in floats: a multiple of 256, as DeepGEMM aligns it."""
        return -(-self.kv // 256) * 256

    def key(self) -> str:
        """A short name that files and studies use, `r2t8kv8192tp1-glm5` for the headline shape."""
        return f"r{self.requests}t{self.tokens}kv{self.kv}tp{self.tp}-{self.model}"

    def params(self) -> dict[str, int | str]:
        return asdict(self)

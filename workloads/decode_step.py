"""One decode step of a dense transformer as a list of kernels with the bytes that each moves. Pure arithmetic.

The kernels are those of an engine that fuses what is commonly fused: residual addition with RMSNorm, per-head
normalisation with rotary embedding, SiLU with its multiplication. Each counts as bound by memory: a projection moves
its weights, attention the cached keys and values of all requests, the rest their activations.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from workloads.errors import WorkloadError

LOGIT_BYTES = 4  # sampling reads float32 logits
LAYER_KERNELS = 10
LIMITS = {
    "hidden": 1 << 20,
    "intermediate": 1 << 20,
    "layers": 1000,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab": 1 << 24,
    "batch": 1 << 16,
    "context": 1 << 24,
    "element_bytes": 8,
    "kernels_per_layer": LAYER_KERNELS,
}


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a dense transformer with grouped-query attention, in elements.

    Attributes:
        name: as shown.
        hidden: width of the residual stream.
        intermediate: width of the gated MLP.
        layers: number of layers.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: width of a head.
        vocab: rows of the output projection.

    Raises:
        WorkloadError: a dimension is out of range.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def __post_init__(self) -> None:
        for dimension in DIMENSIONS:
            _check(dimension, getattr(self, dimension))
        if self.heads % self.kv_heads:
            raise WorkloadError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")


@dataclass(frozen=True)
class MovingKernel:
    """A kernel whose time is that of the bytes it reads and writes."""

    name: str
    moved_bytes: int


@dataclass(frozen=True)
class DecodeStep:
    """One new token for each request of a batch.

    Attributes:
        model: dimensions of the model.
        batch: requests.
        context: cached positions of each request.
        element_bytes: bytes of a weight, an activation and a cached value.
        kernels_per_layer: fewer than ten stand for fusion, see `layer_kernels`.

    Raises:
        WorkloadError: a parameter is out of range.
    """

    model: ModelDims
    batch: int = 1
    context: int = 1024
    element_bytes: int = 2
    kernels_per_layer: int = LAYER_KERNELS

    def __post_init__(self) -> None:
        for name in SETTINGS:
            _check(name, getattr(self, name))

    def layer_kernels(self) -> tuple[MovingKernel, ...]:
        """Kernels of one layer in order.

        With fewer than ten, the neighbours that move least together become one, again and again. The bytes stay: what
        fusion keeps on chip is small beside weights and cache.
        """
        kernels = self._unfused()
        while len(kernels) > self.kernels_per_layer:
            pairs = [left.moved_bytes + right.moved_bytes for left, right in zip(kernels, kernels[1:], strict=False)]
            at = pairs.index(min(pairs))
            fused = MovingKernel(f"{kernels[at].name}+{kernels[at + 1].name}", pairs[at])
            kernels[at : at + 2] = [fused]
        return tuple(kernels)

    def tail_kernels(self) -> tuple[MovingKernel, ...]:
        """What follows the last layer."""
        model, size = self.model, self.element_bytes
        return (
            MovingKernel("final_norm", 2 * self.batch * model.hidden * size),
            MovingKernel("lm_head", model.hidden * model.vocab * size),
            MovingKernel("sample", self.batch * model.vocab * LOGIT_BYTES),
        )

    def kernels(self) -> tuple[MovingKernel, ...]:
        """All kernels of the step in order."""
        return self.layer_kernels() * self.model.layers + self.tail_kernels()

    def _unfused(self) -> list[MovingKernel]:
        model, batch, size = self.model, self.batch, self.element_bytes
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        # Reads the activation and the residual, writes both.
        add_rmsnorm = MovingKernel("add_rmsnorm", 4 * batch * model.hidden * size)
        return [
            add_rmsnorm,
            MovingKernel("qkv_proj", model.hidden * (q + 2 * kv) * size),
            MovingKernel("qk_norm_rope", 2 * batch * (q + kv) * size),
            MovingKernel("kv_cache_write", 2 * batch * kv * size),
            MovingKernel("attention", 2 * batch * self.context * kv * size),
            MovingKernel("o_proj", q * model.hidden * size),
            add_rmsnorm,
            MovingKernel("gate_up_proj", 2 * model.hidden * model.intermediate * size),
            MovingKernel("silu_mul", 3 * batch * model.intermediate * size),
            MovingKernel("down_proj", model.intermediate * model.hidden * size),
        ]


def _check(name: str, value: int) -> None:
    if not 1 <= value <= LIMITS[name]:
        raise WorkloadError(f"{name}={value} is out of range: use 1 to {LIMITS[name]}")


DIMENSIONS = tuple(field.name for field in fields(ModelDims) if field.name != "name")
SETTINGS = tuple(field.name for field in fields(DecodeStep) if field.name != "model")
MODELS = {
    model.name: model
    for model in (
        ModelDims("Qwen3-0.6B", 1024, 3072, 28, heads=16, kv_heads=8, head_dim=128, vocab=151936),
        ModelDims("Qwen3-8B", 4096, 12288, 36, heads=32, kv_heads=8, head_dim=128, vocab=151936),
    )
}


def get_model(name: str) -> ModelDims:
    """A known model by name.

    Raises:
        WorkloadError: no such model; the text lists what there is.
    """
    if name not in MODELS:
        raise WorkloadError(f"unknown model {name!r}: use one of {', '.join(MODELS)}")
    return MODELS[name]

"""The reference's ops without rounding against the models of `transformers`: GLM-MoE-DSA and DeepSeek-V3.2.

The model runs on small random float32 weights. Its attention scores (over expanded keys) and its indexer's scores must
be those of the absorbed query, the latent and the indexer ops.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the reference needs torch")

from workloads.attention_pre import numerics  # noqa: E402
from workloads.attention_pre import reference as ref  # noqa: E402

MODELS = {"glm_moe_dsa": ("GlmMoeDsa", False), "deepseek_v32": ("DeepseekV32", True)}
HEADS, NOPE, VALUE, LATENT, INDEX_HEADS, TOKENS = 3, 32, 16, 256, 5, 40
PLAIN = ref.Flags(quantise=False, dtype=torch.float64)


class Model:
    """One attention module of `transformers`, and what it passed to its scores and to its TopK."""

    def __init__(self, package: str) -> None:
        prefix, self.neox = MODELS[package]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                root = f"transformers.models.{package}"
                self.code: Any = importlib.import_module(f"{root}.modeling_{package}")
                settings = importlib.import_module(f"{root}.configuration_{package}")
            except ImportError as error:
                pytest.skip(f"transformers has no {package} here: {error}")
            self.config = getattr(settings, f"{prefix}Config")(
                hidden_size=256,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS,
                num_hidden_layers=1,
                q_lora_rank=128,
                kv_lora_rank=LATENT,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=64,
                v_head_dim=VALUE,
                index_n_heads=INDEX_HEADS,
                index_topk=TOKENS,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                attn_implementation="eager",
            )
            torch.manual_seed(1)
            self.attention = getattr(self.code, f"{prefix}Attention")(self.config, 0).double()
            self.rotary = getattr(self.code, f"{prefix}RotaryEmbedding")(self.config)
        with torch.no_grad():
            for name, weight in self.attention.named_parameters():
                centre = 1.0 if "norm.weight" in name else 0.0
                weight.copy_(
                    centre + torch.randn_like(weight) * (0.1 if weight.dim() == 1 else weight.shape[1] ** -0.5)
                )

    def scores(self, hidden: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention scores [heads, T, T] before the softmax scale, and indexer scores [T, T], without a mask."""
        kept: dict[str, torch.Tensor] = {}

        def eager(module: Any, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
            kept["attention"] = query @ key.transpose(2, 3)
            return query.new_zeros(1, TOKENS, HEADS, VALUE), None

        exact_topk = torch.Tensor.topk

        def topk(scores: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            kept["index"] = scores
            return exact_topk(scores, *arguments, **options)

        monkeypatch.setattr(self.code, "eager_attention_forward", eager)
        monkeypatch.setattr(torch.Tensor, "topk", topk)
        positions = torch.arange(TOKENS)[None]
        mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=hidden.dtype)
        with torch.no_grad():
            angles = self.rotary(hidden, positions)
            self.attention(hidden[None], angles, mask, position_ids=positions)
        return kept["attention"][0], kept["index"][0]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def angles_of(model: Model) -> ref.Angles:
    cos, sin = model.rotary(torch.zeros(1, dtype=torch.float64), torch.arange(TOKENS)[None])
    return ref.Angles(cos[0, :, :32], sin[0, :, :32])


def test_scores_are_the_models(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(TOKENS, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    attention, index = model.scores(hidden, monkeypatch)
    # Both latents are normed with the class's default eps there, not with the config's.
    module, angle, eps = model.attention, angles_of(model), model.attention.q_a_layernorm.variance_epsilon
    with torch.no_grad():
        fused = torch.cat((module.q_a_proj.weight, module.kv_a_proj_with_mqa.weight))
        projected = ref.project(hidden, fused, PLAIN)
        norms = module.q_a_layernorm.weight, module.kv_a_layernorm.weight
        q, latent, key = ref.qkv_finalise(projected, *norms, angle, eps, PLAIN)
        q_nope, q_rope = ref.split_query(ref.project(q.values, module.q_b_proj.weight, PLAIN), HEADS, angle, PLAIN)
        absorbed = ref.absorb(q_nope, module.kv_b_proj.weight.view(HEADS, NOPE + VALUE, LATENT)[:, :NOPE], PLAIN)
        got = torch.einsum("thd,sd->hts", torch.cat((absorbed, q_rope), -1), torch.cat((latent.values, key), -1))
        torch.testing.assert_close(got, attention, rtol=1e-5, atol=1e-5)

        gate = ref.project(hidden, module.indexer.weights_proj.weight, PLAIN)
        results = []
        for hadamard in (True, False):
            flags = ref.Flags(quantise=False, dtype=torch.float64, hadamard=hadamard)
            norm = module.indexer.k_norm
            keys = ref.project(hidden, module.indexer.wk.weight, flags)
            k = ref.index_key(keys, norm.weight, norm.bias, angle, norm.eps, model.neox, flags)
            queries = ref.project(q.values, module.indexer.wq_b.weight, flags)
            query = ref.index_query(queries, INDEX_HEADS, angle, model.neox, flags)
            weights = ref.head_weights(gate, query.scale, 128)
            results.append(numerics.score(query.values, weights, k.values, k.scale.squeeze(1)))
    torch.testing.assert_close(results[0], index.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0], results[1])


def test_the_other_rotation_is_not_the_models(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(TOKENS, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    _, index = model.scores(hidden, monkeypatch)
    indexer, angle = model.attention.indexer, angles_of(model)
    with torch.no_grad():
        latent, norm_q = hidden @ model.attention.q_a_proj.weight.T, model.attention.q_a_layernorm
        q = numerics.rms_norm(latent, norm_q.weight, norm_q.variance_epsilon)
        norm, wrong = indexer.k_norm, not model.neox
        k = ref.index_key(hidden @ indexer.wk.weight.T, norm.weight, norm.bias, angle, norm.eps, wrong, PLAIN)
        query = ref.index_query(q @ indexer.wq_b.weight.T, INDEX_HEADS, angle, wrong, PLAIN)
        weights = ref.head_weights(hidden @ indexer.weights_proj.weight.T, query.scale, 128)
        got = numerics.score(query.values, weights, k.values, k.scale.squeeze(1))
    assert (got - index).norm() > 0.05 * index.norm()

"""GLM-4 (Zeng et al., 2024, https://arxiv.org/abs/2406.12793).

The architecture "glm" has norms before attention and the MLP; "glm4" has norms after them, too. Half of each head is
rotated, in pairs of neighbours.

GLM-4.5 (2025, https://arxiv.org/abs/2508.06471), "glm4_moe", has norms before attention and the MLP, and pairs values
of the two halves of a head. All layers but the first ones have experts, as in DeepSeek-V3. Layers for multi-token
prediction, which follow the last layer, are not used.

dots.llm1 (rednote-hilab, 2025, https://arxiv.org/abs/2506.05767) has the same experts, and normalizes each head of
queries and keys. The last layers may have a sliding window.
"""

from collections.abc import Callable, Iterator

from pagewire.network.blocks import layer, shared_expert
from pagewire.network.families.family import Family, TextConfig, norms_of
from pagewire.network.families.positions import FULL, SLIDING, read_rope, read_windows, sliding_window
from pagewire.network.families.reading import (
    MAX_EXPERTS,
    JsonObject,
    attention_biases,
    flag,
    non_negative,
    num_layers_of,
    number,
    positive,
)
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
    ropes = read_rope(config, default_share=0.5, is_interleaved=True)
    text = TextConfig.read(config, architecture, ropes=ropes, default_eps=1.5625e-7)
    norm, mlp, has_bias = text.norm(), text.mlp(), flag(config, "attention_bias", True)

    def layers(at: int, name: str) -> Iterator[Operation]:
        post_norms = f"{name}.post_self_attn_layernorm", f"{name}.post_mlp_layernorm"
        yield from layer(
            norm,
            norms_of(name),
            text.attention(at, qkv_bias=has_bias)(f"{name}.self_attn"),
            mlp(f"{name}.mlp", up=("gate_up_proj",)),
            post_norms=post_norms if architecture == "Glm4ForCausalLM" else None,
        )

    return text.model(norm, layers)


def _read_moe(config: JsonObject, architecture: str) -> Network:
    text = TextConfig.read(config, architecture, ropes=read_rope(config, default_share=0.5), default_eps=1e-5)
    return text.llama(
        _expert_layers(text, num_dense=1, num_shared=1, renormalizes=True),
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm="head" if flag(config, "use_qk_norm", False) else "none",
    )


def _read_dots(config: JsonObject, architecture: str) -> Network:
    num_full = non_negative(config, "max_window_layers", 62)
    is_windowed = sliding_window(config) > 0
    kinds = [SLIDING if is_windowed and layer >= num_full else FULL for layer in range(num_layers_of(config))]
    text = TextConfig.read(config, architecture, windows=read_windows(config, kinds)[1])
    mlp = _expert_layers(text, num_dense=0, num_shared=1, renormalizes=False)
    return text.llama(mlp, **attention_biases(config), qk_norm="head")


def _expert_layers(
    text: TextConfig, *, num_dense: int, num_shared: int, renormalizes: bool
) -> Callable[[int, str], Iterator[Operation]]:
    """Return a function that yields the MLP operations of a layer, given its number and name. As in DeepSeek-V3
    (https://arxiv.org/abs/2412.19437, section 2.1.2), the first layers are dense; the others have routed experts, which
    are chosen group by group by sigmoid scores and corrections, and shared experts. The keyword arguments are the
    defaults of first_k_dense_replace, n_shared_experts and norm_topk_prob."""
    config = text.config
    num_dense = non_negative(config, "first_k_dense_replace", num_dense)
    experts = text.experts(
        "n_routed_experts",
        scoring="sigmoid",
        renormalizes=flag(config, "norm_topk_prob", renormalizes),
        factor=number(config, "routed_scaling_factor", 1.0),
        num_groups=positive(config, "n_group", 1, limit=MAX_EXPERTS),
        num_chosen_groups=positive(config, "topk_group", 1, limit=MAX_EXPERTS),
    )
    num_shared = positive(config, "n_shared_experts", num_shared, limit=MAX_EXPERTS)
    dense, shared = text.mlp(), text.mlp(num_shared * experts.mlp.size)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        if at < num_dense:
            yield from dense(f"{name}.mlp")
        else:
            correction = experts.correction(f"{name}.mlp.gate.e_score_correction_bias")
            yield from experts(f"{name}.mlp.gate", f"{name}.mlp.experts.{{expert}}", correction=correction)
            yield from shared_expert(shared, f"{name}.mlp.shared_experts")

    return mlp


# Defaults of settings that files may omit.
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128}
GLM = Family(("GlmForCausalLM",), _read, defaults=_DEFAULTS)
GLM4 = Family(("Glm4ForCausalLM",), _read, defaults=_DEFAULTS)
GLM4_MOE = Family(("Glm4MoeForCausalLM",), _read_moe)
DOTS = Family(("Dots1ForCausalLM",), _read_dots, defaults={"num_key_value_heads": 32})

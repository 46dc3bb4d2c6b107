"""StarCoder2 (Lozhkov et al., 2024, https://arxiv.org/abs/2402.19173).

Rotary positions, layer norms, a plain MLP, biases everywhere, and a sliding window in all layers.
"""

from pagewire.common.network.config import JsonObject, ModelConfig
from pagewire.common.network.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    HEAD,
    LAYER,
    OURS,
    PRE_NORMS,
    QKV,
    Family,
    Split,
    Weight,
    read_decoder,
)
from pagewire.common.network.families.positions import read_equal_windows
from pagewire.common.network.families.reading import flag

_MLP = (
    Weight(f"{LAYER}.mlp.c_fc", f"{OURS}.mlp.up", split=Split.INTERMEDIATE),
    Weight(f"{LAYER}.mlp.c_proj", f"{OURS}.mlp.down", split=Split.INTERMEDIATE, axis=1),
)


def _read(config: JsonObject, architecture: str) -> ModelConfig:
    has_bias = flag(config, "use_bias", True)
    return read_decoder(
        config,
        architecture,
        windows=read_equal_windows(config, default_window=None),
        eps_key="norm_epsilon",
        default_eps=1e-5,
        activations=("gelu_pytorch_tanh", "gelu", "gelu_new"),
        norm="layer",
        norm_bias=True,
        is_gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


FAMILY = Family(
    ("Starcoder2ForCausalLM",),
    _read,
    (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *_MLP, *HEAD),
    defaults={"num_key_value_heads": 2, "tie_word_embeddings": True},
)

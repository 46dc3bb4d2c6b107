"""dots.llm1 (rednote-hilab, 2025, https://arxiv.org/abs/2506.05767).

It has the experts of DeepSeek-V3 in all layers but the first ones, and normalizes each head of queries and keys. The
last layers may have a sliding window.
"""

from pagewire.network.families.family import Family, TextConfig
from pagewire.network.families.glm import expert_layers
from pagewire.network.families.positions import FULL, SLIDING, read_windows, sliding_window
from pagewire.network.families.reading import JsonObject, attention_biases, non_negative, num_layers_of
from pagewire.network.network import Network


def _read(config: JsonObject, architecture: str) -> Network:
    num_full = non_negative(config, "max_window_layers", 62)
    is_windowed = sliding_window(config) > 0
    kinds = [SLIDING if is_windowed and layer >= num_full else FULL for layer in range(num_layers_of(config))]
    text = TextConfig.read(config, architecture, windows=read_windows(config, kinds)[1])
    mlp = expert_layers(text, num_dense=0, num_shared=1, renormalizes=False)
    return text.llama(mlp, **attention_biases(config), qk_norm="head")


FAMILY = Family(("Dots1ForCausalLM",), _read, defaults={"num_key_value_heads": 32})

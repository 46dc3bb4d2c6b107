"""EXAONE 4 (LG AI Research, 2025, https://arxiv.org/abs/2507.11407).

It has norms after attention and the MLP instead of before them, and normalizes each head of queries and keys. If the
model has sliding windows, only the layers with a window have positions (NoPE in the others).
"""

from pagewire.network.families.family import Family, TextConfig
from pagewire.network.families.olmo import post_norm_layers
from pagewire.network.families.positions import FULL, SLIDING, read_layer_types, read_rope, sliding_window
from pagewire.network.families.reading import JsonObject, num_layers_of, positive
from pagewire.network.network import Network


def _read(config: JsonObject, architecture: str) -> Network:
    num_layers, window = num_layers_of(config), sliding_window(config)
    kinds = [FULL] * num_layers
    if window and not config.get("layer_types"):
        interval = positive(config, "sliding_window_pattern", 4)
        kinds = [SLIDING if (layer + 1) % interval else FULL for layer in range(num_layers)]
    is_sliding = [kind == SLIDING for kind in read_layer_types(config, kinds, (FULL, SLIDING) if window else (FULL,))]
    ropes, num_positions = read_rope(config)
    with_rope = tuple(rope if slides or not window else None for rope, slides in zip(ropes, is_sliding, strict=True))
    text = TextConfig.read(
        config,
        architecture,
        ropes=(with_rope, num_positions),
        windows=tuple(window if slides else 0 for slides in is_sliding),
        default_eps=1e-5,
    )
    return text.model(text.norm(), post_norm_layers(text, qk_norm="head"))


FAMILY = Family(("Exaone4ForCausalLM",), _read, defaults={"num_key_value_heads": 32})

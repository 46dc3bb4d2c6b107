"""ERNIE 4.5 (Baidu, 2025, https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): a Llama that rotates
heads in pairs of neighbours."""

from pagewire.network.families.family import Family, TextConfig
from pagewire.network.families.positions import read_rope
from pagewire.network.families.reading import JsonObject, flag
from pagewire.network.network import Network


def _read(config: JsonObject, architecture: str) -> Network:
    ropes = read_rope(config, default_theta=500_000.0, is_interleaved=True)
    has_bias = flag(config, "use_bias", False)
    text = TextConfig.read(config, architecture, ropes=ropes, default_eps=1e-5)
    return text.llama(qkv_bias=has_bias, output_bias=has_bias, has_mlp_bias=has_bias)


FAMILY = Family(
    ("Ernie4_5ForCausalLM",),
    _read,
    defaults={"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
)

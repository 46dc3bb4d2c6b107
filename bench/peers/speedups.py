"""The goals for Pagewire's speed relative to its peers, by instruction set, model, weight format, peer and load."""

from bench.peers.arms import Loads, decode_name
from bench.peers.environment import BF16, FORMATS
from pagewire.kernels.cpu import VARIANTS

# Goals relative to llama.cpp with the same file: at 1, 8 and 32 streams, and in prefill; None: no goal.
Goals = tuple[float | None, float | None, float | None, float | None]
# By model and format, on a CPU with bfloat16 instructions.
OVER_LLAMA_CPP: dict[tuple[str, str], Goals] = {
    ("54M shape", BF16): (1.15, 1.7, 1.5, 1.6),
    ("0.6B shape", BF16): (1.4, 2.0, 1.9, 1.6),
    ("0.6B shape", "Q8_0"): (1.4, 2.5, 4.0, 2.5),
    ("0.6B shape", "Q4_0"): (1.6, 4.0, 4.0, 2.5),
    ("0.6B shape", "Q4_K_M"): (1.6, 4.0, 4.0, 2.5),
    **{("1.5B-A0.15B shape", kind): (None, 1.5, None, None) for kind in FORMATS},
}
# The same on a CPU without them. The bf16 goals are the speeds that were reached before other formats existed.
OVER_LLAMA_CPP_WITHOUT: dict[tuple[str, str], Goals] = {
    ("54M shape", BF16): (1.18, 1.75, 1.75, 1.23),
    ("0.6B shape", BF16): (1.83, 1.67, 1.45, 1.43),
    **{(f"{name} shape", kind): (1.2, 1.5, 1.5, 1.2) for name in ("54M", "0.6B") for kind in ("Q8_0", "Q4_0")},
}
STREAMS = (1, 8, 32)


def goal(loads: Loads, isa: str, model: str, weight_format: str, peer: str, load: str) -> float | None:
    """Return the minimum ratio to a peer under a load, or None if no goal is set."""
    has_bf16 = "avx512_bf16" in VARIANTS.get(isa, ())
    if peer == "llama.cpp":
        goals = (OVER_LLAMA_CPP if has_bf16 else OVER_LLAMA_CPP_WITHOUT).get((model, weight_format))
        names = (*map(decode_name, STREAMS), loads.prefill_name)
        return None if goals is None else dict(zip(names, goals, strict=True)).get(load)
    if load == loads.prefill_name and peer == "vLLM" and has_bf16:
        return 1.0
    if load != loads.mixed_name:
        return None
    mixed = {"vLLM": 2.0 if has_bf16 else 1.7, "transformers generate": 3.0, "transformers generate_batch": 6.0}
    return mixed.get(peer)

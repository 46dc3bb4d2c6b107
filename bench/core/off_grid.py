"""Models that compute the same as a GGUF file's, with weights that no format of 4 bits represents exactly.

A published file may be quantised already. A format with the same groups, a scale and a minimum would reproduce its
weights without any error, and its divergence would say nothing. So the norms are folded into the matrices after them,
and the inputs of down and output projections are rescaled by random factors, which the matrices before them undo. The
norms of Gemma differ so much between inputs that no format would represent the folded weights. There random factors are
moved from the norms into the matrices.
"""

from pathlib import Path

import gguf
import numpy as np

from testing.checkpoints.gguf_files import dequantized, write_tensors

SEED = 5
ARCHITECTURES = ("llama", "qwen3", "gemma3")  # SmolLM2 is a llama
_WITHOUT_FOLDING = ("gemma3",)
_READERS = {"attn_norm": ("attn_q", "attn_k", "attn_v"), "ffn_norm": ("ffn_gate", "ffn_up")}


def off_grid(source: Path, path: Path) -> Path:
    """Write the model of a GGUF file in float32 with weights off the grid. Returns `path`. Raises ValueError if the
    architecture is not one of ARCHITECTURES."""
    fields = gguf.GGUFReader(source).fields
    architecture = fields["general.architecture"].contents()
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{source} has the architecture {architecture}; only {ARCHITECTURES} can be changed")
    num_layers, num_heads, num_kv_heads = (
        int(fields[f"{architecture}.{key}"].contents())
        for key in ("block_count", "attention.head_count", "attention.head_count_kv")
    )
    tensors = {name: values.astype(np.float64) for name, values in dequantized(source).items()}
    rng = np.random.default_rng(SEED)
    for layer in range(num_layers):
        of_layer = {name: tensors[f"blk.{layer}.{name}.weight"] for names in _READERS.values() for name in names}
        for norm, names in _READERS.items():
            weight = tensors[f"blk.{layer}.{norm}.weight"]
            moved, kept = weight.copy(), np.ones(len(weight))
            if architecture in _WITHOUT_FOLDING:
                moved = np.exp(rng.uniform(-0.25, 0.25, len(weight)))
                kept = weight / moved
            for name in names:
                of_layer[name] *= moved
            weight[:] = kept
        down, output = (tensors[f"blk.{layer}.{name}.weight"] for name in ("ffn_down", "attn_output"))
        factors = np.exp(rng.uniform(-0.25, 0.25, down.shape[1]))
        down *= factors
        of_layer["ffn_up"] /= factors[:, None]
        factors = np.exp(rng.uniform(-0.25, 0.25, len(of_layer["attn_v"])))
        of_layer["attn_v"] /= factors[:, None]
        of_heads = factors.reshape(num_kv_heads, -1).repeat(num_heads // num_kv_heads, axis=0)
        output *= of_heads.flatten()
    write_tensors(source, path, {name: values.astype(np.float32) for name, values in tensors.items()}, "F32")
    return path

"""Logits of a model over the paged cache, and logits by transformers."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from testing.kernels.compiler import skip_without_compiler
from testing.models import load_model
from testing.worker.state_rows import new_states, state_rows
from worker_service.attention import AttentionBatch, create_backend
from worker_service.host.cpu_decoder import host_model
from worker_service.host.cpu_operations import create_host_operations
from worker_service.models.decoder import Decoder
from worker_service.models.linear import ExpertLinear, Linear
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import attention_shape

CPU = torch.device("cpu")
CHUNKS = (1, 33, 7, 1, 1, 20)  # a first chunk, later ones and decode steps
# Relative to the largest logit: float32 rounding over a few layers.
TOLERANCE = 5e-6
BIASES = {"attention_bias": True, "mlp_bias": True}


def use_kernels(monkeypatch, mode):
    if mode == "require":
        skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", mode)


def host_operations():
    return create_host_operations(load_cpu_kernels())


def create_attention(network, name="auto", block_size=8, dtype=torch.float32):
    return create_backend(name, CPU, attention_shape(network, block_size, dtype, dtype), load_cpu_kernels())


@torch.inference_mode()
def compute_logits(model, token_ids, chunks=CHUNKS, block_size=8, dtype=torch.float32):
    """Return the logits at every position of one sequence, computed chunk by chunk: [sum(chunks), vocab_size]."""
    network, heads = model.network, model.network.heads
    is_fused = getattr(model, "is_fused", False)
    host = host_model(model, create_attention(network)) if is_fused else model
    num_blocks = -(-sum(chunks) // block_size)
    shape = (num_blocks + 1, len(network.layers), 2, block_size, heads.num_kv_heads, heads.head_dim)
    storage = torch.full(shape, float("nan"), dtype=dtype)
    kv_cache = [(storage[:, layer, 0], storage[:, layer, 1]) for layer in range(len(network.layers))]
    states = new_states(network.state_size, 1)
    block_table = torch.arange(num_blocks, 0, -1)[None]
    logits, end = [], 0
    for num_tokens in chunks:
        rows = state_rows(states, [(num_tokens, min(end, 1), [(num_tokens, 1)])])
        positions = torch.arange(end, end + num_tokens)
        end += num_tokens
        slots = block_table[0, positions // block_size] * block_size + positions % block_size
        batch = AttentionBatch([0, num_tokens], [end], block_table[None], slots[None])
        attend = create_attention(network, block_size=block_size, dtype=dtype).prepare(batch, kv_cache)
        outputs = host.forward_logits(token_ids[positions], positions, attend, torch.arange(num_tokens), rows)
        logits.append(outputs.logits)
    return torch.cat(logits)


def packed_products(model):
    """Return the packed weight of each linear module, and of each expert, by name."""
    packed = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.product is not None:
            packed[name] = module.product.packed
        elif isinstance(module, ExpertLinear):
            packed |= {f"{name}.{expert}": each for expert, each in enumerate(module.product.packed.linears)}
    return packed


def random_tokens(seed=0):
    return torch.randint(0, 151, (sum(CHUNKS),), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def transformers_logits(path, token_ids, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model(token_ids[None]).logits[0].float()


def edit_config(path, **fields):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


def edited(path, **changes):
    """Replace tensors of a checkpoint; None removes a tensor."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def load(path: Path, quantization: str | None = None) -> Decoder:
    operations = create_host_operations(load_cpu_kernels())
    return load_model(path, dtype=torch.float32, device=CPU, operations=operations, quantization=quantization)

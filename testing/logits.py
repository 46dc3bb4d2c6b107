"""Logits at every position of some sequences, computed by Pagewire, transformers and llama.cpp."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from pagewire.kernels.cpu import CpuKernels
from pagewire.network.source import load_config
from testing.checkpoints.gguf_files import dequantized
from testing.models import load_model
from testing.worker.state_rows import new_states, state_rows
from worker_service.attention import AttentionBatch, create_backend
from worker_service.cache import CacheEngine
from worker_service.host import create_host_operations, host_model
from worker_service.startup.loader import attention_shape, cache_shape

BLOCK_SIZE = 16
CPU = torch.device("cpu")


class OurModel:
    """A model on the CPU, with a KV cache for one sequence."""

    def __init__(
        self, path: Path, *, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: CpuKernels | None, **options: Any
    ) -> None:
        """`options` are further options of `load_model`."""
        network = load_config(path)
        model = load_model(path, dtype=dtype, device=CPU, operations=create_host_operations(kernels), **options)
        self._backend = create_backend("auto", CPU, attention_shape(network, BLOCK_SIZE, dtype, cache_dtype), kernels)
        self._host = host_model(model, self._backend)
        num_blocks = -(-network.max_position_embeddings // BLOCK_SIZE)
        shape = cache_shape(network, (), BLOCK_SIZE, cache_dtype, is_head_major=self._backend.is_head_major)
        self._cache = CacheEngine(shape, num_blocks, CPU)
        self._table = torch.arange(1, num_blocks + 1)[None, None]
        self._states = new_states(network.state_size, 1)

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return logits as float32 [num_tokens, vocab_size] of all sequences. Each sequence is computed in one step."""
        return torch.cat([self._compute(sequence, 0) for sequence in sequences])

    def complete(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation, computed token by token."""
        found: list[int] = []
        given, first = list(prompt), 0
        while len(found) < num_tokens:
            found.append(int(self._compute(given, first)[-1].argmax()))
            first += len(given)
            given = found[-1:]
        return found

    @torch.inference_mode()
    def _compute(self, token_ids: Sequence[int], first: int) -> Tensor:
        """Return the logits of tokens from position `first` on. Earlier tokens must be in the cache."""
        positions = torch.arange(first, first + len(token_ids))
        # Block 0 belongs to no sequence.
        slots = BLOCK_SIZE + positions
        batch = AttentionBatch([0, len(token_ids)], [first + len(token_ids)], self._table, slots[None])
        attend = self._backend.prepare(batch, self._cache.layers)
        rows = torch.arange(len(token_ids))
        states = state_rows(self._states, [(len(token_ids), min(first, 1), [(len(token_ids), 1)])])
        return self._host.forward_logits(torch.tensor(token_ids), positions, attend, rows, states).logits.float()


class ReferenceModel:
    """Qwen3 of transformers in float32, with the weights that the PyPI package `gguf` reads from a file."""

    @torch.inference_mode()
    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """`config` is the configuration of the checkpoint from which the file was converted."""
        self._model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(dict(config))).eval()
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
        weights = dequantized(path)
        for name, parameter in self._model.named_parameters():
            own_name = names.get_name(name, try_suffixes=(".weight",))
            parameter.copy_(torch.from_numpy(weights[own_name].copy()))

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return logits as float32 [num_tokens, vocab_size] of all sequences."""
        return torch.cat([self._model(torch.tensor([list(sequence)])).logits[0] for sequence in sequences])


class LlamaCppModel:
    """llama.cpp over a GGUF file, run by the program that `bench.peers.environment` builds."""

    def __init__(self, program: Path, path: Path, cache_type: str) -> None:
        """`cache_type`: f32, f16 or bf16."""
        self._command = [program, path, cache_type]

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return logits as float32 [num_tokens, vocab_size] of all sequences."""
        lines = "".join(" ".join(map(str, sequence)) + "\n" for sequence in sequences).encode()
        with tempfile.TemporaryFile() as output:
            subprocess.run(self._command, input=lines, stdout=output, check=True)
            output.seek(0)
            found = np.fromfile(output, np.float32)
        return torch.from_numpy(found).view(sum(map(len, sequences)), -1)


class Divergence:
    """The divergence of models' next-token distributions from the distribution of one reference model."""

    def __init__(self, expected: Tensor) -> None:
        self._logs = expected.double().log_softmax(dim=-1)
        self._chances = self._logs.exp()

    def mean(self, actual: Tensor) -> float:
        """Return the mean Kullback-Leibler divergence over all positions, in nats."""
        ours = actual.double().log_softmax(dim=-1)
        return ours.neg_().add_(self._logs).mul_(self._chances).sum(dim=-1).mean().item()


def mean_divergence(expected: Tensor, actual: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence over all positions of two models' next tokens, in nats."""
    return Divergence(expected).mean(actual)

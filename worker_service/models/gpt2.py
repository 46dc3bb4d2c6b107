"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

import torch.nn.functional as F
from torch import Tensor, nn

from worker_service.models.communicator import Communicator
from worker_service.models.config import ModelConfig
from worker_service.models.linear import Embedding, Linear
from worker_service.models.model import Attend
from worker_service.models.operations import Operations
from worker_service.models.shard import Split, vocabulary_share
from worker_service.models.weights import Weight

# GPT-2's linear layers were 1-d convolutions: their weights are [in, out].
WEIGHTS = (
    Weight("transformer.wte", "embedding"),
    Weight("transformer.wpe", "position_embedding"),
    Weight("transformer.h.{layer}.ln_1", "layers.{layer}.attention_norm"),
    Weight("transformer.h.{layer}.attn.c_attn", "layers.{layer}.attention.qkv", is_transposed=True, split=Split.HEADS),
    Weight(
        "transformer.h.{layer}.attn.c_proj",
        "layers.{layer}.attention.output",
        is_transposed=True,
        split=Split.HEADS,
        axis=1,
    ),
    Weight("transformer.h.{layer}.ln_2", "layers.{layer}.mlp_norm"),
    Weight("transformer.h.{layer}.mlp.c_fc", "layers.{layer}.mlp.up", is_transposed=True, split=Split.INTERMEDIATE),
    Weight(
        "transformer.h.{layer}.mlp.c_proj",
        "layers.{layer}.mlp.down",
        is_transposed=True,
        split=Split.INTERMEDIATE,
        axis=1,
    ),
    Weight("transformer.ln_f", "norm"),
    Weight("lm_head", "head", split=Split.VOCABULARY),
)
# Old checkpoints carry the causal mask of every layer.
IGNORED = r"\.attn\.(masked_)?bias$"


class GPT2(nn.Module):
    """Token ids to final hidden states to logits. Of the operations it uses the products alone.

    `config` has the heads and columns of this rank.
    """

    def __init__(self, config: ModelConfig, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self.communicator = communicator
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            GPT2Layer(config, layer, operations, communicator) for layer in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        num_logits = vocabulary_share(config.vocab_size, communicator.size)
        self.head = Linear(config.hidden_size, [num_logits], operations, bias=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Model.forward`."""
        x = self.embedding(token_ids) + self.position_embedding(positions)  # [T, hidden_size]
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        return self.communicator.all_gather(self.head(hidden))[:, : self.config.vocab_size].float()


class GPT2Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = GPT2Attention(config, layer, operations, communicator)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = GPT2MLP(config, operations, communicator)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attend)
        return x + self.mlp(self.mlp_norm(x))


class GPT2Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.communicator = communicator
        size = config.num_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, [size] * 3, operations, bias=config.qkv_bias)
        self.output = Linear(
            size, [config.hidden_size], operations, bias=config.output_bias, adds_bias=communicator.rank == 0
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        query, key, value = self.qkv(x).unflatten(1, (-1, self.head_dim)).chunk(3, dim=1)  # [T, num_heads, head_dim]
        return self.communicator.all_reduce(self.output(attend(self.layer, query, key, value).flatten(1)))


class GPT2MLP(nn.Module):
    def __init__(self, config: ModelConfig, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator
        self.up = Linear(config.hidden_size, [config.intermediate_size], operations, bias=config.mlp_bias)
        self.down = Linear(
            config.intermediate_size,
            [config.hidden_size],
            operations,
            bias=config.mlp_bias,
            adds_bias=communicator.rank == 0,
        )
        self.gelu_form = "none" if config.activation == "gelu" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.communicator.all_reduce(self.down(F.gelu(self.up(x), approximate=self.gelu_form)))

"""The part of a tensor parallel model that one rank holds.

It is split as in Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053): queries, keys and values, the
first products of the MLP and of each expert, and the head are split by their outputs, attention's output and the second
products by their inputs, so that ranks meet twice a layer and once for the logits. Embeddings, norms and routers are
whole on every rank."""

from dataclasses import dataclass, replace

from pagewire.common.network.config import ModelConfig
from pagewire.common.network.families.family import Split


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` among `size`."""

    whole: ModelConfig
    rank: int = 0
    size: int = 1

    @staticmethod
    def of(whole: ModelConfig, rank: int, size: int) -> "Shard":
        """Raises ValueError if the model cannot be shared out among so many ranks."""
        columns = {"attention heads": whole.num_heads}
        if not all(map(whole.has_experts, range(whole.num_layers))):
            columns["columns of the MLP"] = whole.intermediate_size
        if whole.experts is not None:
            columns["columns of an expert"] = whole.experts.intermediate_size
            columns["columns of the shared expert"] = whole.experts.shared_intermediate_size
        for what, number in columns.items():
            if number % size:
                raise _indivisible(size, f"divide the {number} {what}")
        if whole.num_kv_heads % size and size % whole.num_kv_heads:
            raise _indivisible(size, f"divide the {whole.num_kv_heads} KV heads, or be a multiple of them")
        return Shard(whole, rank, size)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank computes it. Where there are more ranks than KV heads, several hold the same one."""
        experts = self.whole.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=experts.intermediate_size // self.size,
                shared_intermediate_size=experts.shared_intermediate_size // self.size,
            )
        slopes = self.whole.alibi_slopes
        share = len(slopes) // self.size
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.size),
            intermediate_size=self.whole.intermediate_size // self.size,
            alibi_slopes=slopes[self.rank * share : (self.rank + 1) * share],
            experts=experts,
        )

    def length(self, split: Split) -> int:
        """Return the length of the whole dimension."""
        whole = self.whole
        return {
            Split.HEADS: whole.num_heads * whole.head_dim,
            Split.KV_HEADS: whole.num_kv_heads * whole.head_dim,
            Split.QKV_BY_HEAD: 3 * whole.num_heads * whole.head_dim,
            Split.HEAD_VALUES: whole.num_heads,
            Split.INTERMEDIATE: whole.intermediate_size,
            Split.EXPERT_INTERMEDIATE: 0 if whole.experts is None else whole.experts.intermediate_size,
            Split.SHARED_INTERMEDIATE: 0 if whole.experts is None else whole.experts.shared_intermediate_size,
            Split.VOCABULARY: whole.vocab_size,
        }[split]

    def span(self, split: Split) -> slice:
        """This rank's part of the dimension. Of the vocabulary the last ranks may have less than others, or nothing."""
        length = self.length(split)
        if split is Split.VOCABULARY:
            share = vocabulary_share(length, self.size)
            return slice(min(self.rank * share, length), min((self.rank + 1) * share, length))
        if split is Split.KV_HEADS:
            share = self.config.num_kv_heads * self.whole.head_dim
            first_head = self.rank * self.whole.num_kv_heads // self.size
            return slice(first_head * self.whole.head_dim, first_head * self.whole.head_dim + share)
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


def vocabulary_share(vocab_size: int, size: int) -> int:
    """Logits that each of `size` ranks computes: the same number, so those of the last may stand for no token."""
    return -(-vocab_size // size)


def _indivisible(size: int, what: str) -> ValueError:
    return ValueError(f"--tensor-parallel-size is {size}; for this model it must {what}")

"""Settings that depend on positions: rotary embedding, and the growth of queries."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of rotary position embedding (rope; Su et al., 2021, https://arxiv.org/abs/2104.09864), including
    the scaling of frequencies for long sequences.

    The comment on each field names the rope types that use the field.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int = 0  # llama3, yarn, and any type with short_divisors
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # any type; multiplies cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # [rotary_size / 2], any type; divisors of the frequencies; empty: not divided
    # These two replace divisors and attention_factor if no sequence is longer than the original length.
    short_divisors: tuple[float, ...] = ()
    short_attention_factor: float = 1.0
    # The share of a head's values that is rotated, from its start; the other values stay as they are.
    rotary_share: float = 1.0
    is_interleaved: bool = False  # the checkpoint pairs neighbouring values, instead of values of the two halves

    def rotary_size(self, head_dim: int) -> int:
        """Return the number of values of an attention head that are rotated by rotary position embedding."""
        return int(head_dim * self.rotary_share)

    def head_order(self, head_dim: int) -> tuple[int, ...]:
        """Return the order of an attention head's values in our kernels: for each value, its index in the checkpoint's
        head. In our order, rotary embedding rotates pairs (i, i + head_dim / 2), and rotated pairs come first. The
        result is empty if the checkpoint has the same order.

        The dot products of queries and keys stay the same, since both are reordered in the same way.
        """
        size = self.rotary_size(head_dim)
        turned = [*range(0, size, 2), *range(1, size, 2)] if self.is_interleaved else list(range(size))
        if size == head_dim and not self.is_interleaved:
            return ()
        middle = (size + head_dim) // 2
        return (*turned[: size // 2], *range(size, middle), *turned[size // 2 :], *range(middle, head_dim))

    def serving(self, max_model_len: int) -> "RopeConfig":
        """Return the rope settings to use when sequences have at most `max_model_len` tokens. LongRoPE has two lists of
        divisors, and the chosen list applies to all sequences, even short ones. A list cannot be chosen per sequence,
        because cached keys are already rotated before the final length of a sequence is known."""
        if not self.short_divisors or max_model_len > self.original_max_position_embeddings:
            return self
        scale = self.short_attention_factor
        return replace(self, divisors=self.short_divisors, short_divisors=(), attention_factor=scale)


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A factor by which attention queries grow with their position: 1 + beta * log(1 + floor((position + offset) /
    num_positions)). This is the attention temperature of Llama 4 (https://arxiv.org/abs/2501.19399)."""

    beta: float
    num_positions: int
    offset: int = 0

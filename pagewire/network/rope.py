"""How heads are turned by their position, or grow with it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) and how its frequencies are scaled.

    A type uses the fields of its own line and leaves the others alone.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int = 0  # llama3, yarn, and where there are short_divisors
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # multiplies cos and sin, by any type
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # [rotary_size / 2] of the frequencies, by any type; none: not divided
    short_divisors: tuple[float, ...] = ()  # in their place where no sequence is longer than the original length
    rotary_share: float = 1.0  # of a head's values, the first of them; the others are left as they are
    is_interleaved: bool = False  # the checkpoint's pairs are neighbours, not elements of two halves

    def rotary_size(self, head_dim: int) -> int:
        """Return how many values of a head are turned."""
        return int(head_dim * self.rotary_share)

    def head_order(self, head_dim: int) -> tuple[int, ...]:
        """Return which value of a checkpoint's head each value of ours is, such that pairs are (i, i + head_dim / 2)
        and those that are turned come first; none: they are so already.

        Queries and keys in one order have the products that they had before.
        """
        size = self.rotary_size(head_dim)
        turned = [*range(0, size, 2), *range(1, size, 2)] if self.is_interleaved else list(range(size))
        if size == head_dim and not self.is_interleaved:
            return ()
        middle = (size + head_dim) // 2
        return (*turned[: size // 2], *range(size, middle), *turned[size // 2 :], *range(middle, head_dim))

    def serving(self, max_model_len: int) -> "RopeConfig":
        """Return what turns sequences that are at most so long. One list of divisors serves all of them, however short
        they are, since a key that is cached was turned before it is known how long its sequence becomes."""
        if not self.short_divisors or max_model_len > self.original_max_position_embeddings:
            return self
        return replace(self, divisors=self.short_divisors, short_divisors=())


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position, by 1 + beta * log(1 + floor(position / num_positions)); Llama 4's attention
    temperature, https://arxiv.org/abs/2501.19399."""

    beta: float
    num_positions: int

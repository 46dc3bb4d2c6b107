"""How a router's logits become the experts of a token."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """How the experts of a token follow from a router's logits.

    Attributes:
        num_chosen: experts of a token.
        scoring: what logits become, in float32: their softmax over all experts, or the sigmoid of each.
        renormalizes: the weights of a token's experts are divided by their sum.
        factor: of the weights, in the end.
        num_groups: of experts that lie one behind the other, as many in each; 1: they are not grouped.
        num_chosen_groups: only experts of this many groups, those with the highest sums of their two best, are chosen
            (DeepSeek-V3, https://arxiv.org/abs/2412.19437).
    """

    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalizes: bool = True
    factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1

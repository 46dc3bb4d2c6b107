"""The settings by which a router's logits select the experts of a token."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The settings by which a router's logits select the experts of a token, and their weights.

    Attributes:
        num_chosen: the number of experts per token.
        scoring: the function from logits to scores, in float32: softmax over all experts, the sigmoid of each, or
            SparseMixer (https://arxiv.org/abs/2409.12136). SparseMixer chooses one expert after the other. The score of
            a chosen expert is its softmax over the experts that were not chosen before it, without those whose logit is
            too far below its own logit, l: by more than 2 * jitter * max(l, |their logit|).
        renormalizes: divide the weights of a token's experts by their sum.
        factor: multiplies the weights at the end.
        num_groups: the number of groups of consecutive experts, all of one size; 1: no groups.
        num_chosen_groups: the number of groups from which experts are chosen: the groups with the highest sums of their
            two best scores (DeepSeek-V3, https://arxiv.org/abs/2412.19437).
        jitter: the relative distance of logits that `scoring` names, for SparseMixer.
    """

    num_chosen: int
    scoring: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    renormalizes: bool = True
    factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    jitter: float = 0.0

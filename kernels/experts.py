"""Mixtures of experts: the routing of tokens, and products of tokens with the weights of theirs, in plain
torch. These are the specifications of what `kernels/cpu` and `kernels/triton` compute.

A token goes to `num_chosen` experts (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538). What it is there is a
*slot*: slots are [T * num_chosen, width], those of a token one behind the other in the order of the ids of its experts.
"""

import torch
from torch import Tensor

from pagewire.network.expert_routing import ExpertRouting

__all__ = ["MIN_SUM", "ExpertRouting", "multiply_routed", "route_tokens", "sum_slots"]

MIN_SUM = 1e-20  # is added to the sum that weights are divided by, as DeepSeek-V3 does


def route_tokens(logits: Tensor, routing: ExpertRouting, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, and their weights.

    Args:
        logits: [T, num_experts] float32, of the router.
        correction: [num_experts] float32, added to the scores for the routing alone, not for the weights.

    Returns:
        Ids, [T, num_chosen] int64, rising; and weights, [T, num_chosen] float32. Of equal scores the lower id is
        chosen.
    """
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    # The softmax is monotonic, and rounds: logits that differ would be equal.
    ranked = logits if routing.scoring == "softmax" and correction is None else scores
    if correction is not None:
        ranked = ranked + correction
    if routing.num_groups > 1:
        ranked = _of_top_groups(ranked, routing)
    ids = ranked.sort(descending=True, stable=True).indices[:, : routing.num_chosen].sort().values
    weights = scores.gather(1, ids)
    if routing.renormalizes:
        weights = weights / (weights.sum(1, keepdim=True) + MIN_SUM)
    return ids, weights * routing.factor


def _of_top_groups(ranked: Tensor, routing: ExpertRouting) -> Tensor:
    """[T, num_experts]: -inf for experts of groups that are not chosen."""
    groups = ranked.unflatten(1, (routing.num_groups, -1))  # [T, num_groups, experts of a group]
    best = groups.sort(descending=True).values[..., :2].sum(2)
    chosen = best.sort(descending=True, stable=True).indices[:, : routing.num_chosen_groups]
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
    return groups.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)


def multiply_routed(x: Tensor, weights: Tensor, ids: Tensor, biases: Tensor | None = None) -> Tensor:
    """x W^T + b of each slot, with the weight and bias of its expert.

    Args:
        x: [T, in_size] of tokens, or [T * num_chosen, in_size] of slots.
        weights: [num_experts, out_size, in_size].
        ids: [T, num_chosen], as `route_tokens` returns them.
        biases: [num_experts, out_size].

    Returns:
        Slots, [T * num_chosen, out_size].
    """
    experts = ids.flatten()
    slots = x if len(x) == len(experts) else x.repeat_interleave(ids.shape[1], 0)
    outputs = slots.new_empty(len(slots), weights.shape[1])
    for expert in experts.unique().tolist():
        of_expert = experts == expert
        outputs[of_expert] = slots[of_expert] @ weights[expert].T
        if biases is not None:
            outputs[of_expert] += biases[expert]
    return outputs


def sum_slots(slots: Tensor, weights: Tensor) -> Tensor:
    """The slots of each token, times their weights, summed up in float32 in the order of the ids of experts.

    Args:
        slots: [T * num_chosen, width].
        weights: [T, num_chosen] float32.

    Returns:
        [T, width] in the dtype of the slots.
    """
    num_tokens, num_chosen = weights.shape
    slots_of = slots.float().unflatten(0, (num_tokens, num_chosen))
    total = torch.zeros_like(slots_of[:, 0])
    for place in range(num_chosen):
        total = total + slots_of[:, place] * weights[:, place, None]
    return total.to(slots.dtype)

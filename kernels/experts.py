"""The specification of mixture-of-experts kernels in plain torch: routing, and matrix multiplication by expert.

`kernels/cpu` and `kernels/triton` implement these functions. A token is dispatched to `num_chosen` experts (Shazeer et
al., 2017, https://arxiv.org/abs/1701.06538). The state of a token at one of its experts is a *slot*. A tensor of slots
has the shape `[T * num_chosen, width]`: the slots of a token are consecutive, in ascending order of expert ids.
"""

import torch
from torch import Tensor

from pagewire.network.expert_routing import ExpertRouting

__all__ = ["MIN_SUM", "ExpertRouting", "multiply_routed", "route_tokens", "sum_slots"]

MIN_SUM = 1e-20  # added to the sum that divides the weights, as DeepSeek-V3 does


def route_tokens(logits: Tensor, routing: ExpertRouting, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token in a mixture-of-experts layer, from the router's logits, and compute the
    experts' weights.

    Args:
        logits: [T, num_experts] float32, the output of the router.
        routing: how many experts are chosen, and how their weights are computed from the logits.
        correction: [num_experts] float32, added to the scores that choose the experts. The weights do not include it.

    Returns:
        The ids of the chosen experts, [T, num_chosen] int64 in ascending order, and their weights, [T, num_chosen]
        float32. Among equal scores the lower id is chosen.
    """
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    # Ranking by logits gives the same order as by scores, whose rounding could make different logits equal.
    has_groups = routing.scoring == "sigmoid" and routing.num_groups > 1  # whose scores are added up
    ranked = scores if has_groups or correction is not None else logits
    if correction is not None:
        ranked = ranked + correction
    if routing.num_groups > 1:
        ranked = _keep_top_groups(ranked, routing)
    best = ranked.sort(descending=True, stable=True).indices[:, : routing.num_chosen]
    if routing.scoring == "sparse_mixer":
        scores = _mix_sparsely(logits, best, routing.jitter)
    ids = best.sort().values
    weights = scores.gather(1, ids)
    if routing.renormalizes:
        weights = weights / (weights.sum(1, keepdim=True) + MIN_SUM)
    return ids, weights * routing.factor


def _mix_sparsely(logits: Tensor, chosen: Tensor, jitter: float) -> Tensor:
    """Return the scores [T, num_experts] of SparseMixer, see `ExpertRouting.scoring`. `chosen` [T, num_chosen] has the
    ids of each token's experts, the best first. Experts that are not chosen get score 0."""
    left, scores = logits.clone(), torch.zeros_like(logits)
    for ids in chosen.split(1, dim=1):
        top = left.gather(1, ids)
        is_far = (top - left) / left.abs().maximum(top) > 2 * jitter
        scores.scatter_(1, ids, left.masked_fill(is_far, -torch.inf).softmax(1).gather(1, ids))
        left.scatter_(1, ids, -torch.inf)
    return scores


def _keep_top_groups(ranked: Tensor, routing: ExpertRouting) -> Tensor:
    """Choose the best groups of experts for each token, so that the token's experts are then chosen only from these
    groups. Groups are ranked by the sum of the two highest scores of their experts. Return the scores [T, num_experts],
    with -inf for the experts of all other groups."""
    groups = ranked.unflatten(1, (routing.num_groups, -1))  # [T, num_groups, experts of a group]
    best = groups.sort(descending=True).values[..., :2].sum(2)
    chosen = best.sort(descending=True, stable=True).indices[:, : routing.num_chosen_groups]
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
    return groups.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)


def multiply_routed(x: Tensor, weights: Tensor, ids: Tensor, biases: Tensor | None = None) -> Tensor:
    """Return the expert outputs of a mixture-of-experts layer. Each pair of a token and one of its chosen experts is
    called a slot. The output of a slot is x W^T + b, with the weight W and the bias b of the slot's expert.

    Args:
        x: [T, in_size], one row per token, or [T * num_chosen, in_size], one row per slot.
        weights: [num_experts, out_size, in_size].
        ids: [T, num_chosen], as returned by `route_tokens`.
        biases: [num_experts, out_size], or None.

    Returns:
        The outputs of all slots, [T * num_chosen, out_size].
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
    """Combine the outputs of each token's experts: return their weighted sum, added in float32 in ascending order of
    expert ids.

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

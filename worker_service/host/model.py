"""How a CPU gets from a step's tokens to logits: layer by layer, or by what computes a whole model in one call."""

import time
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker_service.models.model import Attend, Model


class Outputs(NamedTuple):
    """The outputs of a model for a step of T tokens, R of which have logits."""

    hidden: Tensor  # [T, hidden_size], final hidden states
    logits: Tensor  # [R, vocab_size] float32
    highest: Tensor | None  # [R] int64, as `highest_logits` gives it; None: not looked for
    times: dict[str, int]  # nanoseconds by part, as `StepParts` names them, as far as they are told apart


class HostModel(Protocol):
    """A model as a CPU computes it. Callers hold `torch.inference_mode`."""

    def forward_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Outputs:
        """A step: token_ids and positions are [T] int64, logit_rows the tokens that have logits, [R] int64."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of any hidden states: [N, hidden_size] -> [N, vocab_size] float32."""


class LayeredModel:
    """A model whose parts are called one by one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.compute_logits = model.compute_logits

    def forward_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Outputs:
        """See `HostModel.forward_logits`."""
        hidden = self._model.forward(token_ids, positions, attend)
        began_ns = time.perf_counter_ns()
        if len(logit_rows):
            chosen = hidden if len(logit_rows) == len(hidden) else hidden.index_select(0, logit_rows)
            logits = self._model.compute_logits(chosen)
        else:
            logits = torch.empty(0, self._model.config.vocab_size)
        return Outputs(hidden, logits, None, {"head": time.perf_counter_ns() - began_ns})

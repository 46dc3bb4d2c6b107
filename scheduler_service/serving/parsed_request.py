"""A request as its door has read it, before its prompt is tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagewire.common.messages import Pooling
from scheduler_service.core.request import Request
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.prompt_text import too_many_tokens
from scheduler_service.serving.refusal import invalid


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    request: Request  # whole, but for the prompt's tokens, the length of the output and the deadline
    prompt: str | tuple[int, ...]
    max_tokens: int | None = None  # None: as many as fit
    stop: tuple[str, ...] = ()  # texts that end an output
    include_stop_text: bool = False
    skip_special_tokens: bool = True

    @property
    def is_embedding(self) -> bool:
        """Whether its prompt alone is computed, and pooled."""
        return self.request.sampling.pooling is not Pooling.NONE

    def fit(
        self, token_ids: Sequence[int], model: ModelInfo, max_sequence_tokens: int, deadline: float | None
    ) -> Request:
        """Return the request in full, of which prompt and output have at most so many tokens; `deadline` is of the
        engine's clock. Raises RefusedError."""
        self._check_prompt(token_ids, model, max_sequence_tokens)
        max_tokens = 0 if self.is_embedding else self._fit_output(len(token_ids), max_sequence_tokens)
        return replace(self.request, prompt_token_ids=tuple(token_ids), max_tokens=max_tokens, deadline=deadline)

    def _check_prompt(self, token_ids: Sequence[int], model: ModelInfo, max_sequence_tokens: int) -> None:
        is_text = isinstance(self.prompt, str)
        field = "text" if is_text else "token_ids.ids"
        if not token_ids:
            raise invalid(field, "the prompt has no tokens; send at least 1")
        if len(token_ids) >= max_sequence_tokens:
            raise too_many_tokens(field, len(token_ids), max_sequence_tokens)
        largest = max(token_ids)
        if largest >= model.vocab_size:
            check_token_id(field if is_text else f"{field}[{token_ids.index(largest)}]", largest, model)

    def _fit_output(self, num_prompt_tokens: int, max_sequence_tokens: int) -> int:
        room = max_sequence_tokens - num_prompt_tokens
        max_tokens = room if self.max_tokens is None else self.max_tokens
        if max_tokens > room:
            raise invalid(
                "sampling.max_tokens",
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}; this server allows {max_sequence_tokens}; lower max_tokens to "
                f"{room} or shorten the prompt",
            )
        min_tokens = self.request.sampling.min_tokens
        if min_tokens > max_tokens:
            raise invalid(
                "sampling.min_tokens",
                f"min_tokens is {min_tokens}, but the output has at most {max_tokens} tokens; lower min_tokens",
            )
        return max_tokens


def check_token_id(field: str, token_id: int, model: ModelInfo) -> None:
    """Raises RefusedError for a token that the model does not have, which `field` of the request names."""
    if token_id >= model.vocab_size:
        raise invalid(field, f"token id {token_id} is not in the vocabulary of {model.vocab_size} tokens")

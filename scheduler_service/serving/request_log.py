"""A line in the log for every sample that ends: whose it was, what became of it, and where its time went."""

import logging

from scheduler_service.core.request import Request, SequenceEnd
from scheduler_service.serving.observer import ENDED_WELL, Observer

logger = logging.getLogger(__name__)


class RequestLog(Observer):
    def __init__(self, *, logs_all: bool) -> None:
        """With `logs_all`, samples that ended well are logged too."""
        self._logs_all = logs_all

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        if not self._logs_all and end.reason in ENDED_WELL:
            return
        fields = {
            "request_id": request.request_id,
            "tenant": request.tenant,
            "sequence_id": end.sequence_id,
            "reason": end.reason.value,
            "num_prompt_tokens": end.num_prompt_tokens,
            "num_cached_tokens": end.num_cached_tokens,
            "num_output_tokens": end.num_output_tokens,
            "queue_seconds": _round(end.first_scheduled_at, end.arrived_at),
            "first_token_seconds": _round(end.first_token_at, end.arrived_at),
            "seconds": round(now - end.arrived_at, 6),
        }
        text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("request_id", "reason"))
        level = logging.INFO if end.reason in ENDED_WELL else logging.WARNING
        message = f": {end.message}" if end.message else ""
        logger.log(level, "request %s: %s%s (%s)", request.request_id, end.reason.value, message, text, extra=fields)


def _round(moment: float | None, since: float) -> float | None:
    return None if moment is None else round(moment - since, 6)

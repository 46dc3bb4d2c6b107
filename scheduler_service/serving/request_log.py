"""A log line for every sample that ends, with its request, the reason of its end, and the times of its phases.

Samples that end at the same time for the same reason share one line, since thousands may end when the worker is lost.
"""

import asyncio
import logging
from typing import Any

from scheduler_service.core.request import EndReason, Request, SequenceEnd
from scheduler_service.serving.observer import NON_FAILURES, Observer

logger = logging.getLogger(__name__)

_MAX_NAMED = 10  # requests named in a shared line


class RequestLog(Observer):
    def __init__(self, *, logs_all: bool) -> None:
        """Create a log of ended samples. Failed samples are always logged. With `logs_all`, samples that ended normally
        are logged too."""
        self._logs_all = logs_all
        # The samples that failed in this iteration of the event loop, by reason and message.
        self._failed: dict[tuple[EndReason, str], list[dict[str, Any]]] = {}

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        ended_well = end.reason in NON_FAILURES
        if ended_well and not self._logs_all:
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
        if ended_well:
            _log(logging.INFO, end.message, fields)
            return
        if not self._failed:
            asyncio.get_running_loop().call_soon(self._log_failed)
        self._failed.setdefault((end.reason, end.message), []).append(fields)

    def _log_failed(self) -> None:
        failed, self._failed = self._failed, {}
        for (reason, message), samples in failed.items():
            names = list(dict.fromkeys(fields["request_id"] for fields in samples))
            if len(names) == 1:
                for fields in samples:
                    _log(logging.WARNING, message, fields)
                continue
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            named = f"{len(names)} requests ({', '.join(names[:_MAX_NAMED])}{more})"
            extra = {"reason": reason.value, "num_requests": len(names), "request_ids": names[:_MAX_NAMED]}
            logger.warning("%s: %s%s", named, reason.value, f": {message}" if message else "", extra=extra)


def _log(level: int, message: str, fields: dict[str, Any]) -> None:
    text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("request_id", "reason"))
    told = f": {message}" if message else ""
    logger.log(level, "request %s: %s%s (%s)", fields["request_id"], fields["reason"], told, text, extra=fields)


def _round(moment: float | None, since: float) -> float | None:
    return None if moment is None else round(moment - since, 6)

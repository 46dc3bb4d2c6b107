"""The requests that wait: their queue, and what each would compute if it began now."""

from scheduler_service.core.waiting.standings import Standings, num_uncached_tokens
from scheduler_service.core.waiting.waiting_queue import WaitingQueue

__all__ = ["Standings", "WaitingQueue", "num_uncached_tokens"]

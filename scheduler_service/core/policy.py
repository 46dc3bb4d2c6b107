"""Scheduling policies, chosen by `--policy`.

A policy decides which request is scheduled next. A policy gives each request keys, and each tenant a rank that may
change. The next waiting request is the request with the least (rank of its tenant, key). Among running requests only
the running key matters, and it never changes. It decides which request is scheduled first, and which request is
preempted last.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from scheduler_service.core.request import Request

DEFAULT_MAX_WAIT_S = 600.0
_FEW_BLOCKS = 16  # a difference of this many blocks to compute hardly matters
_HALVING_SHARE = 2 / 3  # the head start for a prompt that is half cached, as a share of the longest wait
_NUM_ABSENT = 64  # counters of absent tenants that a fair policy adds before it drops unneeded ones


class WaitingState(NamedTuple):
    """The state of a waiting request that a scheduling policy may use to order the queue. It changes while the request
    waits, for example when blocks of its prompt are evicted from the cache."""

    arrived_at: float  # seconds of the caller's clock
    has_precedence: bool  # it has run before, or has waited longer than the policy's longest wait
    num_blocks: int  # of the whole prompt
    num_uncached_blocks: int  # of these, the blocks to compute if the request started now


class Policy:
    """A scheduling policy that orders requests by a key and ignores tenants.

    Subclasses that rank tenants override its methods. All keys of a policy have one shape. They end in `arrival`, which
    makes them unique.

    Limit: nothing keeps a tenant from filling the queue. The first request in order is always scheduled next. So a
    request is certain to run if only finitely many later requests can have a smaller key. This holds for all requests
    under "fcfs". Under "priority" it holds for a request unless an endless stream of requests has a higher priority.
    Under "deadline" it holds for requests with a deadline.
    """

    ranks_tenants = False  # False: every rank is 0 at all times
    moves_keys = False  # False: `key` does not look at the standing
    max_wait_s = math.inf  # seconds after which a request has precedence; infinite if it never does

    def __init__(self, name: str, running_key: Callable[[Request, int], tuple[Any, ...]]) -> None:
        """Create a scheduling policy with the given name.

        `running_key` computes the sort key of a running request from the request and the sequence number of its
        arrival. The request with the lowest key is scheduled first and preempted last.
        """
        self.name = name
        self.running_key = running_key

    def key(self, request: Request, arrival: int, standing: WaitingState) -> tuple[Any, ...]:
        """Return the sort key of a waiting request. Among the waiting requests of one tenant, the request with the
        lowest key is scheduled next.

        `arrival` is the sequence number of the request's arrival.
        """
        return self.running_key(request, arrival)

    def rank(self, tenant: str) -> float:
        """Return the current rank of a tenant. The scheduler chooses the next request from the waiting tenant with the
        lowest rank."""
        return 0.0

    def arrived(self, tenant: str) -> None:
        """Record that a tenant without requests has sent a request. A policy that ranks tenants then begins to count
        the tokens computed for this tenant."""

    def queued(self, tenant: str) -> None:
        """Record that a tenant now has a waiting request, and had none before. `arrived` was called for this tenant
        earlier."""

    def unqueued(self, tenant: str) -> None:
        """Record that no request of the tenant waits any more. Some of its requests may still run."""

    def left(self, tenant: str) -> None:
        """Record that the last request of a tenant has ended, so that none of its requests waits or runs."""

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Add the prompt tokens and output tokens that the worker has computed for a tenant to the tenant's use of the
        worker. The tenant must have an unfinished request."""


class FairPolicy(Policy):
    """A scheduling policy that gives every tenant a fair share of the worker, by the virtual token counters of Sheng et
    al., "Fairness in Serving Large Language Models", OSDI 2024.

    A tenant's counter is the service that the tenant has received: prompt tokens with weight 1, output tokens with
    weight 2. The waiting tenant with the lowest counter is next. Within a tenant, priority and arrival decide. When a
    tenant begins to wait, its counter is raised to the lowest counter among the waiting tenants. If no tenant waits, it
    is raised to the counter of the tenant that waited last. So no tenant saves up service by staying away.

    Bound (theorem 4.4 of the paper): while two tenants both have requests waiting, the service that they receive
    differs by at most 2 * max(prompt tokens of one request, 2 * tokens that run at once). The bound holds only while a
    tenant is passed over because another tenant's counter is lower. It does not hold while a tenant's first request is
    refused for reasons of its own. It does not hold for tenants that one client invents at will. Running requests are
    not preempted for fairness.

    Counters are kept while any tenant has a request. Afterwards all start again at 0.
    """

    ranks_tenants = True
    PROMPT_WEIGHT = 1
    OUTPUT_WEIGHT = 2

    def __init__(self, name: str = "fair", *, moves_keys: bool = False, max_wait_s: float = math.inf) -> None:
        """Create a fair policy that has not served any tenant yet.

        If `moves_keys` is true, requests of a tenant also go earlier in the queue if more of their prompt is cached.
        `max_wait_s` is the number of seconds after which a waiting request has precedence over later requests.
        """
        super().__init__(name, _by_priority_of_operators)
        self.moves_keys = moves_keys
        self.max_wait_s = max_wait_s
        self._counters: dict[str, int] = {}
        self._present: set[str] = set()  # tenants with requests, waiting or running
        self._waiting: set[str] = set()
        self._last_waiting = ""  # the last tenant that stopped waiting
        self._floor = 0  # the least counter of a tenant that begins to wait; never falls while a tenant is present
        self._num_absent_kept = 0

    def key(self, request: Request, arrival: int, standing: WaitingState) -> tuple[Any, ...]:
        """Return the sort key of a request among its tenant's waiting requests. The key consists of priority and
        arrival or, if keys move, also of the uncached prompt length.

        If keys move, a request that computes half as much is treated as if it had arrived two thirds of `max_wait_s`
        earlier. Within a priority, requests with precedence go first.

        Cached content is lost if it is evicted before its request runs. Requests that find most of their prompt in the
        cache go first. So sessions whose contexts do not fit together are served a few at a time, and keep their
        caches. Requests that find nothing stay in the order of arrival, however long their prompts are. All requests
        age alike, so the order changes only with the cache.
        """
        if not self.moves_keys:
            return request.priority, arrival
        if standing.has_precedence:
            return request.priority, 0, standing.arrived_at, arrival
        num_halvings = math.log2((standing.num_blocks + _FEW_BLOCKS) / (standing.num_uncached_blocks + _FEW_BLOCKS))
        lead_s = _HALVING_SHARE * self.max_wait_s * num_halvings
        return request.priority, 1, standing.arrived_at - lead_s, arrival

    def rank(self, tenant: str) -> float:
        return self._counters[tenant]

    def arrived(self, tenant: str) -> None:
        self._present.add(tenant)
        self._counters.setdefault(tenant, self._floor)

    def queued(self, tenant: str) -> None:
        if self._waiting:
            self._floor = min(self._counters[other] for other in self._waiting)
        else:
            self._floor = max(self._floor, self._counters.get(self._last_waiting, 0))
        self._counters[tenant] = max(self._counters[tenant], self._floor)
        self._waiting.add(tenant)

    def unqueued(self, tenant: str) -> None:
        self._waiting.remove(tenant)
        self._last_waiting = tenant

    def left(self, tenant: str) -> None:
        self._present.remove(tenant)
        if not self._present:
            self._counters.clear()
            self._last_waiting, self._floor, self._num_absent_kept = "", 0, 0
        elif len(self._counters) - len(self._present) > 2 * self._num_absent_kept + _NUM_ABSENT:
            self._forget()

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._counters[tenant] += self.PROMPT_WEIGHT * num_prompt_tokens + self.OUTPUT_WEIGHT * num_output_tokens

    def _forget(self) -> None:
        """Delete the counters of tenants without requests, if a counter has no effect any more: when such a tenant
        waits again, its counter would be raised to the floor in any case."""
        kept = {name: count for name, count in self._counters.items() if name in self._present or count > self._floor}
        self._counters = kept
        self._num_absent_kept = len(kept) - len(self._present)


def _by_priority_of_operators(request: Request, arrival: int) -> tuple[Any, ...]:
    """Return a sort key for running requests that ignores the priorities that tenants set.

    With its own priorities, a tenant could otherwise cause the preemption of all other tenants' requests. The priority
    of a request without a tenant is used.
    """
    return 0 if request.tenant else request.priority, arrival


# The keys of policies that use only the request. They are defined separately, since mypyc does not support nested
# lambdas.
_KEYS: dict[str, Callable[[Request, int], tuple[Any, ...]]] = {
    "priority": lambda request, arrival: (request.priority, arrival),
    "fcfs": lambda request, arrival: (arrival,),
    "deadline": lambda request, arrival: (
        math.inf if request.deadline is None else request.deadline,
        request.priority,
        arrival,
    ),
}
_POLICIES: dict[str, Callable[[float], Policy]] = {
    "agent": lambda max_wait_s: FairPolicy("agent", moves_keys=True, max_wait_s=max_wait_s),
    "priority": lambda max_wait_s: Policy("priority", _KEYS["priority"]),
    "fcfs": lambda max_wait_s: Policy("fcfs", _KEYS["fcfs"]),
    "fair": lambda max_wait_s: FairPolicy(),
    "deadline": lambda max_wait_s: Policy("deadline", _KEYS["deadline"]),
}
POLICIES = tuple(_POLICIES)  # the first is the default


def create_policy(name: str, max_wait_s: float = DEFAULT_MAX_WAIT_S) -> Policy:
    """Create the scheduling policy with the given name.

    `max_wait_s` is the number of seconds after which a waiting request has precedence. Only the policy "agent" uses it.
    Raises ValueError for an unknown name.
    """
    if name not in _POLICIES:
        raise ValueError(f"policy is {name!r}, choose one of {', '.join(POLICIES)}")
    return _POLICIES[name](max_wait_s)

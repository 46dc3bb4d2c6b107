"""Small named policies, chosen by `--policy`, that say who is served next.

A policy gives each request keys and each tenant a rank that may change. Of all waiting requests the next is the one of
the least (rank of its tenant, key); among running ones the running key, which never changes, alone decides who is
served first and who is preempted last.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from scheduler_service.core.request import Request

DEFAULT_MAX_WAIT_S = 600.0
_FEW_BLOCKS = 16  # so many more or less to compute hardly matter
_HALVING_SHARE = 2 / 3  # of the bound on waiting: what half of a prompt being cached is worth
_NUM_ABSENT = 64  # counters of tenants without requests that a fair policy keeps before it looks which it needs


class Standing(NamedTuple):
    """What is known of a waiting request beside what it asks for. It changes while the request waits."""

    arrived_at: float  # seconds of the caller's clock
    has_precedence: bool  # it has run before, or has waited as long as the policy lets a request wait
    num_blocks: int  # of its prompt
    num_uncached_blocks: int  # of these, those that it would compute if it began now


class Policy:
    """Orders by a key of the request; tenants do not matter. What ranks tenants overrides that.

    All keys of a policy have one shape and end in `arrival`, which makes them unique.

    Limit: nothing keeps a tenant from filling the queue. The first request in order is always served next, so every
    request is served whose key only finitely many later ones can undercut: all of them under "fcfs", under "priority"
    those that no endless stream of a higher priority precedes, under "deadline" those that have a deadline.
    """

    ranks_tenants = False  # False: every rank is 0 at all times
    moves_keys = False  # False: `key` does not look at the standing
    max_wait_s = math.inf  # after which a request has precedence; infinite where none ever has

    def __init__(self, name: str, running_key: Callable[[Request, int], tuple[Any, ...]]) -> None:
        """`running_key` orders a request among all that run: the lowest is served first, and preempted last."""
        self.name = name
        self.running_key = running_key

    def key(self, request: Request, arrival: int, standing: Standing) -> tuple[Any, ...]:
        """Order a request among those of its tenant that wait: the lowest is next. `arrival` counts the requests."""
        return self.running_key(request, arrival)

    def rank(self, tenant: str) -> float:
        """Order the tenants: one of the lowest rank is next."""
        return 0.0

    def arrived(self, tenant: str) -> None:
        """A tenant has a request, and had none before, waiting or running."""

    def queued(self, tenant: str) -> None:
        """A request of the tenant waits, and none did before. It arrived earlier."""

    def unqueued(self, tenant: str) -> None:
        """The tenant has no request that waits any more."""

    def left(self, tenant: str) -> None:
        """The tenant's last request ended."""

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The tenant, which has a request, was served."""


class FairPolicy(Policy):
    """A fair share for every tenant: the virtual token counters of Sheng et al., "Fairness in Serving Large Language
    Models", OSDI 2024.

    A tenant's counter is the service it got: prompt tokens with weight 1, output tokens with weight 2. The waiting
    tenant with the lowest counter is next; within a tenant, priority and arrival decide. A tenant that begins to wait
    is lifted to the lowest counter of those that wait (where none waits: of the last that did), so none saves up
    service by staying away.

    Bound (their theorem 4.4): while two tenants both have requests waiting, the service that they get differs by at
    most 2 * max(prompt tokens of one request, 2 * tokens that run at once). It holds where a tenant is passed over only
    because another's counter is lower: not while the first request of a tenant is refused for reasons of its own, and
    not for tenants that one client makes up at will. Running requests are not preempted for the sake of fairness.

    Counters are kept while any tenant has a request; then all begin anew.
    """

    ranks_tenants = True
    PROMPT_WEIGHT = 1
    OUTPUT_WEIGHT = 2

    def __init__(self, name: str = "fair", *, moves_keys: bool = False, max_wait_s: float = math.inf) -> None:
        """`moves_keys`: order a tenant's requests by how much of them they would compute if they began now."""
        super().__init__(name, _by_priority_of_operators)
        self.moves_keys = moves_keys
        self.max_wait_s = max_wait_s
        self._counters: dict[str, int] = {}
        self._present: set[str] = set()  # tenants with requests, waiting or running
        self._waiting: set[str] = set()
        self._last_waiting = ""  # the tenant that waited last
        self._floor = 0  # what a tenant that begins to wait has at least; never falls while any is present
        self._num_absent_kept = 0

    def key(self, request: Request, arrival: int, standing: Standing) -> tuple[Any, ...]:
        """Order a tenant's requests by priority and arrival or, where keys move, those of one priority by how much of
        their prompts they would compute: half as much is as good as having come two thirds of the bound earlier. Of one
        priority, those with precedence go first.

        What is cached now is lost if it is evicted before its turn. By serving those first that find most of their
        prompt, sessions whose contexts do not fit together are served a few at a time, and keep their caches. Requests
        that find nothing stay in the order of arrival, however long they are. All age alike, so the order changes only
        with the cache.
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
        """Drop the counters of absent tenants that the next lift would raise anyway."""
        kept = {name: count for name, count in self._counters.items() if name in self._present or count > self._floor}
        self._counters = kept
        self._num_absent_kept = len(kept) - len(self._present)


def _by_priority_of_operators(request: Request, arrival: int) -> tuple[Any, ...]:
    """A tenant's priorities say nothing about others: by them, it could have everybody else preempted. Those of
    requests that belong to no tenant count."""
    return 0 if request.tenant else request.priority, arrival


# Of those that go by the request alone. Apart from below, since mypyc takes no lambda inside another.
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
    """Make a policy of that name; `max_wait_s` bounds the waiting where the policy has such a bound. Raises ValueError
    for another name."""
    if name not in _POLICIES:
        raise ValueError(f"policy is {name!r}, choose one of {', '.join(POLICIES)}")
    return _POLICIES[name](max_wait_s)

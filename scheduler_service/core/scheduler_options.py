"""The options of the core in one value. Command-line flags and a recording's header are derived from it."""

from dataclasses import dataclass

from pagewire.common.option_limits import Limit, at_least, between, option
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.policy import DEFAULT_MAX_WAIT_S, POLICIES
from scheduler_service.core.retention import EXPECTATIONS

_MAX_COUNT = 2**31 - 1  # the largest count that GetServerInfo can report


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The options of the scheduler. Each option has a default, a help text and limits."""

    max_num_seqs: int = option(256, "how many sequences can run at the same time", between(1, _MAX_COUNT))
    max_num_batched_tokens: int = option(2048, "how many tokens one step can compute", between(1, _MAX_COUNT))
    max_model_len: int | None = option(
        None,
        "longest sequence, prompt and output together, in tokens (default: the checkpoint's limit)",
        between(2, _MAX_COUNT),
    )
    pipeline_depth: int = option(
        2, "how many steps are sent to the worker before the first of them is done", between(1, _MAX_COUNT)
    )
    max_waiting_requests: int = option(4096, "how many sequences can wait in the queue", at_least(1))
    max_waiting_tokens: int = option(4_194_304, "how many prompt tokens can wait in the queue", at_least(1))
    max_tenant_waiting_requests: int | None = option(
        None, "how many sequences of one tenant can wait (default: no limit)", at_least(1)
    )
    enable_prefix_caching: bool = option(True, "reuse the KV cache of common prompt prefixes")
    watermark: float = option(
        0.01,
        "share of the device blocks to keep free when a request is admitted, below 1",
        at_least(0),
        Limit("below 1", lambda value: value < 1),
    )
    policy: str = option(
        POLICIES[0],
        "which waiting request runs next; agent is fair to tenants, follows priorities, and prefers cached prompts",
        choices=POLICIES,
    )
    preemption: str = option(
        "auto",
        "how a preempted request's KV cache is handled: swapped, recomputed, or whichever is cheaper (auto)",
        choices=tuple(mode.value for mode in PreemptionMode),
    )
    max_lease_ms: float = option(
        40.0,
        "milliseconds for which a worker may decode without a further plan, while no request waits; 0: one step",
        at_least(0),
    )
    max_decode_slowdown: float | None = option(
        None,
        "how many times longer a decode step may take when it also computes prompts; without decoding sequences "
        "at least 16 times (default: no limit)",
        at_least(1),
    )
    max_wait: float = option(
        DEFAULT_MAX_WAIT_S,
        "seconds after which a waiting request precedes all later requests of its tenant and priority, under the "
        "policy agent",
        at_least(0),
    )
    retention: str = option(
        "lru",
        "which sessions' cached blocks the policy agent keeps longest, apart from blocks for waiting requests: the "
        "most recently used (lru), or those expected to return soonest (learned)",
        choices=tuple(EXPECTATIONS),
    )
    grammar_version: str = ""  # no flag: version of the grammar library; workers with another version get no grammars

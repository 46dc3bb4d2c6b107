"""Leases: the worker decodes for several steps without a plan, and a plan that cannot wait ends the lease.

The simulator draws leases, and plans that end them, at random. These tests show the two promises by themselves: what
must not wait does not wait, and no token is lost or computed twice.
"""

from dataclasses import replace

import pytest

from pagewire.common.wire.messages import StepPlan
from tests.core.system import System, prompt_of

NUM_LEASED = 8
STEP_US = 1000


class LeasedSystem(System):
    """A system whose worker accepts leases of up to NUM_LEASED steps."""

    def join(self) -> None:
        self.capacity = replace(self.capacity, max_leased_steps=NUM_LEASED)
        super().join()

    def plan(self) -> StepPlan | None:
        """Compute the next plan and the steps of its lease."""
        plan = super().plan()
        for i in range(plan.num_leased_steps if plan is not None else 0):
            self.results.append(self.worker.execute(StepPlan(plan.epoch, plan.step + 1 + i)))
        self.results = type(self.results)(replace(result, duration_us=STEP_US) for result in self.results)
        return plan

    def begin_lease(self) -> StepPlan:
        """Run until the worker has received a plan with a lease. Return the plan, none of whose steps is computed."""
        while True:
            plan = self.scheduler.schedule(self.now)
            if plan is not None and plan.num_leased_steps:
                while self.results:
                    self.complete()
                return plan
            if plan is not None:
                self.results.append(replace(self.worker.execute(plan), duration_us=STEP_US))
            else:
                self.complete()

    def compute_steps(self, plan: StepPlan, num_steps: int) -> None:
        """Compute the first steps of a plan with a lease. Their results are on the way."""
        for i in range(num_steps):
            step = plan if i == 0 else StepPlan(plan.epoch, plan.step + i)
            self.results.append(replace(self.worker.execute(step), duration_us=STEP_US))

    def end_lease(self, plan: StepPlan, num_steps: int, ending: StepPlan) -> None:
        """Let the worker end a plan's lease after `num_steps` steps, the last of which is on the way, and compute the
        plan that ends the lease."""
        self.results[-1] = replace(self.results[-1], num_dropped_steps=plan.num_leased_steps + 1 - num_steps)
        self.complete()
        assert [dispatch.step for dispatch in self.scheduler.state.worker.unacknowledged] == [ending.step]
        self.results.append(self.worker.execute(ending))

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.state.worker.cache.pool.num_free


def leased_system(**options: object) -> LeasedSystem:
    system = LeasedSystem(**options)
    system.join()
    return system


@pytest.mark.parametrize("num_steps", [1, 2, NUM_LEASED])
def test_a_new_request_waits_for_one_step_of_a_lease(num_steps: int) -> None:
    system = leased_system()
    [first] = system.add(prompt_of(6), max_tokens=60)
    leased = system.begin_lease()
    assert leased.num_leased_steps == NUM_LEASED
    assert system.scheduler.schedule(system.now) is None  # the worker needs nothing more
    system.compute_steps(leased, num_steps)
    for _ in range(num_steps - 1):
        system.complete()
    [second] = system.add(prompt_of(9, seed=1), max_tokens=20)
    ending = system.scheduler.schedule(system.now)
    assert ending.ends_lease
    assert [opening.slot for opening in ending.openings] == [1]
    system.end_lease(leased, num_steps, ending)
    system.complete()
    assert len(system.tokens[second]) == 1
    system.run()
    system.assert_exact()
    assert len(system.tokens[first]) == 60


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_cancelled_request_frees_its_blocks_at_once(num_steps: int) -> None:
    """The worker ends the row at the next boundary of a step. A step that it computes until then writes only blocks
    that a later plan may give to others, so they need not wait for it."""
    system = leased_system(num_blocks=12)
    system.add(prompt_of(7), max_tokens=30)
    leased = system.begin_lease()
    system.compute_steps(leased, num_steps)
    for _ in range(num_steps - 1):
        system.complete()
    assert system.num_free_blocks < 12
    system.take(system.scheduler.abort("", "r0", system.now))
    assert system.num_free_blocks == 12
    [second] = system.add(prompt_of(40, seed=1), max_tokens=5)  # it needs all blocks
    ending = system.scheduler.schedule(system.now)
    assert ending.ends_lease
    assert ending.released_slots == (0,)
    system.end_lease(leased, num_steps, ending)
    system.run()
    system.assert_exact()
    assert len(system.tokens[second]) == 5


@pytest.mark.parametrize("options", [{"max_lease_ms": 0.0}, {"depth": 1}])
def test_leases_that_are_off(options: dict[str, object]) -> None:
    system = leased_system(**options)
    system.add(prompt_of(6), max_tokens=60)
    while system.scheduler.has_requests:
        plan = system.plan()
        assert plan is None or not plan.num_leased_steps
        if plan is None:
            system.complete()
    system.assert_exact()


def test_a_lease_is_as_long_as_its_time_allows() -> None:
    system = leased_system(max_lease_ms=4 * STEP_US / 1e3)
    system.add(prompt_of(6), max_tokens=60)
    assert system.begin_lease().num_leased_steps == 3


def test_a_lease_ends_before_a_last_token() -> None:
    system = leased_system()
    [sequence_id] = system.add(prompt_of(6), max_tokens=60)
    while system.scheduler.has_requests:
        plan = system.plan()
        if plan is not None and plan.num_leased_steps:
            num_tokens = len(system.tokens[sequence_id]) + len(system.results)
            assert num_tokens < 60
        if plan is None:
            system.complete()
    system.assert_exact()


def test_a_row_that_fills_the_pool_waits_for_its_results() -> None:
    """The row keeps blocks that its windows have passed until results arrive, because it may repeat a position. It
    must not be preempted for them: it would compute everything anew for each token."""
    system = leased_system(
        num_blocks=46, block_size=1, max_num_seqs=1, budget=1, depth=3, windows=(15, 15, 15), preemption="swap"
    )
    system.add(prompt_of(18), max_tokens=25)
    system.run()
    system.assert_exact()
    assert system.num_plans <= 18 + 25
    assert system.scheduler.state.counters.num_preemptions == 0


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_leases_save_the_states_of_a_conversation(depth: int) -> None:
    def num_cached_tokens(**options: object) -> int:
        system = leased_system(num_blocks=200, depth=depth, num_states=12, **options)
        [first] = system.add(prompt_of(6), max_tokens=120)
        system.run()
        system.add([*prompt_of(6), *system.tokens[first]], max_tokens=2)
        system.plan()
        [group] = system.scheduler.state.groups.values()
        return group.sequences[0].num_cached_tokens

    assert num_cached_tokens() == num_cached_tokens(max_lease_ms=0.0) > 120

import pytest

from pagewire.common.wire.messages import PROTOCOL_VERSION, Hello, Refusal, RefusalReason, WorkerProtocolError
from worker_service.rpc.session import Session, SessionRegister

NOW = 1.8e9  # seconds of Unix time


def hello(epoch: int, *, version: int = PROTOCOL_VERSION, instance_id: str = "a", pipeline_depth: int = 2) -> Hello:
    return Hello(version, instance_id, epoch, pipeline_depth)


def test_epochs_rise_strictly_and_a_refusal_names_the_holder() -> None:
    register = SessionRegister()
    session = register.hello(hello(5, instance_id="first"), NOW)
    assert isinstance(session, Session)
    assert (session.epoch, session.instance_id) == (5, "first")
    for epoch in (0, 4, 5):
        refusal = register.hello(hello(epoch, instance_id="second"), NOW)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.epoch, refusal.instance_id) == (RefusalReason.STALE_EPOCH, 5, "first")
    assert isinstance(register.hello(hello(6, instance_id="second"), NOW), Session)
    assert (register.last_epoch, register.instance_id) == (6, "second")


def test_an_epoch_more_than_a_day_ahead_is_refused_and_forgotten() -> None:
    register, tomorrow = SessionRegister(), int((NOW + 24 * 3600) * 1000)
    assert isinstance(register.hello(hello(5, instance_id="first"), NOW), Session)
    for epoch in ((tomorrow + 1) << 20, 2**63, 2**64 - 1):
        refusal = register.hello(hello(epoch, instance_id="rogue"), NOW)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.epoch, refusal.instance_id) == (RefusalReason.FUTURE_EPOCH, 5, "first")
        assert "more than a day ahead of this worker's clock" in refusal.message
    assert isinstance(register.hello(hello(6, instance_id="first"), NOW), Session)
    assert isinstance(register.hello(hello(((tomorrow + 1) << 20) - 1), NOW), Session)


def test_other_protocol_version_is_refused_and_takes_no_epoch() -> None:
    register = SessionRegister()
    refusal = register.hello(hello(5, version=PROTOCOL_VERSION + 1), NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.PROTOCOL_VERSION
    assert isinstance(register.hello(hello(5), NOW), Session)


@pytest.mark.parametrize("bad", [hello(1, pipeline_depth=0), hello(1, instance_id="")])
def test_hello_that_no_scheduler_sends(bad: Hello) -> None:
    with pytest.raises(WorkerProtocolError):
        SessionRegister().hello(bad, NOW)


def test_plans_come_in_order_and_no_deeper_than_the_pipeline() -> None:
    session = Session(3, "a", pipeline_depth=2)
    session.plan(3, 1)
    session.plan(3, 2)
    with pytest.raises(WorkerProtocolError, match="2 plans are unfinished"):
        session.plan(3, 3)
    session.answer(1)
    session.plan(3, 3)
    session.answer(2)
    session.answer(3)
    for epoch, step, text in ((3, 3, "next step is 4"), (3, 5, "next step is 4"), (4, 4, "this session is epoch 3")):
        with pytest.raises(WorkerProtocolError, match=text):
            session.plan(epoch, step)
    session.plan(3, 4)


def test_plan_with_a_lease_is_unfinished_until_its_last_step_is_answered() -> None:
    session = Session(3, "a", pipeline_depth=2, max_leased_steps=2)
    with pytest.raises(WorkerProtocolError, match="leases 3 steps; this worker accepts 2"):
        session.plan(3, 1, 3)
    session.plan(3, 1, 2)
    session.plan(3, 4)
    session.answer(1)
    with pytest.raises(WorkerProtocolError, match="2 plans are unfinished"):
        session.plan(3, 5)
    session.answer(2, 1)  # step 3 is not computed
    session.plan(3, 5)
    session.answer(4)
    session.answer(5)
    assert session.num_unfinished == 0

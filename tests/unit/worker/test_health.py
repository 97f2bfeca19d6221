from headrace.core.frames import EngineLoad, EngineStats
from headrace.worker.health import Health

LOAD = EngineLoad(1, 0, 0, 1, 1, 1, 0.0, 0.0)


def stats(age_s: float = 0.0, *, healthy: bool = True) -> EngineStats:
    return EngineStats(LOAD, 1, age_s, healthy, False, 0, 0, 0, 0, {}, 0, 0)


def fresh() -> Health:
    return Health(stall_timeout_s=10.0, exit_when_stuck_s=20.0, now=0.0)


def test_it_is_healthy_before_the_first_word() -> None:
    assert fresh().healthy


def test_a_long_step_is_healthy_up_to_the_limit() -> None:
    health = fresh()
    health.observe(1.0, stats(9.9))
    assert health.healthy
    health.observe(2.0, stats(10.0))
    assert not health.healthy
    assert "10.0 s" in (health.reason or "")


def test_the_engine_s_own_verdict_counts() -> None:
    health = fresh()
    health.observe(1.0, stats(healthy=False))

    assert not health.healthy


def test_an_engine_that_does_not_answer_is_unhealthy_after_the_limit() -> None:
    health = fresh()
    health.observe(9.9, None)
    assert health.healthy
    health.observe(10.0, None)
    assert not health.healthy


def test_an_answer_starts_the_time_anew() -> None:
    health = fresh()
    health.observe(9.0, stats())
    health.observe(18.9, None)

    assert health.healthy


def test_silence_does_not_cure() -> None:
    health = fresh()
    health.observe(1.0, stats(11.0))
    health.observe(2.0, None)

    assert not health.healthy


def test_it_is_stuck_for_good_after_being_unhealthy_for_long() -> None:
    health = fresh()
    health.observe(5.0, stats(10.0))
    assert not health.stuck_for_good(24.9)
    assert health.stuck_for_good(25.0)


def test_progress_in_between_starts_the_time_anew() -> None:
    health = fresh()
    health.observe(5.0, stats(10.0))
    health.observe(20.0, stats())
    health.observe(30.0, stats(10.0))

    assert not health.stuck_for_good(40.0)
    assert health.stuck_for_good(50.0)

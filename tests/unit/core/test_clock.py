import time

import pytest

from headrace.core.clock import ManualClock, SystemClock


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(5.0, epoch=1000.0)
    assert (clock.monotonic(), clock.wall()) == (5.0, 1005.0)

    clock.advance(2.5)

    assert (clock.monotonic(), clock.wall()) == (7.5, 1007.5)


def test_a_manual_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="back"):
        ManualClock().advance(-1.0)


def test_the_system_clock_is_the_machine_s() -> None:
    clock = SystemClock()

    assert time.monotonic() - clock.monotonic() < 1.0
    assert abs(time.time() - clock.wall()) < 1.0

from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.credit import share


@given(credit=st.integers(-5, 1000), num_clients=st.integers(1, 50), turn=st.integers(0, 10**6))
def test_shares_add_up_to_the_credit_and_are_even(credit: int, num_clients: int, turn: int) -> None:
    shares = [share(credit, num_clients, index, turn) for index in range(num_clients)]

    assert sum(shares) == max(0, credit)
    assert max(shares) - min(shares) <= 1


@given(credit=st.integers(1, 50), num_clients=st.integers(1, 50), turn=st.integers(0, 10**6))
def test_nobody_waits_longer_than_one_round_for_credit(credit: int, num_clients: int, turn: int) -> None:
    for index in range(num_clients):
        assert any(share(credit, num_clients, index, turn + later) > 0 for later in range(num_clients))

"""How an engine's credit is divided among a worker's clients. Pure."""


def share(credit: int, num_clients: int, index: int, turn: int) -> int:
    """The credit of client ``index`` of ``num_clients``.

    Shares differ by one at most and add up to ``credit``. Who gets one more moves on with ``turn``, so that when there
    is less credit than clients nobody waits for longer than ``num_clients`` turns.
    """
    if credit <= 0:
        return 0
    base, extra = divmod(credit, num_clients)
    return base + (1 if (index - turn) % num_clients < extra else 0)

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.core.frames import SequenceDelta
from headrace.core.requests import FinishReason
from headrace.worker.sequences import SequenceTable

CLIENTS = st.sampled_from(["one", "two", "three"])
# Ids that look like aliases are the ones that could confuse the table.
NAMES = st.sampled_from(["a", "b", "a#1", "a#2", "b#1"])


class TableMachine(RuleBasedStateMachine):
    """The table against a plain model: which engine id stands for whose sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table: SequenceTable[str] = SequenceTable()
        self.model: dict[str, tuple[str, str]] = {}

    def engine_id_of(self, client: str, name: str) -> str | None:
        return next((e for e, owner in self.model.items() if owner == (client, name)), None)

    @rule(client=CLIENTS, name=NAMES)
    def add(self, client: str, name: str) -> None:
        known = self.engine_id_of(client, name)
        engine_id = self.table.add(client, name)
        if known is not None:
            assert engine_id is None
            return
        assert engine_id is not None
        assert engine_id not in self.model
        if not any(owner_name == name for _, owner_name in self.model.values()) and "#" not in str(engine_id):
            assert engine_id == name
        self.model[engine_id] = (client, name)
        assert self.table.name_of(engine_id) == name

    @rule(client=CLIENTS, name=NAMES, ends=st.booleans())
    def speak(self, client: str, name: str, ends: bool) -> None:
        engine_id = self.engine_id_of(client, name)
        if engine_id is None:
            return
        finish = FinishReason.STOP if ends else None
        parts = self.table.split([SequenceDelta(engine_id, [1], finish=finish)])
        assert parts == {client: [SequenceDelta(name, [1], finish=finish)]}
        if ends:
            del self.model[engine_id]

    @rule(client=CLIENTS)
    def leave(self, client: str) -> None:
        theirs = {engine_id for engine_id, owner in self.model.items() if owner[0] == client}
        assert set(self.table.leave(client)) == theirs
        for engine_id in theirs:  # until they end in the engine, their ids are taken
            assert self.table.split([SequenceDelta(engine_id, finish=FinishReason.ABORT)]).keys() <= {client}
            del self.model[engine_id]

    @invariant()
    def everyone_finds_their_own(self) -> None:
        assert len(self.table) == len(self.model)
        for engine_id, (client, name) in self.model.items():
            assert self.table.find(client, name) == engine_id


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTable = TableMachine.TestCase


def test_deltas_of_unknown_sequences_are_dropped() -> None:
    table: SequenceTable[str] = SequenceTable()

    assert table.split([SequenceDelta("nobody's", [1])]) == {}


def test_the_id_of_a_sequence_whose_client_left_stays_taken() -> None:
    table: SequenceTable[str] = SequenceTable()
    table.add("gone", "a")
    table.leave("gone")

    assert table.add("new", "a") != "a"

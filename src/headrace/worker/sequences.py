"""Whose sequence is it: what the engine calls a sequence, and the client and name behind it."""

import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from headrace.core.frames import SequenceDelta
from headrace.core.ids import SequenceId

C = TypeVar("C")


class SequenceTable(Generic[C]):
    """Sequences in flight of all clients. Clients choose ids freely, and never see or reach another's.

    A sequence keeps its id in the engine unless another client uses the same one at this moment: then the engine knows
    it under an alias. So the common case costs no new object per token.
    """

    def __init__(self) -> None:
        self._owners: dict[SequenceId, tuple[C, SequenceId]] = {}
        self._engine_ids: dict[C, dict[SequenceId, SequenceId]] = {}
        self._aliases = itertools.count(1)

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, client: C, sequence_id: SequenceId) -> SequenceId | None:
        """The id under which the engine shall know the sequence; None if the client has such a one in flight."""
        own = self._engine_ids.setdefault(client, {})
        if sequence_id in own:
            return None
        engine_id = sequence_id
        while engine_id in self._owners:
            engine_id = SequenceId(f"{sequence_id}#{next(self._aliases)}")
        own[sequence_id] = engine_id
        self._owners[engine_id] = (client, sequence_id)
        return engine_id

    def find(self, client: C, sequence_id: SequenceId) -> SequenceId | None:
        """What the engine calls a client's sequence; None if the client has no such one."""
        return self._engine_ids.get(client, {}).get(sequence_id)

    def name_of(self, engine_id: SequenceId) -> SequenceId:
        """The client's own id of a sequence in flight."""
        return self._owners[engine_id][1]

    def discard(self, engine_id: SequenceId) -> None:
        """Forget a sequence that has ended."""
        owner = self._owners.pop(engine_id, None)
        if owner is not None:
            self._engine_ids.get(owner[0], {}).pop(owner[1], None)

    def leave(self, client: C) -> list[SequenceId]:
        """Forget a client. Its sequences keep their ids in the engine, which these are, until they end there."""
        return list(self._engine_ids.pop(client, {}).values())

    def split(self, deltas: Iterable[SequenceDelta]) -> dict[C, list[SequenceDelta]]:
        """Deltas by client, under the clients' own ids. Ended sequences are forgotten.

        Clients that have left may be among the keys.
        """
        owners = self._owners
        parts: dict[C, list[SequenceDelta]] = {}
        for delta in deltas:
            owner = owners.get(delta.sequence_id)
            if owner is None:
                continue
            client, sequence_id = owner
            if delta.finish is not None:
                self.discard(delta.sequence_id)
            if sequence_id != delta.sequence_id:
                delta = msgspec.structs.replace(delta, sequence_id=sequence_id)
            parts.setdefault(client, []).append(delta)
        return parts

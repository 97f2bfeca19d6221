"""A batching engine, near or far: the worker hosts one, and the dispatcher sees each worker as one."""

from collections.abc import AsyncIterator
from typing import Protocol

from headrace.core.frames import EngineDescription, EngineLoad, EngineStats, StepFrame
from headrace.core.ids import SequenceId
from headrace.core.requests import GenerationRequest


class Engine(Protocol):
    """Token ids in, token ids out, many sequences at once.

    Every accepted sequence ends with exactly one delta whose ``finish`` is set, unless :meth:`frames` itself ends or
    raises: then all sequences in flight are lost, and nothing more is said of them.

    All methods are called from one event loop and none blocks it.
    """

    def describe(self) -> EngineDescription:
        """What does not change while the engine lives."""
        ...

    def load(self) -> EngineLoad:
        """The latest load, ``credit`` corrected for what was submitted since. Cheap."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Take one sequence; its deltas appear in :meth:`frames`.

        Raises:
            Overloaded: no credit. Nothing was taken.
            Draining: :meth:`drain` was called.
            EngineDead: the engine, or the way to it, is gone.
            InvalidRequest: the request can never be served (empty prompt, longer than ``max_model_len``, a token id
                outside the vocabulary, a ``sequence_id`` in flight). A far engine may report this later instead, as a
                delta with ``FinishReason.ERROR``.
        """
        ...

    def abort(self, sequence_id: SequenceId) -> None:
        """End a sequence early; within two steps its last delta says ``FinishReason.ABORT``.

        Unknown and finished sequences are ignored; it never raises.
        """
        ...

    def frames(self) -> AsyncIterator[StepFrame]:
        """Frames as steps finish; one consumer. Ends after :meth:`close`.

        Raises:
            EngineDead: when the engine dies or the way to it is lost.
        """
        ...

    async def stats(self) -> EngineStats:
        """Counters and health; answers while the engine is busy or stuck.

        Raises:
            EngineDead: the way to the engine is lost.
        """
        ...

    async def drain(self) -> None:
        """Refuse new sequences and return when the present ones have ended. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop now; sequences in flight are lost. Idempotent."""
        ...

"""Which tokens are computed in the next step, and in which blocks: state in, plan out, no clock, no tensors.

Each step has a budget of tokens. Sequences that run come first (single tokens before chunks of prompts, so that a long
prompt never holds up the others), then waiting ones in the order of arrival. A waiting sequence is admitted when all
blocks of its present tokens can be had, so prompts are never preempted half-way for lack of blocks that were promised.

When blocks run out, running sequences of the lowest class, youngest first, lose theirs and wait again at their old
place in the order; their tokens are kept and computed anew. The oldest of the most urgent never loses anything and
a sequence that lost its blocks a few times counts as most urgent, so every admitted sequence gets to its end.

A waiting sequence whose next full block of prompt is being computed by a running one waits for that block instead of
computing it again: a burst of requests with one system prompt computes it once. It holds nobody up meanwhile.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from headrace.core.errors import AuditFailed
from headrace.engine.blocks import BlockPool
from headrace.engine.prefix import PrefixCache, extend_chain
from headrace.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may take."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """At least ``max_num_seqs``."""
    prefix_cache: bool = True


class Work(NamedTuple):
    """``num_tokens`` tokens of a sequence, from ``sequence.num_computed`` on."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    """Whether these are its last known tokens, so that the next one can be sampled."""


@dataclass(slots=True)
class Plan:
    """One step."""

    work: list[Work] = field(default_factory=list)
    """Single tokens first, then chunks."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that got a slot in this plan."""
    num_preempted: int = 0


class Scheduler:
    """Waiting and running sequences, their blocks and slots. Every sequence that was added must be removed once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._prefix = PrefixCache()
        self._pool = BlockPool(limits.num_blocks, self._prefix.forget)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._computing: dict[bytes, Sequence] = {}
        """Full blocks that running sequences are about to compute, by name."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_queued_tokens(self) -> int:
        """Tokens known and not computed, decoding sequences' newest left out."""
        return sum(sequence.num_uncomputed - 1 for sequence in self.sequences())

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, running ones first."""
        return chain(self._running, self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, which must fit into the blocks at its longest (see ``admission``)."""
        if self.limits.prefix_cache:
            self._extend_hashes(sequence)
        insort(self._waiting, sequence, key=_order)

    def remove(self, sequence: Sequence, *, reusable: bool = True) -> None:
        """Forget a sequence, finished or not; its blocks and slot are free again.

        ``reusable``: whether later prompts may start from what its blocks hold.
        """
        if not reusable:
            for block in sequence.blocks:
                self._prefix.forget(block)
        if sequence.slot >= 0:
            self._running.remove(sequence)
            self._vacate(sequence)
        else:
            self._waiting.remove(sequence)

    def schedule(self) -> Plan:
        """The next step's work; blocks and slots for it are taken. Empty if and only if no sequence is left."""
        plan = Plan()
        self._grow(plan)
        budget = self.limits.max_num_batched_tokens
        chunks = []
        for sequence in self._running:
            if sequence.num_uncomputed == 1:
                plan.work.append(Work(sequence, 1, samples=True))
                budget -= 1
            else:
                chunks.append(sequence)
        for sequence in chunks:
            budget -= self._plan_chunk(plan, sequence, budget)
        if self._waiting and self._slots and budget > 0 and plan.num_preempted == 0:
            self._admit(plan, budget)
        return plan

    def commit(self, work: Work) -> None:
        """The work was done: its tokens are in the cache, and full blocks can be shared."""
        sequence = work.sequence
        sequence.num_computed += work.num_tokens
        if not self.limits.prefix_cache:
            return
        num_full = sequence.num_computed // self.limits.block_size
        if num_full == sequence.num_registered:
            return
        self._extend_hashes(sequence)
        for index in range(sequence.num_registered, num_full):
            name = sequence.hashes[index]
            self._prefix.register(name, sequence.blocks[index])
            if self._computing.get(name) is sequence:
                del self._computing[name]
        sequence.num_registered = num_full

    def audit(self) -> None:
        """Check that blocks, slots and marks belong exactly to the running sequences.

        Raises:
            AuditFailed: something was not given back, or was given back twice.
        """
        self._pool.audit([sequence.blocks for sequence in self.sequences()])
        slots = sorted([*self._slots, *(sequence.slot for sequence in self._running)])
        if slots != list(range(self.limits.max_num_seqs)):
            raise AuditFailed(f"slots do not add up: {len(self._slots)} free, {len(self._running)} running")
        running = set(map(id, self._running))
        if any(id(sequence) not in running for sequence in self._computing.values()):
            raise AuditFailed("a block is marked as being computed by a sequence that does not run")

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _extend_hashes(self, sequence: Sequence) -> None:
        extend_chain(sequence.hashes, sequence.tokens, sequence.request.cache_salt, self.limits.block_size)

    def _plan_chunk(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_uncomputed, budget)
        if count > 0:
            plan.work.append(Work(sequence, count, samples=count == sequence.num_uncomputed))
        return count

    def _grow(self, plan: Plan) -> None:
        """Give every running sequence a block for its newest token, at the cost of the least urgent if need be."""
        block_size = self.limits.block_size
        growing = [s for s in self._running if len(s.tokens) > len(s.blocks) * block_size]
        if len(growing) <= self._pool.num_free:
            for sequence in growing:
                sequence.blocks += self._pool.allocate(1)
            return
        by_rank = sorted(self._running, key=_rank)
        for sequence in sorted(growing, key=_rank):
            # From the most urgent down: whoever loses its blocks comes later in this loop or is not growing.
            while sequence.slot >= 0 and self._pool.num_free == 0:
                self._preempt(by_rank.pop())
                plan.num_preempted += 1
            if sequence.slot >= 0:
                sequence.blocks += self._pool.allocate(1)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._vacate(sequence)
        sequence.num_preemptions += 1
        insort(self._waiting, sequence, key=_order)

    def _vacate(self, sequence: Sequence) -> None:
        for name in sequence.hashes[sequence.num_registered :]:
            if self._computing.get(name) is sequence:
                del self._computing[name]
        self._pool.release(sequence.blocks, self._prefix.holds)
        self._slots.append(sequence.slot)
        sequence.blocks = []
        sequence.slot = -1
        sequence.num_computed = sequence.num_registered = 0

    def _admit(self, plan: Plan, budget: int) -> None:
        left = []
        queue = iter(self._waiting)
        for sequence in queue:
            hits = self._shared_blocks(sequence)
            if hits is None:
                left.append(sequence)
                continue
            if budget <= 0 or not self._slots or not self._room_for(sequence, hits):
                left.append(sequence)
                break
            self._start(sequence, hits)
            plan.admitted.append(sequence)
            budget -= self._plan_chunk(plan, sequence, budget)
        self._waiting = [*left, *queue]

    def _shared_blocks(self, sequence: Sequence) -> list[int] | None:
        """Blocks the sequence can start from; None if it should wait for one that is being computed."""
        if not self.limits.prefix_cache:
            return []
        if sequence.waits_for is not None and sequence.waits_for in self._computing:
            return None
        sequence.waits_for = None
        # The last token is always computed, for its logits; so the block that holds it is never shared.
        names = sequence.hashes[: (len(sequence.tokens) - 1) // self.limits.block_size]
        hits = self._prefix.lookup(names)
        if len(hits) < len(names) and names[len(hits)] in self._computing:
            sequence.waits_for = names[len(hits)]
            return None
        return hits

    def _room_for(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether all its blocks can be had, with one to spare for each running sequence to grow into."""
        free = self._pool.num_free - sum(map(self._pool.is_free, hits))
        return self._blocks_for(len(sequence.tokens)) - len(hits) + len(self._running) <= free

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        self._pool.share(hits)
        sequence.blocks = hits + self._pool.allocate(self._blocks_for(len(sequence.tokens)) - len(hits))
        sequence.num_computed = len(hits) * self.limits.block_size
        sequence.num_registered = len(hits)
        if sequence.first_step_s is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.prompt_len)
        sequence.slot = self._slots.pop()
        self._running.append(sequence)
        if self.limits.prefix_cache:
            for name in sequence.hashes[len(hits) :]:
                self._computing.setdefault(name, sequence)


def _order(sequence: Sequence) -> int:
    return sequence.order


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank

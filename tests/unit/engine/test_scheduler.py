"""Random arrivals, tokens, ends and aborts against the promises that the scheduler makes."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import GenerationRequest, ServiceClass, StopConditions
from headrace.engine.scheduler import Limits, Scheduler
from headrace.engine.sequence import Sequence


class SchedulerMachine(RuleBasedStateMachine):
    """Steps a scheduler as the core does. A cell is one token's place in one block; ``cells`` is what was written."""

    @initialize(
        num_blocks=st.integers(4, 24),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        prefix_cache=st.booleans(),
    )
    def begin(self, num_blocks, max_num_seqs, extra_budget, prefix_cache):
        self.limits = Limits(num_blocks, 4, max_num_seqs, max_num_seqs + extra_budget, prefix_cache)
        self.scheduler = Scheduler(self.limits)
        self.live: dict[int, tuple[Sequence, int]] = {}
        self.admitted_order: list[int] = []
        self.cells: dict[tuple[int, int], int] = {}
        self.count = 0
        self.steps = 0

    @rule(
        stem=st.sampled_from([0, 0, 1, 2]),
        length=st.integers(1, 40),
        output=st.integers(1, 30),
        service_class=st.sampled_from(ServiceClass),
        salt=st.sampled_from(["", "", "other"]),
    )
    def add(self, stem, length, output, service_class, salt):
        longest = self.limits.num_blocks * self.limits.block_size
        length = min(length, longest)
        output = min(output, longest - length + 1)
        # Few stems, so that prompts often begin alike.
        prompt = [stem * 1000 + i for i in range(length)]
        request = GenerationRequest(
            SequenceId(str(self.count)),
            TenantId("t"),
            prompt,
            StopConditions(output),
            service_class=service_class,
            cache_salt=salt,
        )
        sequence = Sequence(request, self.count, 0.0)
        self.scheduler.add(sequence)
        self.live[self.count] = (sequence, output)
        self.count += 1

    @rule(data=st.data())
    def abort(self, data):
        if self.live:
            self.end(data.draw(st.sampled_from(sorted(self.live))), reusable=data.draw(st.booleans()))

    @rule(num_steps=st.integers(1, 8))
    def steps_pass(self, num_steps):
        for _ in range(num_steps):
            self.step()

    def end(self, order, *, reusable=True):
        sequence, _ = self.live.pop(order)
        self.scheduler.remove(sequence, reusable=reusable)

    def step(self):
        waiting_before = [s for s in self.scheduler.sequences() if s.slot < 0]
        plan = self.scheduler.schedule()
        self.scheduler.audit()
        assert bool(plan.work) == bool(self.live), "while anything is left, something is computed"
        assert sum(work.num_tokens for work in plan.work) <= self.limits.max_num_batched_tokens
        assert len(plan.work) <= self.limits.max_num_seqs
        assert len({work.sequence.slot for work in plan.work}) == len(plan.work)
        self.check_order(plan, waiting_before)
        for work in plan.work:
            self.compute(work)
        for work in plan.work:
            self.scheduler.commit(work)
            if work.samples:
                self.sample(work.sequence)
        self.steps += 1

    def check_order(self, plan, waiting_before):
        """Nobody overtakes, except those who let others pass because a block of theirs is being computed."""
        if not plan.admitted:
            return
        last = max(sequence.order for sequence in plan.admitted)
        for sequence in waiting_before:
            if sequence.slot < 0 and sequence.order < last:
                assert sequence.waits_for is not None

    def compute(self, work):
        sequence = work.sequence
        size = self.limits.block_size
        end = sequence.num_computed + work.num_tokens
        assert 0 < work.num_tokens <= sequence.num_uncomputed
        assert work.samples == (end == len(sequence.tokens))
        written = [(sequence.blocks[p // size], p % size) for p in range(sequence.num_computed, end)]
        holders = [s for s, _ in self.live.values() if s is not sequence]
        for block, _ in written:
            assert all(block not in other.blocks for other in holders), "a shared block is written"
        self.cells |= dict(zip(written, self.content(sequence)[sequence.num_computed : end], strict=True))
        found = [self.cells.get((sequence.blocks[p // size], p % size)) for p in range(end)]
        assert found == self.content(sequence)[:end], "the cache does not hold the sequence's own past"

    def content(self, sequence):
        return [(sequence.request.cache_salt, tuple(sequence.tokens[: p + 1])) for p in range(len(sequence.tokens))]

    def sample(self, sequence):
        sequence.tokens.append(5000 + len(sequence.tokens))
        if sequence.num_generated >= self.live[sequence.order][1]:
            self.end(sequence.order)

    @invariant()
    def nothing_is_owned_by_nobody(self):
        if hasattr(self, "scheduler"):
            self.scheduler.audit()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Everyone gets to the end in a bounded number of steps: at worst one after the other, each computed anew a
        # few times.
        work = sum(len(s.tokens) + output for s, output in self.live.values())
        for _ in range(20 + 20 * work):
            if not self.live:
                break
            self.step()
        assert not self.live, "a sequence starves"
        self.scheduler.audit()
        assert self.scheduler.num_free_blocks == self.limits.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestScheduler = SchedulerMachine.TestCase

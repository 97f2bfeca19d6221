"""The engine without threads: add, abort, step. Everything happens in the caller's thread, at the caller's pace."""

import traceback

import structlog

from headrace.core.clock import Clock
from headrace.core.errors import AuditFailed, InvalidRequest
from headrace.core.frames import EngineLoad, EngineStats, SequenceDelta, StepFrame, TokenLogprobs
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import FinishReason, GenerationRequest
from headrace.engine.admission import Admission
from headrace.engine.meter import Meter
from headrace.engine.runner import ModelRunner
from headrace.engine.sampler import Sampled
from headrace.engine.scheduler import Limits, Plan, Scheduler, Work
from headrace.engine.sequence import Sequence

_log = structlog.get_logger(__name__)

UNBOUNDED = 1 << 31
FAILED_MESSAGE = "the engine failed while it computed this sequence"
_BROKEN_MESSAGE = "the model's output for this sequence was not a number"


class EngineCore:
    """Continuous batching of one model: each :meth:`step` computes one batch and returns one frame."""

    def __init__(
        self, runner: ModelRunner, limits: Limits, admission: Admission, clock: Clock, *, capacity: int = UNBOUNDED
    ) -> None:
        """``capacity``: sequences in flight at most, which the load's credit counts down; :meth:`add` takes any."""
        self.admission = admission
        self.meter = Meter()
        self.num_failed_steps = 0
        """Steps in a row of which nothing succeeded."""
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._capacity = capacity
        self._scheduler = Scheduler(limits)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._num_added = 0
        self._deltas: list[SequenceDelta] = []
        """What the next frame has to say besides the step's own."""

    @property
    def has_work(self) -> bool:
        """Whether sequences are in flight."""
        return bool(self._sequences)

    @property
    def has_news(self) -> bool:
        """Whether :meth:`step` would return something: there is work, or a delta not told yet."""
        return bool(self._sequences or self._deltas)

    def add(self, request: GenerationRequest, arrival_s: float | None = None) -> None:
        """Queue a sequence. ``arrival_s``: when it was submitted, on the engine's clock; now if None.

        Raises:
            InvalidRequest: it can never be served, or its id is in flight.
        """
        self.admission.check(request)
        if request.sequence_id in self._sequences:
            raise InvalidRequest(f"sequence {request.sequence_id} is in flight already", param="sequence_id")
        now = self._clock.monotonic() if arrival_s is None else arrival_s
        sequence = Sequence(request, self._num_added, now)
        self._num_added += 1
        # Known before it is queued, so that a failure in between is told like any other.
        self._sequences[request.sequence_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, sequence_id: SequenceId) -> None:
        """End a sequence now; the next frame says so. Unknown ones are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def step(self) -> StepFrame:
        """Compute one batch, if there is work, and tell what came of it.

        A failure of the model ends only the sequences that it fails for when run by themselves.
        """
        service: dict[TenantId, int] = {}
        if self._sequences:
            start = self._clock.monotonic()
            plan = self._scheduler.schedule()
            self._count_plan(plan, start)
            for sequence in plan.admitted:
                self._runner.place(sequence)
            outcomes = self._run(plan.work)
            now = self._clock.monotonic()
            for work, sampled, row in outcomes:
                tenant_id = work.sequence.request.tenant_id
                service[tenant_id] = service.get(tenant_id, 0) + work.num_tokens
                self._apply(work, sampled, row, now)
            self.meter.step += 1
            self.meter.measured(plan.work, now - start)
        deltas, self._deltas = self._deltas, []
        return StepFrame(self.meter.step, deltas, self.load(), service)

    def fail_all(self, message: str) -> None:
        """End every sequence with an error and start from empty blocks, whatever state they are in."""
        self.num_failed_steps += 1
        for sequence in self._sequences.values():
            self._tell_end(sequence, FinishReason.ERROR, error=message)
        self._sequences.clear()
        self._scheduler = Scheduler(self._limits)

    def audit(self) -> None:
        """Check that blocks and slots belong exactly to the sequences in flight, and none to nobody.

        Raises:
            AuditFailed: something leaked, or was given back twice.
        """
        self._scheduler.audit()

    def forget_history(self) -> None:
        """Empty the prefix cache and the counters, and keep the measured speeds: warm-up is nobody's work.

        Raises:
            AuditFailed: sequences are in flight.
        """
        if self._sequences:
            raise AuditFailed(f"{len(self._sequences)} sequences are in flight; their history is still needed")
        self._scheduler = Scheduler(self._limits)
        self.meter = Meter(prefill_tokens_per_s=self.meter.prefill_tokens_per_s, step_s=self.meter.step_s)

    def load(self) -> EngineLoad:
        """The present load."""
        scheduler = self._scheduler
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_free_blocks=scheduler.num_free_blocks,
            num_blocks=self._limits.num_blocks,
            credit=max(0, self._capacity - len(self._sequences)),
            prefill_tokens_per_s=self.meter.prefill_tokens_per_s,
            step_s=self.meter.step_s,
        )

    def stats(self, memory: dict[str, int] | None = None) -> EngineStats:
        """Counters now; health is for whoever drives the steps to judge."""
        meter = self.meter
        load = self.load()
        return EngineStats(
            load=load,
            step=meter.step,
            last_progress_age_s=0.0,
            healthy=True,
            draining=False,
            num_prompt_tokens=meter.num_prompt_tokens,
            num_cached_prompt_tokens=meter.num_cached_prompt_tokens,
            num_generated_tokens=meter.num_generated_tokens,
            num_preemptions=meter.num_preemptions,
            num_finished={str(reason): count for reason, count in meter.num_finished.items()},
            num_prefix_queries=meter.num_prefix_queries,
            blocks_in_use=load.num_blocks - load.num_free_blocks,
            memory=memory or {},
        )

    def _count_plan(self, plan: Plan, now: float) -> None:
        meter = self.meter
        meter.num_preemptions += plan.num_preempted
        for sequence in plan.admitted:
            if sequence.first_step_s is None:
                sequence.first_step_s = now
                meter.num_prompt_tokens += sequence.prompt_len
                meter.num_cached_prompt_tokens += sequence.num_cached_tokens
                meter.num_prefix_queries += sequence.prompt_len if self._limits.prefix_cache else 0

    def _run(self, work: list[Work]) -> list[tuple[Work, Sampled, int]]:
        """Run a step; for each piece of work that succeeded its results, and its row in them (-1: it sampled none)."""
        try:
            outcomes = _with_rows(work, self._runner.run(work))
        except Exception as error:  # noqa: BLE001 -- whatever a kernel raises, the engine goes on without its victims
            _log.error("engine step failed", num_seqs=len(work), error=describe(error))
            outcomes = self._run_one_by_one(work) if len(work) > 1 else []
        succeeded = {id(item.sequence) for item, _, _ in outcomes}
        for item in work:
            if id(item.sequence) not in succeeded:
                self._finish(item.sequence, FinishReason.ERROR, error=FAILED_MESSAGE)
        self.num_failed_steps = 0 if outcomes else self.num_failed_steps + 1
        return outcomes

    def _run_one_by_one(self, work: list[Work]) -> list[tuple[Work, Sampled, int]]:
        """After a failed step: who fails alone is to blame, the others go on."""
        outcomes = []
        for item in work:
            try:
                outcomes += _with_rows([item], self._runner.run([item]))
            except Exception as error:  # noqa: BLE001 -- as in _run
                _log.error("sequence failed alone", sequence_id=item.sequence.request.sequence_id, error=repr(error))
        return outcomes

    def _apply(self, work: Work, sampled: Sampled, row: int, now: float) -> None:
        sequence = work.sequence
        if row in sampled.broken_rows:
            self._finish(sequence, FinishReason.ERROR, error=_BROKEN_MESSAGE)
            return
        self._scheduler.commit(work)
        if row < 0:
            return
        token_id = sampled.token_ids[row]
        logprobs = [entry] if (entry := sampled.logprobs.get(row)) is not None else []
        sequence.tokens.append(token_id)
        self.meter.num_generated_tokens += 1
        sequence.last_token_s = now
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        finish = self._finish_reason(sequence, token_id)
        if finish is not None:
            self._finish(sequence, finish, [token_id], logprobs)
        else:
            self._runner.append(sequence)
            self._deltas.append(SequenceDelta(sequence.request.sequence_id, [token_id], logprobs))

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        stop = sequence.request.stop
        if token_id in stop.stop_token_ids:
            return FinishReason.STOP
        if sequence.num_generated >= stop.max_tokens or len(sequence.tokens) >= self.admission.max_model_len:
            return FinishReason.LENGTH
        return None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> None:
        del self._sequences[sequence.request.sequence_id]
        # What a failed sequence left in its blocks is in doubt, so nobody else shall start from it.
        self._scheduler.remove(sequence, reusable=reason is not FinishReason.ERROR)
        self._tell_end(sequence, reason, token_ids, logprobs, error)

    def _tell_end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> None:
        self.meter.num_finished[reason] += 1
        timing = sequence.timing(self._clock.monotonic())
        self._deltas.append(
            SequenceDelta(sequence.request.sequence_id, token_ids or [], logprobs or [], reason, error, timing)
        )


def describe(error: BaseException) -> str:
    """The error and its traceback as text: without local variables, which hold tenants' tokens."""
    return "".join(traceback.format_exception(error))


def _with_rows(work: list[Work], sampled: Sampled) -> list[tuple[Work, Sampled, int]]:
    outcomes = []
    row = 0
    for item in work:
        outcomes.append((item, sampled, row if item.samples else -1))
        row += item.samples
    return outcomes

"""Driving an engine's synchronous core through the offline workload."""

import time
from collections.abc import Callable
from typing import Protocol

from headrace.bench.workload import Job, RoundTimes, Workload
from headrace.core.errors import InternalError
from headrace.core.frames import StepFrame
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import FinishReason, GenerationRequest, SamplingParams, StopConditions

TENANT = TenantId("bench")


class Core(Protocol):
    """What the benchmark needs of an engine: :class:`headrace.engine.core.EngineCore` has it."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: GenerationRequest) -> None: ...

    def step(self) -> StepFrame: ...


def requests_of(job: Job, prefix: str) -> list[GenerationRequest]:
    """The job's prompts as greedy requests that only their length ends."""
    return [
        GenerationRequest(
            sequence_id=SequenceId(f"{prefix}/{job.name}/{index}"),
            tenant_id=TENANT,
            prompt=prompt,
            stop=StopConditions(max_tokens=job.output_tokens),
            sampling=SamplingParams(temperature=0.0),
        )
        for index, prompt in enumerate(job.prompts)
    ]


def generate(core: Core, requests: list[GenerationRequest]) -> list[list[int]]:
    """Submit all requests at once and step until none is left.

    Returns:
        The output token ids, in the order of ``requests``.

    Raises:
        InternalError: a sequence ended in any other way than by length or stop token, or the engine went idle early.
    """
    outputs: dict[SequenceId, list[int]] = {request.sequence_id: [] for request in requests}
    for request in requests:
        core.add(request)
    num_left = len(requests)
    while core.has_work:
        for delta in core.step().deltas:
            outputs[delta.sequence_id] += delta.token_ids
            if delta.finish is None:
                continue
            num_left -= 1
            if delta.finish not in (FinishReason.LENGTH, FinishReason.STOP):
                raise InternalError(f"sequence {delta.sequence_id} ended by {delta.finish}: {delta.error}")
    if num_left:
        raise InternalError(f"the engine has no work, but {num_left} sequences have not ended")
    return [outputs[request.sequence_id] for request in requests]


def time_round(
    core: Core, workload: Workload, round_number: int, on_job: Callable[[Job, float], None] | None = None
) -> RoundTimes:
    """Run the jobs of a round one after another.

    Raises:
        InternalError: an answer has not the length that was asked for.
    """
    times: dict[str, float] = {}
    for job in workload.jobs(round_number):
        requests = requests_of(job, prefix=str(round_number))
        start = time.perf_counter()
        outputs = generate(core, requests)
        times[job.name] = time.perf_counter() - start
        if any(len(output) != job.output_tokens for output in outputs):
            raise InternalError(f"job {job.name}: an answer has not {job.output_tokens} tokens")
        if on_job is not None:
            on_job(job, times[job.name])
    return RoundTimes(**times)

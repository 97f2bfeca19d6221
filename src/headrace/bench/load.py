"""Sending requests on schedule: open loop (the schedule does not wait for answers) and closed loop."""

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from headrace.bench.client import ClientOptions, RequestPlan, RequestRecord, send

OnRecord = Callable[[RequestRecord], None]


class LoadResult(msgspec.Struct, frozen=True):
    """Every request of one level of load."""

    start: float
    """When the schedule began, on the monotonic clock."""
    records: list[RequestRecord]


async def open_loop(
    session: aiohttp.ClientSession,
    options: ClientOptions,
    plans: Sequence[RequestPlan],
    *,
    max_in_flight: int,
    max_duration_s: float,
    on_record: OnRecord,
) -> LoadResult:
    """Send each plan at its time, whether or not earlier answers have come.

    Above ``max_in_flight`` a request waits; since latency counts from the intended time, the wait shows in it and in
    the lateness, and no slow answer hides behind a request that was never sent. What has not ended after
    ``max_duration_s`` is cut off and recorded as ``unfinished``; what was never sent, as ``not_sent``.

    Returns:
        One record for each plan, in their order.
    """
    room = asyncio.Semaphore(max_in_flight)
    start = time.monotonic()
    deadline = start + max_duration_s

    async def one(plan: RequestPlan) -> RequestRecord:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.sleep(start + plan.at_s - time.monotonic())
                await room.acquire()
        except TimeoutError:
            return _cut_off(plan, start, "not_sent")
        try:
            return await _send_until(session, options, plan, start, deadline)
        finally:
            room.release()

    async def one_recorded(plan: RequestPlan) -> RequestRecord:
        record = await one(plan)
        on_record(record)
        return record

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one_recorded(plan)) for plan in plans]
    return LoadResult(start, [task.result() for task in running])


async def closed_loop(
    session: aiohttp.ClientSession,
    options: ClientOptions,
    plans: Sequence[RequestPlan],
    *,
    concurrency: int,
    max_duration_s: float,
    on_record: OnRecord,
) -> LoadResult:
    """Keep ``concurrency`` requests in flight: each of that many users sends its next when its last has ended.

    The plans' times are ignored; a request's intended time is the moment its user became free. Cut off as in
    :func:`open_loop`.

    Returns:
        One record for each plan, in the order in which they ended.
    """
    start = time.monotonic()
    deadline = start + max_duration_s
    queue = iter(plans)
    records: list[RequestRecord] = []

    async def user() -> None:
        for plan in queue:
            now = time.monotonic()
            if now >= deadline:
                record = _cut_off(plan, now - plan.at_s, "not_sent")
            else:
                record = await _send_until(session, options, plan, now - plan.at_s, deadline)
            records.append(record)
            on_record(record)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(plans))):
            tasks.create_task(user())
    return LoadResult(start, records)


async def _send_until(
    session: aiohttp.ClientSession, options: ClientOptions, plan: RequestPlan, start: float, deadline: float
) -> RequestRecord:
    sent_at = time.monotonic()
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await send(session, options, plan, start=start)
    except TimeoutError:
        record = _cut_off(plan, start, "unfinished")
        record.sent_at = sent_at
        return record


def _cut_off(plan: RequestPlan, start: float, error: str) -> RequestRecord:
    now = time.monotonic()
    return RequestRecord(
        prompt_tokens=plan.prompt_tokens,
        asked_output_tokens=plan.output_tokens,
        error=error,
        intended_at=start + plan.at_s,
        sent_at=now,
        finished_at=now,
    )

"""A client that leaves: a 4,000-token request dropped after one second, streaming and not.

    .venv/bin/python benchmarks/disconnect.py [--repeats 3]

Counts the engine's steps from the moment the connection was closed until the worker runs nothing, and checks that
every KV block came back.
"""

import asyncio
import time

import aiohttp
import msgspec

import harness
from headrace.bench.prompts import random_token_ids

TARGET_STEPS = 2
POLL_S = 0.002
STEP = "headrace_worker_step"


class Drop(msgspec.Struct, frozen=True):
    """One request that was dropped."""

    stream: bool
    steps: int
    """From the last look at the worker before the connection was closed until nothing runs: an upper bound, since a
    step may have ended between that look and the closing."""
    steps_after: int
    """The same from the first look after the closing: a lower bound."""
    seconds: float
    leaks: list[str]


async def drop(platform: harness.Platform, *, stream: bool, after_s: float, seed: int) -> Drop:
    """Send, leave after ``after_s``, watch the worker."""
    client = platform.client()
    body = {
        "model": client.model,
        "prompt": random_token_ids(32, vocab_size=32_000, seed=f"disconnect/{seed}/{stream}"),
        "max_tokens": 4000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as session:
        answer = asyncio.create_task(_read(session, f"{client.base_url}/completions", body))
        await asyncio.wait([answer], timeout=after_s)
        if answer.done():
            raise SystemExit(f"the request ended within {after_s} s, before anyone could leave: {answer.result()}")
        before = await asyncio.to_thread(platform.worker_metrics)
        running = harness.find_metric(before, harness.RUNNING)
        if running != 1:
            raise SystemExit(f"{running:g} requests run before the disconnect; expected 1")
        # Cancelling closes the socket, as a client does that is killed.
        answer.cancel()
        await asyncio.wait([answer])
    start = time.monotonic()
    return await asyncio.to_thread(_watch, platform, stream, start, harness.find_metric(before, STEP))


def _watch(platform: harness.Platform, stream: bool, start: float, step_before: float) -> Drop:
    metrics = platform.worker_metrics()
    first_step = harness.find_metric(metrics, STEP)
    while harness.find_metric(metrics, harness.RUNNING) > 0:
        if time.monotonic() - start > 60:
            raise SystemExit("the worker still computes for a client that left 60 s ago")
        time.sleep(POLL_S)
        metrics = platform.worker_metrics()
    seconds = time.monotonic() - start
    last_step = harness.find_metric(metrics, STEP)
    return Drop(stream, round(last_step - step_before), round(last_step - first_step), seconds, platform.leaks())


async def _read(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> str:
    async with session.post(url, json=body) as response:
        text = await response.text()
        return f"{response.status}: {text[-300:]}"


async def drops(platform: harness.Platform, repeats: int, after_s: float) -> list[Drop]:
    return [
        await drop(platform, stream=stream, after_s=after_s, seed=repeat)
        for repeat in range(repeats)
        for stream in (True, False)
    ]


def main() -> None:
    arguments = harness.parser(__doc__)
    harness.add_model_dir(arguments)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--after", type=float, default=1.0, help="seconds until the client leaves")
    chosen = arguments.parse_args()
    with harness.platform("--model", str(harness.model_dir(chosen.model_dir))) as platform:
        found = asyncio.run(drops(platform, chosen.repeats, chosen.after))
        healthy = harness.find_metric(platform.worker_metrics(), "headrace_worker_healthy") == 1
    harness.save("disconnect", found)
    rows = []
    for stream, name in ((True, "streaming"), (False, "not streaming")):
        worst = max(one.steps for one in found if one.stream == stream)
        slowest = max(one.seconds for one in found if one.stream == stream)
        least = max(one.steps_after for one in found if one.stream == stream)
        rows.append((f"{name}: steps until idle", f"{least} to {worst}", f"≤ {TARGET_STEPS}", worst <= TARGET_STEPS))
        rows.append((f"{name}: milliseconds until idle", f"{slowest * 1000:.0f}", "", None))
    leaks = sorted({leak for one in found for leak in one.leaks})
    rows.append(("held when idle", ", ".join(leaks) or "nothing", "nothing", not leaks))
    rows.append(("worker healthy", str(healthy), "True", healthy))
    harness.finish("disconnect", rows)


if __name__ == "__main__":
    main()

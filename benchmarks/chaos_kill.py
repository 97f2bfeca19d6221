"""kill -9 of the worker, the gateway and PostgreSQL, one at a time, under load.

    .venv/bin/python benchmarks/chaos_kill.py [--rounds 2] [--users 8]

Users send short streaming requests in a closed loop the whole time. For each victim: how requests ended, how soon
after the kill a request that was sent after it succeeded, whether any request hung, and whether, once the load stops,
anything is still held or any process was left behind.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter

import aiohttp
import msgspec
import psutil

import harness
from headrace.bench.client import RequestPlan, RequestRecord, send
from headrace.bench.prompts import random_token_ids

VICTIMS = ("worker-0", "gateway-0", "postgres")
TIMEOUT_S = 60.0
RECOVERY_LIMIT_S = 60.0
PAUSE_S = 0.05
"""Between a failure and a user's next request, as a client with a small backoff would."""

HONEST = {
    "worker-0": ("http_503:", "stream_error:worker_lost", "stream_error:unavailable"),
    # Nobody is left to say anything: a refused or broken connection is all that a client can see.
    "gateway-0": ("connect", "disconnected", "truncated", "http_503:", "stream_error:"),
    "postgres": ("http_503:",),
}
"""How a request may end, besides success, by the victim of the moment; beginnings of error kinds."""


class Episode(msgspec.Struct, frozen=True):
    """One kill."""

    victim: str
    num_ok: int
    num_short: int
    """Claimed success with fewer tokens than were asked for: a fabricated finish."""
    errors: dict[str, int]
    dishonest: dict[str, int]
    num_hung: int
    recovery_s: float | None
    """From the kill until a request sent after it had succeeded and the victim was alive again; None: never."""
    disturbed_s: float
    """From the kill to the last failure."""
    leaks: list[str]
    stray_processes: list[str]


class Load:
    """Users who send requests until told to stop."""

    def __init__(self, platform: harness.Platform, num_users: int) -> None:
        self.records: list[RequestRecord] = []
        self._client = platform.client(request_timeout_s=TIMEOUT_S)
        self._num_users = num_users
        self._stopping = False
        self._num_sent = 0

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=self._num_users)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as users:
            for _ in range(self._num_users):
                users.create_task(self._user(session))

    def stop(self) -> None:
        self._stopping = True

    async def _user(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping:
            self._num_sent += 1
            prompt = random_token_ids(24, vocab_size=32_000, seed=f"chaos/{self._num_sent}")
            plan = RequestPlan(at_s=0.0, prompt=prompt, prompt_tokens=24, output_tokens=24)
            record = await send(session, self._client, plan, start=time.monotonic())
            self.records.append(record)
            if record.error is not None:
                await asyncio.sleep(PAUSE_S)

    async def succeeds_after(self, moment: float, timeout_s: float) -> float | None:
        """When the first request that was sent after ``moment`` ended well; None if none did in time."""
        deadline = moment + timeout_s
        while time.monotonic() < deadline:
            good = [one.finished_at for one in self.records if one.error is None and one.sent_at > moment]
            if good:
                return min(good)
            await asyncio.sleep(0.02)
        return None


async def episode(platform: harness.Platform, victim: str, num_users: int, settle_s: float) -> Episode:
    """Load, kill, wait for recovery and ``settle_s`` more, stop the load, look for what was left."""
    before = _process_names(platform)
    load = Load(platform, num_users)
    running = asyncio.create_task(load.run())
    if await load.succeeds_after(time.monotonic(), RECOVERY_LIMIT_S) is None:
        raise SystemExit(f"no request succeeded before the kill: {_count(load.records)}")
    killed_at = time.monotonic()
    os.kill(platform.reread().pids[victim], signal.SIGKILL)
    moments = (
        await load.succeeds_after(killed_at, RECOVERY_LIMIT_S),
        # A request need not show that the victim is back: keys, for one, are cached.
        await _started_again(platform, victim, killed_at + RECOVERY_LIMIT_S),
    )
    recovery_s = None if None in moments else max(moment for moment in moments if moment is not None) - killed_at
    await asyncio.sleep(settle_s)
    load.stop()
    await running
    errors = _count(load.records)
    failures = [one.finished_at for one in load.records if one.error is not None]
    after = _process_names(platform)
    return Episode(
        victim=victim,
        num_ok=sum(one.error is None for one in load.records),
        num_short=sum(one.error is None and one.output_tokens < one.asked_output_tokens for one in load.records),
        errors=errors,
        dishonest={kind: num for kind, num in errors.items() if not kind.startswith(HONEST[victim])},
        num_hung=errors.get("timeout", 0),
        recovery_s=recovery_s,
        disturbed_s=max(failures, default=killed_at) - killed_at,
        leaks=await asyncio.to_thread(platform.leaks) if recovery_s is not None else ["never recovered"],
        stray_processes=sorted((after - before).elements()),
    )


async def _started_again(platform: harness.Platform, victim: str, deadline: float) -> float | None:
    """When the supervisor had the victim alive again and the gateway said that it was ready; None if not in time."""
    ready_url = platform.ready.base_url.removesuffix("/v1") + "/readyz"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, KeyError, msgspec.MsgspecError, psutil.NoSuchProcess):
            pid = platform.reread().pids[victim]
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.to_thread(harness.get, ready_url)
                return time.monotonic()
        await asyncio.sleep(0.05)
    return None


def _count(records: list[RequestRecord]) -> dict[str, int]:
    return dict(Counter(one.error for one in records if one.error is not None).most_common())


def _process_names(platform: harness.Platform) -> Counter[str]:
    """The platform's processes by command, PostgreSQL's own children aside, whose number comes and goes."""
    names: Counter[str] = Counter()
    for child in psutil.Process(platform.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if words and not words[0].startswith("postgres:"):
                names[" ".join(words)[:120]] += 1
    return names


def main() -> None:
    arguments = harness.parser(__doc__)
    harness.add_model_dir(arguments)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--users", type=int, default=8)
    arguments.add_argument("--settle", type=float, default=3.0, help="seconds of load after the recovery")
    arguments.add_argument("--victims", default=",".join(VICTIMS))
    arguments.add_argument("--engine", default="native", choices=["native", "fake"])
    chosen = arguments.parse_args()
    model = harness.model_dir(chosen.model_dir)
    victims = chosen.victims.split(",") * chosen.rounds
    if unknown := set(victims) - set(VICTIMS):
        arguments.error(f"unknown victims: {', '.join(sorted(unknown))}; known: {', '.join(VICTIMS)}")
    with harness.platform("--model", str(model), "--engine", chosen.engine) as platform:
        episodes = [asyncio.run(episode(platform, victim, chosen.users, chosen.settle)) for victim in victims]
    harness.save("chaos_kill", episodes)
    rows: list[tuple[str, str, str, bool | None]] = []
    for one in episodes:
        rows += _rows(one)
    harness.finish("kill -9 under load", rows)


def _rows(one: Episode) -> list[tuple[str, str, str, bool | None]]:
    recovery = "never" if one.recovery_s is None else f"{one.recovery_s:.1f} s"
    bad = one.dishonest | ({"short answers": one.num_short} if one.num_short else {})
    left = one.leaks + one.stray_processes
    return [
        (f"{one.victim}: recovered after", recovery, "by itself", one.recovery_s is not None),
        (f"{one.victim}: last failure after", f"{one.disturbed_s:.1f} s", "", None),
        (f"{one.victim}: succeeded", str(one.num_ok), "", None),
        (f"{one.victim}: failed honestly", _listing(one.errors, without=one.dishonest), "", None),
        (f"{one.victim}: ended otherwise", _listing(bad), "none", not bad),
        (f"{one.victim}: hung", str(one.num_hung), "0", one.num_hung == 0),
        (f"{one.victim}: left behind", ", ".join(left) or "nothing", "nothing", not left),
    ]


def _listing(counts: dict[str, int], *, without: dict[str, int] | None = None) -> str:
    return ", ".join(f"{num} × {kind}" for kind, num in counts.items() if kind not in (without or {})) or "none"


if __name__ == "__main__":
    main()

"""From a fresh clone to the first token, and the second start.

    .venv/bin/python benchmarks/cold_start.py [--second-starts 3]

Clones the committed state of this repository beside nothing of ours, runs `make up` there, and waits for the first
streamed token; then stops it with Ctrl-C and starts it again. How long the first start takes depends on whether pip's
cache is warm. Uncommitted changes are not part of the clone.
"""

import asyncio
import shlex
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

import harness
from headrace.bench.client import ClientOptions, RequestPlan, send

TARGET_FIRST_S = 180.0
TARGET_SECOND_S = 8.0


def start_to_first_token(clone: Path, timeout_s: float) -> tuple[float, float]:
    """Seconds from `make up` to the ready file, and to the first token."""
    started = time.monotonic()
    with harness.platform(command=make_up, cwd=clone, start_timeout_s=timeout_s) as platform:
        asyncio.run(first_token(platform.client()))
        return platform.start_s, time.monotonic() - started


def make_up(arguments: list[str]) -> list[str]:
    return ["make", "up", f"ARGS={shlex.join(arguments)}"]


async def first_token(client: ClientOptions) -> None:
    """Ask for two tokens and read them."""
    plan = RequestPlan(at_s=0.0, prompt="Once upon a time", prompt_tokens=4, output_tokens=2)
    async with aiohttp.ClientSession() as session:
        record = await send(session, client, plan, start=time.monotonic())
    if record.error is not None:
        raise SystemExit(f"the first request failed: {record.error}")


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--second-starts", type=int, default=3)
    arguments.add_argument("--timeout", type=float, default=900.0)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-clone-", ignore_cleanup_errors=True) as scratch:
        clone = Path(scratch) / "headrace"
        subprocess.run(["git", "clone", "--quiet", str(harness.ROOT), str(clone)], check=True)
        ready_s, first_s = start_to_first_token(clone, chosen.timeout)
        again = [start_to_first_token(clone, chosen.timeout) for _ in range(chosen.second_starts)]
    second_s = statistics.median(total for _, total in again)
    harness.save("cold_start", {"first": {"ready_s": ready_s, "first_token_s": first_s}, "again": again})
    harness.finish(
        "make up",
        [
            ("fresh clone → first token, s", f"{first_s:.1f}", f"≤ {TARGET_FIRST_S:.0f}", first_s <= TARGET_FIRST_S),
            (
                "second start → first token, s",
                f"{second_s:.1f}",
                f"≤ {TARGET_SECOND_S:.0f}",
                second_s <= TARGET_SECOND_S,
            ),
            ("of which until it serves, s", f"{statistics.median(ready for ready, _ in again):.1f}", "", None),
        ],
    )


if __name__ == "__main__":
    main()

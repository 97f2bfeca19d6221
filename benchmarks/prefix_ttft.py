"""Prefix cache: time to first token of a second request that shares a 1,000-token prefix ÷ that of the first.

    .venv/bin/python benchmarks/prefix_ttft.py [--pairs 10]

Each pair has a prefix of its own, and the two requests end differently, through the gateway, one at a time.
"""

import asyncio
import statistics
import time

import aiohttp

import harness
from headrace.bench.client import ClientOptions, RequestPlan, RequestRecord, send
from headrace.bench.prompts import random_token_ids

TARGET = 0.2
SUFFIX_TOKENS = 16


async def first_token_times(
    client: ClientOptions, pairs: int, prefix_tokens: int, vocab_size: int
) -> tuple[list[float], list[float]]:
    """TTFT in seconds of the first and of the second request of each pair; a pair of warm-up is left out."""
    first: list[float] = []
    second: list[float] = []
    async with aiohttp.ClientSession() as session:
        for pair in range(pairs + 1):
            prefix = random_token_ids(prefix_tokens, vocab_size=vocab_size, seed=f"prefix/{pair}")
            for times, name in ((first, "a"), (second, "b")):
                suffix = random_token_ids(SUFFIX_TOKENS, vocab_size=vocab_size, seed=f"suffix/{pair}/{name}")
                times.append(await _ttft(session, client, prefix + suffix))
    return first[1:], second[1:]


async def _ttft(session: aiohttp.ClientSession, client: ClientOptions, prompt: list[int]) -> float:
    plan = RequestPlan(at_s=0.0, prompt=prompt, prompt_tokens=len(prompt), output_tokens=4)
    record: RequestRecord = await send(session, client, plan, start=time.monotonic())
    if record.error is not None or record.ttft_s is None:
        raise SystemExit(f"a request failed: {record.error}")
    return record.ttft_s


def main() -> None:
    arguments = harness.parser(__doc__)
    harness.add_model_dir(arguments)
    arguments.add_argument("--pairs", type=int, default=10)
    arguments.add_argument("--prefix-tokens", type=int, default=1000)
    arguments.add_argument("--vocab-size", type=int, default=32_000)
    chosen = arguments.parse_args()
    model = harness.model_dir(chosen.model_dir)
    with harness.platform("--model", str(model)) as platform:
        first, second = asyncio.run(
            first_token_times(platform.client(), chosen.pairs, chosen.prefix_tokens, chosen.vocab_size)
        )
    ratio = statistics.median(second) / statistics.median(first)
    harness.save("prefix_ttft", {"first_s": first, "second_s": second, "ratio": ratio})
    harness.finish(
        f"shared prefix of {chosen.prefix_tokens} tokens",
        [
            ("TTFT of the first, ms", f"{statistics.median(first) * 1000:.1f}", "", None),
            ("TTFT of the second, ms", f"{statistics.median(second) * 1000:.1f}", "", None),
            ("ratio of medians", f"{ratio:.3f}", f"≤ {TARGET}", ratio <= TARGET),
        ],
    )


if __name__ == "__main__":
    main()

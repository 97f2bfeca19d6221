"""What the way through the gateway costs: 64 concurrent streams over HTTP ÷ the same engine offline, in one run.

    .venv/bin/python benchmarks/gateway_ratio.py [--repeats 3] [--endpoint completions|chat]

Repeats alternate between the offline engine and a fresh platform with one worker. The load generator shares the
machine with the platform, so its own processor time counts against the gateway.
"""

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

import harness
from engine_peers import PEERS, run_peer
from headrace.bench import serve
from headrace.bench.report import LevelReport, render
from headrace.bench.workload import Workload, export, rates
from headrace.nn.config import ModelConfig

TARGET = 0.92


def through_gateway(platform: harness.Platform, workload: Workload, endpoint: str, rounds: int) -> list[LevelReport]:
    """All prompts at once, ``rounds`` times after a warm-up round."""
    options = serve.ServeOptions(
        client=platform.client(endpoint=endpoint),
        load=serve.ClosedLoad(concurrencies=(workload.num_prompts,) * (rounds + 1), num_requests=workload.num_prompts),
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        vocab_size=workload.vocab_size,
    )
    report = asyncio.run(serve.run(options))
    harness.console.print(render(report))
    return report.levels[1:]


def main() -> None:
    arguments = harness.parser(__doc__)
    harness.add_model_dir(arguments)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=2, help="timed rounds in each repeat, after a warm-up round")
    arguments.add_argument("--streams", type=int, default=64)
    arguments.add_argument("--prompt-tokens", type=int, default=128)
    arguments.add_argument("--output-tokens", type=int, default=64)
    arguments.add_argument("--endpoint", default="completions", choices=["completions", "chat"])
    chosen = arguments.parse_args()
    model = harness.model_dir(chosen.model_dir)
    vocab_size = ModelConfig.from_dir(model).vocab_size
    workload = Workload(chosen.streams, chosen.prompt_tokens, chosen.output_tokens, vocab_size)
    workload.check()
    offline: list[float] = []
    online: list[float] = []
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "workload.json"
        export(workload, chosen.rounds, path)
        command = [sys.executable, str(PEERS / "headrace_offline.py")]
        for _ in range(chosen.repeats):
            times = run_peer(command, model, path, "bfloat16", 900.0)
            offline += [rates(workload, one).whole_tokens_per_s for one in times.rounds]
            with harness.platform("--model", str(model)) as platform:
                levels = through_gateway(platform, workload, chosen.endpoint, chosen.rounds)
            online += [level.output_tokens_per_s for level in levels]
            failed += sum(level.num_requests - level.num_ok for level in levels)
    ratio = statistics.median(online) / statistics.median(offline)
    harness.save(f"gateway_ratio_{chosen.endpoint}", {"offline": offline, "online": online, "ratio": ratio})
    harness.finish(
        f"{chosen.streams} streams through the gateway",
        [
            ("offline, tokens/s", _spread(offline), "", None),
            ("through the gateway, tokens/s", _spread(online), "", None),
            ("ratio of medians", f"{ratio:.3f}", f"≥ {TARGET}", ratio >= TARGET),
            ("failed requests", str(failed), "0", failed == 0),
        ],
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} – {max(values):.0f})"


if __name__ == "__main__":
    main()

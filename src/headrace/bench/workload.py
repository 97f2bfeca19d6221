"""The offline workload, defined once and written as JSON, so that peers in other environments get the same prompts.

An engine is a black box that turns a list of prompts into output tokens. Four jobs and their durations say the rest:

====================  =================================  =================================================
job                   prompts × output tokens            what follows
====================  =================================  =================================================
``whole``             ``num_prompts`` × ``output``       whole-job rate: all output tokens ÷ its time
``prefill``           ``num_prompts`` × 1                prefill rate: all prompt tokens ÷ its time
``one_stream``        1 × ``output``                     with ``first_token``: one stream's rate
``first_token``       1 × 1                              time to first token
====================  =================================  =================================================

The decode rate is the ``output - 1`` remaining tokens of every prompt over ``whole - prefill``. Prompts differ between
jobs and rounds, so an engine may keep its prefix cache on and never profits from it.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from headrace.bench.prompts import random_token_ids
from headrace.core.errors import InvalidRequest

JobName = Literal["first_token", "one_stream", "prefill", "whole"]
JOB_NAMES: tuple[JobName, ...] = get_args(JobName)
"""In the order in which a round runs them."""


class Job(msgspec.Struct, frozen=True):
    """Prompts that are submitted all at once; each generates exactly ``output_tokens``, greedily, past any end."""

    name: JobName
    prompts: list[list[int]]
    output_tokens: int


class Workload(msgspec.Struct, frozen=True):
    """What every engine of a comparison computes."""

    num_prompts: int = 64
    prompt_tokens: int = 128
    output_tokens: int = 64
    vocab_size: int = 49_152
    seed: int = 0

    def jobs(self, round_number: int) -> list[Job]:
        """The four jobs of a round; round 0 is the warm-up, which nobody times."""
        shapes: dict[JobName, tuple[int, int]] = {
            "first_token": (1, 1),
            "one_stream": (1, self.output_tokens),
            "prefill": (self.num_prompts, 1),
            "whole": (self.num_prompts, self.output_tokens),
        }
        return [
            Job(name, [self._prompt(round_number, name, index) for index in range(num)], output_tokens)
            for name, (num, output_tokens) in shapes.items()
        ]

    def _prompt(self, round_number: int, name: JobName, index: int) -> list[int]:
        seed = f"{self.seed}/{round_number}/{name}/{index}"
        return random_token_ids(self.prompt_tokens, vocab_size=self.vocab_size, seed=seed)

    def check(self) -> None:
        """Refuse a workload from which no rates follow.

        Raises:
            InvalidRequest: naming the value.
        """
        if self.num_prompts < 1 or self.prompt_tokens < 1 or self.output_tokens < 2:
            raise InvalidRequest(
                f"the workload is {self.num_prompts} prompts × {self.prompt_tokens} tokens in, {self.output_tokens} "
                "out; it needs at least 1 × 1 in, 2 out"
            )


class WorkloadFile(msgspec.Struct, frozen=True):
    """What peers read: ``rounds[r][j]`` is job ``j`` of round ``r``; the first round is the warm-up."""

    workload: Workload
    rounds: list[list[Job]]


def export(workload: Workload, num_rounds: int, path: Path) -> None:
    """Write the warm-up round and ``num_rounds`` more as JSON."""
    file = WorkloadFile(workload, [workload.jobs(number) for number in range(num_rounds + 1)])
    path.write_bytes(msgspec.json.encode(file))


def load(path: Path) -> WorkloadFile:
    """Read what :func:`export` wrote.

    Raises:
        InvalidRequest: the file cannot be read or is not a workload.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkloadFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path}: not a workload file: {error}") from error


class RoundTimes(msgspec.Struct, frozen=True):
    """Seconds that each job of one round took, from the first submission to the last token."""

    first_token: float
    one_stream: float
    prefill: float
    whole: float


class PeerTimes(msgspec.Struct, frozen=True):
    """What one run of one engine measured; the scripts in ``benchmarks/peers`` write it as JSON."""

    engine: str
    version: str
    dtype: str
    rounds: list[RoundTimes]
    load_s: float
    """From the start of loading to ready, warm-up excluded."""
    notes: list[str] = []


class Rates(msgspec.Struct, frozen=True):
    """What an engine does, from the times of one round."""

    whole_tokens_per_s: float
    """Output tokens of the whole job."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """All streams together."""
    one_stream_tokens_per_s: float
    ttft_s: float
    """One stream."""


RATE_NAMES = Rates.__struct_fields__


def rates(workload: Workload, times: RoundTimes) -> Rates:
    """Rates of one round. A difference of times that noise made zero or negative gives 0, which nobody mistakes."""
    rest = workload.output_tokens - 1
    return Rates(
        whole_tokens_per_s=_per_s(workload.num_prompts * workload.output_tokens, times.whole),
        prefill_tokens_per_s=_per_s(workload.num_prompts * workload.prompt_tokens, times.prefill),
        decode_tokens_per_s=_per_s(workload.num_prompts * rest, times.whole - times.prefill),
        one_stream_tokens_per_s=_per_s(rest, times.one_stream - times.first_token),
        ttft_s=times.first_token,
    )


def median_rates(samples: Sequence[Rates]) -> Rates:
    """The median of each rate on its own, over at least one round."""
    return Rates(**{name: statistics.median(getattr(sample, name) for sample in samples) for name in RATE_NAMES})


def _per_s(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 else 0.0

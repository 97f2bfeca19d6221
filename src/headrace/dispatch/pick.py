"""Which worker gets the next request: the one where it is predicted to wait least. Pure."""

from collections.abc import Sequence

import msgspec

from headrace.core.frames import EngineLoad
from headrace.core.ids import WorkerId

_NOMINAL_PREFILL_TOKENS_PER_S = 1000.0
"""Until any worker has measured its own. Only the order matters then, and this keeps it right."""
_NOMINAL_STEP_S = 0.02
_TIE_RATIO = 1.05
_TIE_S = 0.001


class Candidate(msgspec.Struct, frozen=True):
    """A live worker that serves what is asked for."""

    worker_id: WorkerId
    load: EngineLoad
    block_size: int
    """Tokens in one block of its KV cache."""
    max_model_len: int


def pick(candidates: Sequence[Candidate], num_prompt_tokens: int, *, rotation: int = 0) -> WorkerId | None:
    """The worker with the least predicted time to the first token among those that have credit and can hold the prompt.

    Workers that have blocks free for the prompt come first: elsewhere it waits until some sequence ends. Predictions
    within 5 % (or 1 ms) are equal; then the fewest running sequences decide, then ``rotation``, which the caller
    changes from call to call, so that many dispatchers with the same view do not all choose the same worker.

    None when no candidate has credit: the request goes on waiting.
    """
    open_ = [c for c in candidates if c.load.credit > 0 and num_prompt_tokens < c.max_model_len]
    if not open_:
        return None
    roomy = [c for c in open_ if c.load.num_free_blocks * c.block_size > num_prompt_tokens]
    eligible = roomy or open_
    waits = predicted_waits_s([c.load for c in eligible], num_prompt_tokens)
    limit = max(min(waits) * _TIE_RATIO, min(waits) + _TIE_S)
    near = [c for c, wait in zip(eligible, waits, strict=True) if wait <= limit]
    fewest = min(c.load.num_running + c.load.num_waiting for c in near)
    tied = [c for c in near if c.load.num_running + c.load.num_waiting == fewest]
    return tied[rotation % len(tied)].worker_id


def predicted_waits_s(loads: Sequence[EngineLoad], num_prompt_tokens: int) -> list[float]:
    """For each load: seconds until a prompt of so many tokens, submitted now, has its first token.

    All prompt tokens ahead of it and its own are computed at the measured rate, and it takes a step of its own and one
    for each sequence that waits before it. A worker that has measured nothing yet is taken for an average one.
    """
    rates = [load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s > 0]
    steps = [load.step_s for load in loads if load.step_s > 0]
    usual_rate = sum(rates) / len(rates) if rates else _NOMINAL_PREFILL_TOKENS_PER_S
    usual_step = sum(steps) / len(steps) if steps else _NOMINAL_STEP_S
    return [
        (load.num_queued_tokens + num_prompt_tokens)
        / (load.prefill_tokens_per_s if load.prefill_tokens_per_s > 0 else usual_rate)
        + (load.num_waiting + 1) * (load.step_s if load.step_s > 0 else usual_step)
        for load in loads
    ]

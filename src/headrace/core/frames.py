"""What an engine says: one frame per step, for all sequences at once.

What comes once per token has ``gc=False``: it cannot be part of a cycle, and the collector need not look at it.
"""

import msgspec

from headrace.core.ids import SequenceId, TenantId, VersionId
from headrace.core.requests import FinishReason


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position: the chosen token's, and the likeliest alternatives' in order."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: list[tuple[int, float]]
    """``(token_id, logprob)``, likeliest first; as many as were asked for."""


class SequenceTiming(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a sequence's time inside the engine went, in seconds. Sent with the last delta."""

    wait_s: float
    """From submit to its first step."""
    prefill_s: float
    """From its first step to its first token."""
    decode_s: float
    """From its first token to its last."""
    num_cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""
    num_preemptions: int


class SequenceDelta(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """New tokens of one sequence in one step; the last delta of a sequence has ``finish`` set."""

    sequence_id: SequenceId
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One for each token of ``token_ids`` if they were asked for, else empty."""
    finish: FinishReason | None = None
    error: str | None = None
    """With ``FinishReason.ERROR``: what happened, fit for the caller's eyes."""
    timing: SequenceTiming | None = None
    error_code: str | None = None
    """With ``FinishReason.ERROR``: ``HeadraceError.code`` of what happened; see ``errors.from_code``."""


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a dispatcher needs to know to choose an engine."""

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    """Prompt tokens that are not computed yet, over running and waiting sequences."""
    num_free_blocks: int
    num_blocks: int
    credit: int
    """How many more sequences would be accepted now."""
    prefill_tokens_per_s: float
    """Measured; 0 until something was measured."""
    step_s: float
    """A recent decode step's duration; 0 until something was measured."""


class StepFrame(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one engine step produced. Frames of one engine carry increasing ``step``.

    A frame may be sent without a step of the engine (aborts while idle, heartbeats); it then repeats ``step``.
    """

    step: int
    deltas: list[SequenceDelta]
    load: EngineLoad
    service: dict[TenantId, int] = {}
    """Tokens computed for each tenant in this step, prompt and output."""


class EngineDescription(msgspec.Struct, frozen=True):
    """What does not change while an engine lives."""

    model: str
    """The model's name, without the version."""
    version: VersionId
    max_model_len: int
    """Prompt and output tokens of a sequence together, at most."""
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    dtype: str
    device: str


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the start, and the present state: what `/metrics` and health are made of."""

    load: EngineLoad
    step: int
    last_progress_age_s: float
    """Seconds since the engine last finished a step, or last had nothing to do."""
    healthy: bool
    """False when work waits and no step finishes: stuck. A long step of a busy engine is healthy."""
    draining: bool
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_finished: dict[str, int]
    """Finished sequences by ``FinishReason``."""
    num_prefix_queries: int
    """Prompt tokens looked up in the prefix cache; hits are ``num_cached_prompt_tokens``."""
    blocks_in_use: int
    memory: dict[str, int] = {}
    """Planned and measured bytes by use, e.g. ``planned_weights``, ``measured_weights``."""

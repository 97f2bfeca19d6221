"""One sequence inside the engine: computed tokens chase total tokens, and nothing else says how far it is.

A new prompt, a prompt half computed, a decoding sequence and one that lost its blocks differ only in how far
``num_computed`` is behind ``num_tokens``.
"""

from headrace.core.frames import SequenceTiming
from headrace.core.requests import GenerationRequest, ServiceClass

_URGENCY = {service_class: rank for rank, service_class in enumerate(ServiceClass)}

MAX_PREEMPTIONS = 3
"""A sequence that lost its blocks so often counts as most urgent from then on, so that it gets to its end."""


class Sequence:
    """Tokens, blocks and times of one sequence. The scheduler owns ``blocks``, ``hashes``, ``slot`` and the counts."""

    __slots__ = (
        "arrival_s",
        "blocks",
        "first_step_s",
        "first_token_s",
        "hashes",
        "last_token_s",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_registered",
        "num_resumed",
        "order",
        "prompt_len",
        "request",
        "slot",
        "tokens",
        "waits_for",
    )

    def __init__(self, request: GenerationRequest, order: int, arrival_s: float) -> None:
        self.request = request
        self.order = order
        """Rank of arrival; smaller came earlier."""
        self.tokens = list(request.prompt)
        """Prompt and output."""
        self.prompt_len = len(self.tokens)
        self.num_resumed = request.num_resumed_tokens
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        """Content hashes of full blocks, as far as they are known."""
        self.num_registered = 0
        """Leading blocks that the prefix cache knows."""
        self.slot = -1
        """The row of the runner's tables it sits in; -1 while it waits."""
        self.waits_for: bytes | None = None
        """The block, by content, that a running sequence is computing for both."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.arrival_s = arrival_s
        self.first_step_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    def __repr__(self) -> str:
        return f"<Sequence {self.request.sequence_id} {self.num_computed}/{len(self.tokens)}>"

    @property
    def num_uncomputed(self) -> int:
        """At least 1: the newest token's keys and values are computed in the step that predicts its successor."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens generated here: what ``max_tokens`` counts."""
        return len(self.tokens) - self.prompt_len

    @property
    def output_start(self) -> int:
        """Where output begins in ``tokens``, tokens generated before a failover included."""
        return self.prompt_len - self.num_resumed

    @property
    def rank(self) -> tuple[int, int]:
        """Who keeps its blocks when they run out: smaller is more urgent. Class first, then arrival."""
        urgency = 0 if self.num_preemptions >= MAX_PREEMPTIONS else _URGENCY[self.request.service_class]
        return urgency, self.order

    def timing(self, now: float) -> SequenceTiming:
        """Where the time went; phases that were not reached are 0 s long, the one it is in ends ``now``."""
        start = self.first_step_s
        first = self.first_token_s
        last = self.last_token_s
        return SequenceTiming(
            wait_s=(now if start is None else start) - self.arrival_s,
            prefill_s=0.0 if start is None else (now if first is None else first) - start,
            decode_s=0.0 if first is None or last is None else last - first,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )

"""A generation as every part below the gateway sees it: token ids in, token ids out."""

import enum
import math

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.core.ids import SequenceId, TenantId

MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1


class ServiceClass(enum.StrEnum):
    """How urgent work is, most urgent first: OpenAI's ``service_tier`` values plus ``batch``."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"
    BATCH = "batch"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. The defaults sample from the model's own distribution.

    The order of operations is: penalties and bias on the logits, temperature, then ``top_k``, ``top_p`` and ``min_p``
    on the tempered distribution. ``temperature == 0`` takes the arg max after penalties and bias.

    The random number for the token at absolute position ``p`` (prompt tokens count) is a pure function of
    ``(seed, p)``, so a continuation depends neither on the batch nor on the worker.
    """

    seed: int = 0
    """In ``[0, 2**63)``. Whoever builds the request draws one if the client gave none."""
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Keep tokens whose probability is at least ``min_p`` × that of the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token in prompt or output (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """OpenAI's additive penalties; they count output tokens only."""
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """None: none. k: the chosen token's log-probability and the k likeliest alternatives (0 ≤ k ≤ 20).

    Log-probabilities are of the model's raw distribution, before penalties, bias and temperature.
    """

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check(self) -> None:
        """Refuse values outside their domain.

        Raises:
            InvalidRequest: naming the parameter, the value and the allowed range.
        """
        _in_range("seed", self.seed, 0, MAX_SEED)
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0; use temperature 0 for greedy decoding", param="top_p")
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise InvalidRequest(
                f"repetition_penalty is {self.repetition_penalty}; it must be greater than 0 and at most 10",
                param="repetition_penalty",
            )
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise InvalidRequest(
                    f"logit_bias names token {token_id}; token ids are not negative", param="logit_bias"
                )
            _in_range("logit_bias", bias, -100.0, 100.0)
        if self.logprobs is not None:
            _in_range("top_logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", param=name)


class StopConditions(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a sequence ends. Stop *strings* are the gateway's business: it sees text, and aborts."""

    max_tokens: int
    """Tokens to generate at most, at least 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the sequence and is itself reported as its last token. End-of-sequence ids are listed here."""
    min_tokens: int = 0
    """Until this many tokens exist, stop tokens are not sampled."""


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate."""

    sequence_id: SequenceId
    tenant_id: TenantId
    prompt: list[int]
    """At least one token id. After a failover: the prompt and the tokens already emitted."""
    stop: StopConditions
    sampling: SamplingParams = SamplingParams()
    service_class: ServiceClass = ServiceClass.DEFAULT
    cache_salt: str = ""
    """Scopes prefix-cache hits: equal prompts share blocks only under equal salts. The gateway sets it per tenant."""
    num_resumed_tokens: int = 0
    """How many tokens at the end of ``prompt`` were generated earlier: penalties count them as output, and
    ``stop.max_tokens`` counts only tokens still to come."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """``max_tokens`` or the model's context length was reached."""
    ABORT = "abort"
    """The caller asked for it."""
    ERROR = "error"
    """The engine gave up on this sequence; ``SequenceDelta.error`` says why."""

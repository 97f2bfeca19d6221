"""What makes a request impossible for this engine, whatever its load: decided before anything is taken."""

from dataclasses import dataclass

from headrace.core.errors import ContextLengthExceeded, InvalidRequest
from headrace.core.requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class Admission:
    """The engine's unchanging limits; checking needs no lock."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that can never be served.

        Raises:
            ContextLengthExceeded: the prompt leaves no room for a token within ``max_model_len``.
            InvalidRequest: an empty prompt, a token id outside the vocabulary, a parameter outside its domain, or more
                KV blocks than exist.
        """
        prompt = request.prompt
        if not prompt:
            raise InvalidRequest("the prompt is empty; it must hold at least one token", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; this model takes at most {self.max_model_len - 1}, "
                f"so that one token can follow within its context of {self.max_model_len}",
                param="prompt",
            )
        self._check_ids("prompt", prompt)
        self._check_ids("logit_bias", request.sampling.logit_bias)
        self._check_ids("stop_token_ids", request.stop.stop_token_ids)
        if request.stop.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {request.stop.max_tokens}; it must be at least 1", param="max_tokens")
        if not 0 <= request.num_resumed_tokens < len(prompt):
            raise InvalidRequest(
                f"num_resumed_tokens is {request.num_resumed_tokens}; it must be below the prompt's {len(prompt)}",
                param="num_resumed_tokens",
            )
        request.sampling.check()
        self._check_blocks(len(prompt), request.stop.max_tokens)

    def _check_ids(self, name: str, ids: "list[int] | tuple[int, ...] | dict[int, float]") -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequest(f"{name} holds token {wrong}; ids go from 0 to {self.vocab_size - 1}", param=name)

    def _check_blocks(self, prompt_len: int, max_tokens: int) -> None:
        # The last token is never fed back, so it takes no room.
        num_tokens = min(prompt_len + max_tokens, self.max_model_len) - 1
        needed = -(-num_tokens // self.block_size)
        if needed > self.num_blocks:
            raise InvalidRequest(
                f"the request may grow to {num_tokens} tokens, which need {needed} blocks of {self.block_size} tokens; "
                f"this engine's KV cache has {self.num_blocks}. Shorten the prompt or lower max_tokens",
                param="max_tokens",
            )

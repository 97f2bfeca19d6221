"""From logits to tokens, for all rows of a step at once."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.frames import TokenLogprobs
from headrace.core.requests import GenerationRequest
from headrace.engine.distribution import draw
from headrace.engine.penalties import Adjustments, apply_adjustments
from headrace.engine.random import row_keys
from headrace.nn.ops.race import prepare

_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Sampled:
    """The next token of each row."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, for rows that asked."""
    broken_rows: frozenset[int] = frozenset()
    """Rows whose logits hold no usable number; their token means nothing."""


class Sampler:
    """Sampling parameters of up to ``num_slots`` sequences in arrays: a step's rows are gathered, not visited."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu":
            prepare()
        self._seed = np.zeros(num_slots, np.int64)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._plain_greedy = np.ones(num_slots, np.bool_)
        """Arg max of the raw logits, and nothing to report."""
        self._adjustments: list[Adjustments | None] = [None] * num_slots

    def place(self, slot: int, request: GenerationRequest, tokens: _Ints, output_start: int) -> None:
        """Put a sequence into ``slot``; ``tokens [n]`` are all it has, output from ``output_start`` on."""
        params = request.sampling
        adjustments = Adjustments.of(request, tokens, output_start)
        self._seed[slot] = params.seed
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._plain_greedy[slot] = params.greedy and params.logprobs is None and adjustments is None
        self._adjustments[slot] = adjustments

    def append(self, slot: int, token_id: int) -> None:
        """The sequence in ``slot`` took a token."""
        adjustments = self._adjustments[slot]
        if adjustments is not None:
            adjustments.add(token_id)

    def sample(self, logits: torch.Tensor, slots: _Ints, positions: _Ints) -> Sampled:
        """Choose a token for each row of ``logits [num_rows, vocab]`` (any float dtype; left as they are).

        ``slots [num_rows]`` says whose rows they are, ``positions [num_rows]`` where the new tokens will stand.
        """
        if self._plain_greedy[slots].all():
            return self._greedy(logits)
        adjustments = [(row, adj) for row, slot in enumerate(slots.tolist()) if (adj := self._adjustments[slot])]
        work = logits
        if adjustments:
            work = logits.to(torch.float32, copy=True)
            apply_adjustments(work, adjustments)
        chosen = draw(
            work,
            self._to_device(self._temperature[slots]),
            self._to_device(self._top_k[slots]),
            self._to_device(self._top_p[slots]),
            self._to_device(self._min_p[slots]),
            self._to_device(row_keys(self._seed[slots], positions)),
        )
        broken = frozenset((chosen < 0).nonzero()[:, 0].tolist())
        chosen.clamp_(min=0)
        wanted = self._num_logprobs[slots]
        logprobs = _logprobs(logits, chosen, wanted) if (wanted >= 0).any() else {}
        return Sampled(chosen.tolist(), logprobs, broken)

    def _greedy(self, logits: torch.Tensor) -> Sampled:
        chosen, peaks = _argmax(logits)
        finite = torch.isfinite(peaks)
        broken = frozenset() if bool(finite.all()) else frozenset((~finite).nonzero()[:, 0].tolist())
        return Sampled(chosen.tolist(), broken_rows=broken)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first likeliest token of each row ``[num_rows] int64``, and its logit; NaN counts as likeliest."""
    on_cpu = logits.device.type == "cpu"
    # On a CPU NumPy's arg max is several times faster than torch's, the conversion included.
    chosen = torch.from_numpy(logits.float().numpy().argmax(1)) if on_cpu else logits.argmax(1)
    return chosen, logits.gather(1, chosen[:, None])[:, 0]


def _logprobs(raw: torch.Tensor, chosen: torch.Tensor, wanted: _Ints) -> dict[int, TokenLogprobs]:
    rows = np.flatnonzero(wanted >= 0)
    logits = raw[torch.from_numpy(rows).to(raw.device)].float()
    token_ids = chosen[torch.from_numpy(rows).to(raw.device)]
    own = logits.gather(1, token_ids[:, None])
    norm = logits.logsumexp(1, keepdim=True)
    ranks = (logits > own).sum(1).add_(1).tolist()
    values, ids = logits.topk(min(int(wanted.max()), logits.shape[1]), dim=1)
    top_values = (values - norm).tolist()
    top_ids = ids.tolist()
    own_values = (own - norm)[:, 0].tolist()
    return {
        row: TokenLogprobs(
            token_id, own_values[i], ranks[i], list(zip(top_ids[i], top_values[i], strict=True))[: int(wanted[row])]
        )
        for i, (row, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True))
    }

"""What a sequence's history and wishes change about its logits: penalties, bias, stop tokens it may not take yet."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.requests import GenerationRequest

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int64]


class TokenCounts:
    """Which tokens occur in a sequence, and how often in its output; grows with each token in constant time."""

    def __init__(self, prompt: _Ints, output: _Ints) -> None:
        ids = np.unique(np.concatenate([prompt, output]))
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._index = {token_id: index for index, token_id in enumerate(ids.tolist())}
        np.add.at(self._counts, np.searchsorted(ids, output), 1.0)

    @property
    def ids(self) -> _Ints:
        """Distinct tokens ``[n]``."""
        return self._ids[: self._size]

    @property
    def counts(self) -> _Floats:
        """How often each of :attr:`ids` occurs in the output ``[n]``."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """One more token of output."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1.0


class Adjustments:
    """One sequence's changes to its logits."""

    def __init__(self, request: GenerationRequest, tokens: _Ints, output_start: int) -> None:
        """``tokens [n]``: what is known so far; output begins at ``output_start``."""
        params = request.sampling
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.counts: TokenCounts | None = None
        if self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0:
            self.counts = TokenCounts(tokens[:output_start], tokens[output_start:])
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), np.float32)
        self.stop_ids = np.array(request.stop.stop_token_ids, np.int64)
        self.num_barred = request.stop.min_tokens - (len(tokens) - output_start)
        """For so many more tokens a stop token may not be taken; not positive: none."""

    @classmethod
    def of(cls, request: GenerationRequest, tokens: _Ints, output_start: int) -> "Adjustments | None":
        """The sequence's adjustments, or None if its logits stay as they are."""
        found = cls(request, tokens, output_start)
        bars = found.num_barred > 0 and found.stop_ids.size
        return found if found.counts is not None or found.bias_ids.size or bars else None

    def add(self, token_id: int) -> None:
        """One more token of output."""
        self.num_barred -= 1
        if self.counts is not None:
            self.counts.add(token_id)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Single logits across rows, as flat index arrays."""

    rows: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, parts: list[tuple[int, _Ints]], device: torch.device) -> "_Entries":
        lens = [len(ids) for _, ids in parts]
        rows = np.repeat(np.array([row for row, _ in parts], np.int64), lens)
        ids = np.concatenate([ids for _, ids in parts])
        return cls(torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device))


def apply_adjustments(logits: torch.Tensor, adjustments: list[tuple[int, Adjustments]]) -> None:
    """Change float32 ``logits [num_rows, vocab]`` in place: penalties, then bias, then barred stop tokens.

    ``adjustments`` pairs row numbers with what to do there.
    """
    device = logits.device
    counted = [(row, adj, adj.counts) for row, adj in adjustments if adj.counts is not None]
    if counted:
        entries = _Entries.of([(row, counts.ids) for row, _, counts in counted], device)
        lens = [len(counts.ids) for _, _, counts in counted]
        # One column for each penalty, repeated over the sequence's tokens.
        columns = np.repeat(
            np.array([(a.repetition, a.presence, a.frequency) for _, a, _ in counted], np.float32), lens, axis=0
        )
        repetition, presence, frequency = torch.from_numpy(columns).to(device).unbind(1)
        count = torch.from_numpy(np.concatenate([counts.counts for _, _, counts in counted])).to(device)
        values = logits[entries.rows, entries.ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * count + presence * (count > 0)
        logits[entries.rows, entries.ids] = values
    biased = [(row, adj) for row, adj in adjustments if adj.bias_ids.size]
    if biased:
        entries = _Entries.of([(row, adj.bias_ids) for row, adj in biased], device)
        logits[entries.rows, entries.ids] += torch.from_numpy(np.concatenate([adj.bias for _, adj in biased])).to(
            device
        )
    barred = [(row, adj.stop_ids) for row, adj in adjustments if adj.num_barred > 0 and adj.stop_ids.size]
    if barred:
        entries = _Entries.of(barred, device)
        logits[entries.rows, entries.ids] = -torch.inf

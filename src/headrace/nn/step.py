"""What the layers of one forward pass share, derived from the batch once and never per layer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from headrace.nn.batch import StepBatch
from headrace.nn.rope import Rotary

TILE_TOKENS = 8
"""Queries that attend together: enough to reuse a key while it is in a register, few enough to share out evenly."""


@dataclass(frozen=True)
class Step:
    """A batch on the model's device, with its rotary angles."""

    batch: StepBatch
    block_size: int
    device: torch.device
    cos: torch.Tensor
    sin: torch.Tensor
    """``[num_tokens, head_dim / 2]`` float32"""

    @classmethod
    def of(cls, batch: StepBatch, rotary: Rotary, block_size: int, device: torch.device) -> "Step":
        cos, sin = rotary.at(torch.from_numpy(batch.positions).to(device))
        return cls(batch, block_size, device, cos, sin)

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """``[num_tokens]`` int64"""
        return torch.from_numpy(self.batch.token_ids).to(self.device)

    @cached_property
    def logit_rows(self) -> torch.Tensor | None:
        """``[num_rows]`` int64, or None where every token wants logits, in order."""
        rows = self.batch.logit_rows
        if len(rows) == self.batch.num_tokens and np.array_equal(rows, np.arange(len(rows))):
            return None
        return torch.from_numpy(rows).to(self.device)

    @cached_property
    def write_blocks(self) -> torch.Tensor:
        """``[num_tokens]`` int64: the block that each token's key and value go to."""
        return torch.from_numpy(self.batch.slot_mapping.astype(np.int64) // self.block_size).to(self.device)

    @cached_property
    def write_offsets(self) -> torch.Tensor:
        """``[num_tokens]`` int64: the offset inside that block."""
        return torch.from_numpy(self.batch.slot_mapping.astype(np.int64) % self.block_size).to(self.device)

    @cached_property
    def longest_query(self) -> int:
        """The most tokens that one sequence has in this step."""
        return int(np.diff(self.batch.query_start).max())

    @cached_property
    def tiles(self) -> npt.NDArray[np.int32]:
        """The queries cut into pieces of one sequence each, at most ``TILE_TOKENS`` long: ``[num_tiles, 4]``.

        Columns: sequence, first token, number of tokens, position of the first token. The costly ones come first.
        """
        batch = self.batch
        query_lens = np.diff(batch.query_start)
        num_tiles = -(-query_lens // TILE_TOKENS)
        sequence = np.repeat(np.arange(batch.num_seqs), num_tiles)
        first_of_sequence = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        offset = (np.arange(len(sequence)) - first_of_sequence) * TILE_TOKENS
        length = np.minimum(query_lens[sequence] - offset, TILE_TOKENS)
        position = (batch.kv_lens - query_lens)[sequence] + offset
        tiles = np.stack([sequence, batch.query_start[sequence] + offset, length, position], axis=1)
        by_cost = np.argsort(-(position + length), kind="stable")
        return np.ascontiguousarray(tiles[by_cost], dtype=np.int32)

    @cached_property
    def sequences(self) -> list["SequenceSpan"]:
        """The sequences of the batch, in order."""
        batch = self.batch
        spans = []
        for index, (start, end, kv_len) in enumerate(
            zip(batch.query_start[:-1].tolist(), batch.query_start[1:].tolist(), batch.kv_lens.tolist(), strict=True)
        ):
            num_blocks = -(-kv_len // self.block_size)
            blocks = batch.block_table[index, :num_blocks].astype(np.int64)
            spans.append(SequenceSpan(start, end, kv_len, torch.from_numpy(blocks).to(self.device)))
        return spans


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's tokens in the step and its blocks in the cache."""

    start: int
    end: int
    kv_len: int
    blocks: torch.Tensor
    """``[ceil(kv_len / block_size)]`` int64"""

    @property
    def query_len(self) -> int:
        return self.end - self.start

    @property
    def context_len(self) -> int:
        """Tokens that were in the cache before this step."""
        return self.kv_len - self.query_len

    def mask(self, first_key: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Which of the keys ``first_key … kv_len`` each query sees: bool ``[query_len, kv_len - first_key]``."""
        query = torch.arange(self.context_len, self.kv_len, device=device)[:, None]
        key = torch.arange(first_key, self.kv_len, device=device)[None, :]
        seen = key <= query
        return seen if window is None else seen & (key > query - window)

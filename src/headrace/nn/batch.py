"""One step's work for the model: a ragged batch of tokens and where their keys and values live."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of all sequences one after another, any mix of single decode rows and prefill chunks.

    ::

        query_start   0     1     2              6
        tokens        | a9  | b4  | c0 c1 c2 c3  |      three sequences, six tokens
        kv_lens         10    5     4                   tokens in the cache after this step
        positions       9     4     0  1  2  3

    The tokens of sequence ``i`` are its last ``query_start[i+1] - query_start[i]`` of ``kv_lens[i]`` tokens; the ones
    before them are in the cache already. Token ``p`` of a sequence lives in block ``block_table[i, p // block_size]``
    at offset ``p % block_size``. Unused entries of ``block_table`` may hold any number.
    """

    token_ids: npt.NDArray[np.int64]
    """``[num_tokens]``"""
    positions: npt.NDArray[np.int32]
    """``[num_tokens]``"""
    slot_mapping: npt.NDArray[np.int32]
    """``[num_tokens]``: block × block_size + offset, where the token's key and value are written."""
    query_start: npt.NDArray[np.int32]
    """``[num_seqs + 1]``"""
    kv_lens: npt.NDArray[np.int32]
    """``[num_seqs]``"""
    block_table: npt.NDArray[np.int32]
    """``[num_seqs, max_blocks]``"""
    logit_rows: npt.NDArray[np.int64]
    """``[num_rows]``: indices into the tokens for which logits are wanted."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.kv_lens)

    def check(self, *, vocab_size: int, max_positions: int, num_blocks: int, block_size: int) -> None:
        """Refuse what would read or write outside its arrays; cheap enough for every step.

        Raises:
            ValueError: an array has the wrong dtype or shape, or an index is out of range. The message names it.
        """
        for name, kind, ndim in _ARRAYS:
            array = getattr(self, name)
            if array.dtype != kind or array.ndim != ndim or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be a contiguous {ndim}-dimensional array of {np.dtype(kind).name}")
        num_tokens, num_seqs = self.num_tokens, self.num_seqs
        if num_seqs == 0 or num_tokens == 0:
            raise ValueError("a step needs at least one sequence and one token")
        lens = np.diff(self.query_start)
        if len(lens) != num_seqs or self.query_start[0] != 0 or self.query_start[-1] != num_tokens or lens.min() < 1:
            raise ValueError("query_start must rise from 0 to num_tokens, one step for each sequence")
        if len(self.positions) != num_tokens or len(self.slot_mapping) != num_tokens:
            raise ValueError("token_ids, positions and slot_mapping must have one entry for each token")
        if self.block_table.shape[0] != num_seqs:
            raise ValueError("block_table must have one row for each sequence")
        _in_range("token_ids", self.token_ids, vocab_size)
        _in_range("positions", self.positions, max_positions)
        _in_range("slot_mapping", self.slot_mapping, num_blocks * block_size)
        _in_range("logit_rows", self.logit_rows, num_tokens)
        if (self.kv_lens < lens).any() or self.kv_lens.max() > self.block_table.shape[1] * block_size:
            raise ValueError("kv_lens must be at least the query length and fit into the block table")
        used = np.arange(self.block_table.shape[1]) * block_size < self.kv_lens[:, None]
        _in_range("block_table", self.block_table[used], num_blocks)


_ARRAYS = (
    ("token_ids", np.int64, 1),
    ("positions", np.int32, 1),
    ("slot_mapping", np.int32, 1),
    ("query_start", np.int32, 1),
    ("kv_lens", np.int32, 1),
    ("block_table", np.int32, 2),
    ("logit_rows", np.int64, 1),
)


def _in_range(name: str, array: IntArray, end: int) -> None:
    if array.size and (array.min() < 0 or array.max() >= end):
        raise ValueError(f"{name} holds {array.min()} to {array.max()}; allowed are 0 to {end - 1}")

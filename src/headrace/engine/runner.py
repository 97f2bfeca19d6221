"""Turns a plan into one ragged batch, runs the model on it, and samples.

Tokens and block tables of running sequences lie in arrays with one row for each slot, kept up to date by what changed,
so that building a batch is a handful of gathers however long the sequences are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.sampler import Sampled, Sampler
from headrace.engine.scheduler import Limits, Work
from headrace.engine.sequence import Sequence
from headrace.nn.batch import StepBatch

Forward = Callable[[StepBatch], torch.Tensor]
"""A model with its KV cache: logits ``[num_logit_rows, vocab]``, as ``CausalLM.forward`` gives them."""


@dataclass(frozen=True, slots=True)
class _Shape:
    slots: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """The first position that each sequence computes in this step."""
    samples: npt.NDArray[np.bool_]


class ModelRunner:
    """Runs steps. One slot holds one running sequence."""

    def __init__(self, forward: Forward, limits: Limits, max_model_len: int, device: torch.device) -> None:
        self._forward = forward
        self._block_size = limits.block_size
        max_blocks = -(-max_model_len // limits.block_size)
        # Pages of these arrays that no sequence is long enough to reach are never touched.
        self._tokens = np.zeros((limits.max_num_seqs, max_model_len), np.int64)
        self._block_table = np.zeros((limits.max_num_seqs, max_blocks), np.int32)
        self._num_blocks = [0] * limits.max_num_seqs
        self._sampler = Sampler(limits.max_num_seqs, device)

    def place(self, sequence: Sequence) -> None:
        """Fill the slot that the scheduler gave to a sequence."""
        slot = sequence.slot
        num_tokens = len(sequence.tokens)
        self._tokens[slot, :num_tokens] = sequence.tokens
        self._num_blocks[slot] = 0
        self._sampler.place(slot, sequence.request, self._tokens[slot, :num_tokens], sequence.output_start)

    def append(self, sequence: Sequence) -> None:
        """The sequence took a token: the last of its ``tokens``."""
        token_id = sequence.tokens[-1]
        self._tokens[sequence.slot, len(sequence.tokens) - 1] = token_id
        self._sampler.append(sequence.slot, token_id)

    def run(self, work: list[Work]) -> Sampled:
        """Compute a step and sample for those of its sequences that reach their last token, in the order of ``work``.

        Changes nothing but the KV cache, so the same work can be done again.
        """
        shape = self._shape(work)
        batch = self._batch(shape)
        with torch.inference_mode():
            logits = self._forward(batch)
            slots = shape.slots[shape.samples]
            if not len(slots):
                return Sampled([])
            return self._sampler.sample(logits, slots, (shape.starts + shape.counts)[shape.samples])

    def _shape(self, work: list[Work]) -> _Shape:
        slots, counts, starts, samples = [], [], [], []
        for sequence, count, sampled in work:
            slot = sequence.slot
            slots.append(slot)
            counts.append(count)
            starts.append(sequence.num_computed)
            samples.append(sampled)
            known = self._num_blocks[slot]
            if known != len(sequence.blocks):
                self._block_table[slot, known : len(sequence.blocks)] = sequence.blocks[known:]
                self._num_blocks[slot] = len(sequence.blocks)
        return _Shape(np.array(slots), np.array(counts), np.array(starts), np.array(samples))

    def _batch(self, shape: _Shape) -> StepBatch:
        """Lay the sequences' new tokens one after another::

        counts        1   1   3
        query_start   0   1   2       5
        owner         0   1   2 2 2
        positions     9   4   0 1 2        starts[owner] + (index - query_start[owner])
        """
        ends = shape.starts + shape.counts
        query_start = np.zeros(len(shape.counts) + 1, np.int32)
        np.cumsum(shape.counts, out=query_start[1:])
        owner = np.repeat(np.arange(len(shape.counts)), shape.counts)
        positions = np.arange(query_start[-1]) + (shape.starts - query_start[:-1])[owner]
        rows = shape.slots[owner]
        blocks = self._block_table[rows, positions // self._block_size]
        width = -(-int(ends.max()) // self._block_size)
        return StepBatch(
            token_ids=self._tokens[rows, positions],
            positions=positions.astype(np.int32),
            slot_mapping=blocks * np.int32(self._block_size) + (positions % self._block_size).astype(np.int32),
            query_start=query_start,
            kv_lens=ends.astype(np.int32),
            block_table=self._block_table[shape.slots, :width],
            logit_rows=(query_start[1:] - 1)[shape.samples].astype(np.int64),
        )

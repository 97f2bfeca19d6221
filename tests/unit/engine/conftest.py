"""A model of a few lines whose next token depends on every token before it, read back through the block tables.

A wrong block, slot, position or length anywhere changes what it says.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from headrace.core.clock import SystemClock
from headrace.core.frames import SequenceDelta, StepFrame
from headrace.core.ids import SequenceId, TenantId
from headrace.core.requests import GenerationRequest, SamplingParams, ServiceClass, StopConditions
from headrace.engine.admission import Admission
from headrace.engine.core import EngineCore
from headrace.engine.runner import ModelRunner
from headrace.engine.scheduler import Limits
from headrace.nn.batch import StepBatch

VOCAB = 97
DEFAULT_LIMITS = Limits(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)


def logits_after(history: Sequence[int]) -> np.ndarray:
    """The stub's logits ``[VOCAB]`` after ``history``."""
    digest = hashlib.blake2b(np.asarray(history, np.int64).tobytes(), digest_size=8).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest))).standard_normal(VOCAB).astype(np.float32) * 3


@dataclass
class StubModel:
    limits: Limits
    before: Callable[[StepBatch], None] = lambda batch: None
    """Called with every batch; may raise."""
    batches: list[StepBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cells = np.full(self.limits.num_blocks * self.limits.block_size, -1, np.int64)
        self._positions = self._cells.copy()

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        batch.check(
            vocab_size=VOCAB,
            max_positions=1 << 20,
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
        )
        self.batches.append(batch)
        self.before(batch)
        assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens, "two tokens write to one place"
        self._cells[batch.slot_mapping] = batch.token_ids
        self._positions[batch.slot_mapping] = batch.positions
        rows = [torch.from_numpy(logits_after(self._history(batch, int(token)))) for token in batch.logit_rows]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _history(self, batch: StepBatch, token: int) -> list[int]:
        sequence = int(np.searchsorted(batch.query_start, token, side="right")) - 1
        length = int(batch.positions[token]) + 1
        assert length <= batch.kv_lens[sequence]
        where = np.arange(length)
        size = self.limits.block_size
        cells = batch.block_table[sequence][where // size] * size + where % size
        assert self._positions[cells].tolist() == where.tolist(), "a cell holds another position's token"
        return self._cells[cells].tolist()


@dataclass
class Bench:
    """A core on a stub model, and what it said."""

    core: EngineCore
    model: StubModel
    frames: list[StepFrame] = field(default_factory=list)
    deltas: dict[str, list[SequenceDelta]] = field(default_factory=dict)

    def step(self) -> StepFrame:
        frame = self.core.step()
        self.frames.append(frame)
        for delta in frame.deltas:
            self.deltas.setdefault(delta.sequence_id, []).append(delta)
        return frame

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do or say; the audit must be clean then."""
        for _ in range(max_steps):
            if not self.core.has_news:
                self.core.audit()
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, sequence_id: str) -> list[int]:
        return [token for delta in self.deltas[sequence_id] for token in delta.token_ids]

    def last(self, sequence_id: str) -> SequenceDelta:
        assert [delta.finish is not None for delta in self.deltas[sequence_id]].count(True) == 1
        assert self.deltas[sequence_id][-1].finish is not None
        return self.deltas[sequence_id][-1]

    def generate(self, *requests: GenerationRequest) -> list[list[int]]:
        for request in requests:
            self.core.add(request)
        self.run()
        return [self.tokens(request.sequence_id) for request in requests]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors of a few kilobytes gain nothing from threads, and lose much where other tests want the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MakeBench = Callable[..., Bench]
MakeRequest = Callable[..., GenerationRequest]


@pytest.fixture
def make_bench() -> MakeBench:
    def make(limits: Limits = DEFAULT_LIMITS, *, max_model_len: int = 128, capacity: int = 1 << 20) -> Bench:
        model = StubModel(limits)
        runner = ModelRunner(model, limits, max_model_len, torch.device("cpu"))
        admission = Admission(VOCAB, max_model_len, limits.block_size, limits.num_blocks)
        return Bench(EngineCore(runner, limits, admission, SystemClock(), capacity=capacity), model)

    return make


@pytest.fixture
def make_request() -> MakeRequest:
    def make(
        sequence_id: str = "s/0",
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 8,
        *,
        stop: tuple[int, ...] = (),
        min_tokens: int = 0,
        tenant: str = "t",
        salt: str = "",
        service_class: ServiceClass = ServiceClass.DEFAULT,
        num_resumed: int = 0,
        **sampling: object,
    ) -> GenerationRequest:
        return GenerationRequest(
            SequenceId(sequence_id),
            TenantId(tenant),
            list(prompt),
            StopConditions(max_tokens, stop, min_tokens),
            SamplingParams(**{"temperature": 0.0, **sampling}),
            service_class,
            salt,
            num_resumed,
        )

    return make


@pytest.fixture
def stub_logits() -> Callable[[Sequence[int]], np.ndarray]:
    return logits_after

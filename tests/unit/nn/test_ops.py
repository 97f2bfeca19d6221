"""The kernels agree with plain torch, for both dtypes, over ragged batches and head shapes."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.nn.batch import StepBatch
from headrace.nn.config import ModelConfig
from headrace.nn.kv import KVCache
from headrace.nn.ops.cpu import CpuOps
from headrace.nn.ops.interface import HeadNorms
from headrace.nn.ops.reference import ReferenceOps
from headrace.nn.rope import Rotary
from headrace.nn.rope_config import RopeConfig
from headrace.nn.step import Step

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# Each shape compiles its own kernels (cached on disk), so shapes come from a short list and batches from everywhere.
HEADS = [(9, 3, 64), (3, 3, 32), (14, 2, 128), (4, 2, 40)]
"""Query heads, key heads, head dimension; the last does not fill vectors and goes to torch."""


def config_of(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        hidden_size=64,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=96,
        vocab_size=128,
        max_position_embeddings=2048,
        rope=RopeConfig(),
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        sliding_windows=(None,),
    )


def batch_of(lengths: list[tuple[int, int]], block_size: int, seed: int) -> tuple[StepBatch, int]:
    """A batch of ``(context, query)`` lengths in shuffled blocks, and how many blocks it needs."""
    rng = np.random.default_rng(seed)
    counts = [-(-(context + query) // block_size) for context, query in lengths]
    blocks = rng.permutation(sum(counts)).astype(np.int32)
    table = np.full((len(lengths), max(counts)), -1, np.int32)
    positions, slots, at = [], [], 0
    for row, ((context, query), count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = blocks[at : at + count]
        at += count
        position = np.arange(context, context + query)
        positions.append(position)
        slots.append(table[row, position // block_size] * block_size + position % block_size)
    queries = np.array([query for _, query in lengths])
    num_tokens = int(queries.sum())
    batch = StepBatch(
        token_ids=rng.integers(0, 128, num_tokens),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        query_start=np.concatenate([[0], queries.cumsum()]).astype(np.int32),
        kv_lens=np.array([context + query for context, query in lengths], np.int32),
        block_table=table,
        logit_rows=np.arange(num_tokens, dtype=np.int64),
    )
    return batch, sum(counts)


LENGTHS = st.lists(st.tuples(st.integers(0, 600), st.integers(1, 40)), min_size=1, max_size=5)


@DTYPES
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    lengths=LENGTHS,
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([16, 4]),
    window=st.sampled_from([None, 1, 7, 300]),
    normed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention_agrees(
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    window: int | None,
    normed: bool,
    seed: int,
) -> None:
    config = config_of(*heads)
    batch, num_blocks = batch_of(lengths, block_size, seed)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    qkv = random(batch.num_tokens, config.qkv_size)
    norms = HeadNorms(random(config.head_dim), random(config.head_dim)) if normed else None
    step = Step.of(batch, Rotary(config.rope, config.head_dim, CPU), block_size, CPU)
    caches = [KVCache(config, num_blocks, block_size, dtype, CPU) for _ in range(2)]
    keys, values = random(*caches[0].keys[0].shape), random(*caches[0].values[0].shape)
    for cache in caches:
        cache.keys[0].copy_(keys)
        cache.values[0].copy_(values)
    expected = ReferenceOps(config).attention(qkv.clone(), norms, step, caches[0], 0, window)
    actual = CpuOps(config, dtype).attention(qkv.clone(), norms, step, caches[1], 0, window)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches[1].keys[0], caches[0].keys[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(caches[1].values[0], caches[0].values[0])


@DTYPES
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 70), size=st.integers(1, 700), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_norm_agrees(dtype: torch.dtype, rows: int, size: int, scale: float) -> None:
    config = config_of(4, 4, 32)
    generator = torch.Generator().manual_seed(rows * 1000 + size)
    x = torch.randn(rows, size, generator=generator).mul(scale).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    expected = ReferenceOps(config).norm(x, weight)
    actual = CpuOps(config, dtype).norm(x, weight)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
def test_what_lies_beyond_a_sequence_in_its_last_block_does_not_matter(dtype: torch.dtype) -> None:
    config = config_of(9, 3, 64)
    batch, num_blocks = batch_of([(4, 1), (0, 3)], 16, seed=0)
    step = Step.of(batch, Rotary(config.rope, config.head_dim, CPU), 16, CPU)
    qkv = torch.randn(batch.num_tokens, config.qkv_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    context = torch.arange(4)
    blocks = torch.full((4,), int(batch.block_table[0, 0]))
    known = context.to(dtype)[:, None, None].expand(-1, config.num_kv_heads, config.head_dim)
    outputs = []
    for filler in (0.0, float("nan")):
        kv = KVCache(config, num_blocks, 16, dtype, CPU)
        kv.keys[0].fill_(filler)
        kv.values[0].fill_(filler)
        kv.write(0, blocks, context, known, known)
        outputs.append(CpuOps(config, dtype).attention(qkv.clone(), None, step, kv, 0, None).clone())
    assert torch.equal(outputs[0], outputs[1])


@DTYPES
def test_the_cache_gives_back_what_was_written(dtype: torch.dtype) -> None:
    config = config_of(4, 2, 40)
    kv = KVCache(config, 3, 4, dtype, CPU)
    keys, values = (torch.randn(12, 2, 40, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(2))
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    kv.write(0, slots // 4, slots % 4, keys[slots], values[slots])
    for read, written in zip(kv.read(0, torch.arange(3)), (keys, values), strict=True):
        assert torch.equal(read, written.transpose(0, 1))


def test_sixteen_bit_elements_need_even_sizes() -> None:
    with pytest.raises(ValueError, match="must be even"):
        KVCache(config_of(4, 2, 40), 3, 5, torch.bfloat16, CPU)

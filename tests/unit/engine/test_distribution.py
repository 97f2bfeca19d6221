"""The race as a kernel against the race in torch, and how little its choice hangs on the last bits of logits."""

import numpy as np
import pytest
import torch

from headrace.engine.distribution import draw, race_in_torch
from headrace.engine.random import row_keys
from headrace.nn.ops.race import race

VOCAB = 20_011


def keys_of(n, seed):
    return torch.from_numpy(row_keys(np.full(n, seed), np.arange(n)))


def logits_like_a_models(n, seed, vocab=VOCAB):
    """Few likely tokens and a long tail: power laws from steep to flat, in a random order of ids."""
    generator = torch.Generator().manual_seed(seed)
    steepness = torch.rand(n, 1, generator=generator) * 2 + 0.3
    ranks = torch.rand(n, vocab, generator=generator).argsort(1).float() + 1
    return 12 - steepness * ranks.log() + torch.randn(n, vocab, generator=generator) * 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["model", "flat", "peaked"])
def test_kernel_and_torch_choose_the_same(dtype, kind):
    n = 96
    logits = logits_like_a_models(n, 1)
    logits *= {"model": 1.0, "flat": 0.0, "peaked": 8.0}[kind]
    logits = logits.to(dtype)
    logits[::7, ::3] = -torch.inf
    temperature = torch.tensor([0.0, 1e-40, 0.05, 0.7, 1.0, 5.0]).repeat(n // 6)
    floor = torch.full((n,), -torch.inf)
    last_id = torch.full((n,), VOCAB, dtype=torch.int32)
    # Every second row keeps its upper half only, and of those equal to its edge the ones at the front.
    floor[::2] = logits[::2].float().median(1).values.clamp(min=-1e30)
    last_id[::4] = VOCAB // 3
    floor[::4] = logits[::4].float().amax(1)
    first = logits[::4].float().numpy().argmax(1)
    last_id[::4] = torch.maximum(last_id[::4], torch.from_numpy(first).int())
    args = (temperature, keys_of(n, 2), floor, last_id)
    assert race(logits, *args).tolist() == race_in_torch(logits, *args).tolist()


def test_kernel_and_torch_name_the_same_rows_without_numbers():
    logits = torch.randn(8, 300)
    logits[1, 299] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5] = -torch.inf
    logits[5] = torch.nan
    args = (torch.tensor([0.0, 1.0] * 4), keys_of(8, 0), torch.full((8,), -torch.inf), torch.full((8,), 300).int())
    kernel, reference = race(logits, *args), race_in_torch(logits, *args)
    assert kernel.tolist() == reference.tolist()
    assert (kernel < 0).nonzero()[:, 0].tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("num_rows", "top_k", "top_p", "min_p"), [(32, 0, 1.0, 0.0), (4, 50, 1.0, 0.0), (4, 0, 0.9, 0.0), (4, 0, 1.0, 0.05)]
)
def test_noise_in_the_last_bits_of_logits_hardly_ever_changes_a_token(num_rows, top_k, top_p, min_p):
    n = 250
    rows = logits_like_a_models(num_rows, 3)
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(4)) * 1e-5
    one = torch.ones(n)
    flips = 0
    for i, row in enumerate(rows):
        args = (one, torch.full((n,), top_k), one * top_p, one * min_p, keys_of(n, i))
        plain, noisy = (draw(logits.expand(n, -1), *args) for logits in (row, row + noise[i]))
        flips += int((plain != noisy).sum())
    assert flips <= 0.0005 * num_rows * n


def test_a_mixed_step_draws_every_row_as_it_would_alone():
    n = 12
    logits = logits_like_a_models(n, 5)
    temperature = torch.tensor([0.0, 0.8, 1.0] * 4)
    top_k, top_p = torch.tensor([0, 0, 0, 40, 0, 3] * 2), torch.tensor([1.0, 0.9, 1.0, 0.5] * 3)
    args = (temperature, top_k, top_p, torch.zeros(n), keys_of(n, 6))
    together = draw(logits, *args)
    alone = torch.cat([draw(logits[i : i + 1], *(arg[i : i + 1] for arg in args)) for i in range(n)])
    assert together.tolist() == alone.tolist()
    assert together[::3].tolist() == logits[::3].argmax(1).tolist()

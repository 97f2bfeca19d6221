"""A batch that points outside its arrays is refused before anything is computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.nn.batch import StepBatch

GOOD = StepBatch(
    token_ids=np.array([1, 2, 3]),
    positions=np.array([4, 0, 1], np.int32),
    slot_mapping=np.array([20, 32, 33], np.int32),
    query_start=np.array([0, 1, 3], np.int32),
    kv_lens=np.array([5, 2], np.int32),
    block_table=np.array([[1], [2]], np.int32),
    logit_rows=np.array([0, 2]),
)
LIMITS = {"vocab_size": 10, "max_positions": 8, "num_blocks": 3, "block_size": 16}


def test_a_good_batch_passes() -> None:
    GOOD.check(**LIMITS)
    replace(GOOD, block_table=np.array([[1, -1], [2, 99]], np.int32)).check(**LIMITS)  # unused entries hold anything


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": np.array([1, 2, 10])}, "token_ids"),
        ({"token_ids": np.array([1, 2, -1])}, "token_ids"),
        ({"token_ids": np.array([1, 2, 3], np.int32)}, "token_ids"),
        ({"positions": np.array([4, 0, 8], np.int32)}, "positions"),
        ({"positions": np.array([4, 0], np.int32)}, "positions"),
        ({"slot_mapping": np.array([48, 0, 1], np.int32)}, "slot_mapping"),
        ({"query_start": np.array([0, 1, 2], np.int32)}, "query_start"),
        ({"query_start": np.array([0, 3, 3], np.int32)}, "query_start"),
        ({"query_start": np.array([0, 3], np.int32)}, "query_start"),
        ({"kv_lens": np.array([5, 1], np.int32)}, "kv_lens"),
        ({"kv_lens": np.array([17, 2], np.int32)}, "kv_lens"),
        ({"block_table": np.array([[3], [2]], np.int32)}, "block_table"),
        ({"block_table": np.array([[1]], np.int32)}, "block_table"),
        ({"block_table": np.array([[1, 0], [2, 0]], np.int32)[:, ::2]}, "block_table"),
        ({"logit_rows": np.array([3])}, "logit_rows"),
        ({"kv_lens": np.array([], np.int32), "token_ids": np.array([], np.int64)}, "at least one"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(GOOD, **changes).check(**LIMITS)

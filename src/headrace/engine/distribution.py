"""Drawing from a row of logits by an exponential race among its tokens.

The winner is the arg max of ``logit - T × ln(E)``, where the exponential number ``E`` belongs to the token, the row's
seed and its position (Gumbel-max: each token wins with its softmax probability at temperature T). Each token keeps its
own noise, so rounding errors in the logits change the choice only where the two best scores are nearer to each other
than the errors are. The choice is a function of the row, its parameters and its key alone.
"""

import torch

from headrace.engine.random import log_exponentials, token_bits
from headrace.nn.ops.race import DTYPES, race

_CHUNK = 256
_WINDOWS = (256, 4096)
"""How many of the likeliest tokens to look at before all of them are sorted."""
_FILTERED_TILE_ROWS = 32
"""Rows filtered together on a CPU: few enough for its cache, enough to make the number of small operations bearable."""
_TILE_ELEMENTS = 2**21
"""Scores that the race in torch holds at once, in several copies of 8 bytes each."""


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """One token id for each row ``[num_rows] int64``, -1 where the highest logit is not a finite number.

    ``logits [num_rows, vocab]`` of any float dtype; ``temperature``, ``top_p``, ``min_p`` ``[num_rows] float32``
    (temperature 0: the first arg max); ``top_k [num_rows] int64`` (0: all); ``keys [num_rows, 2] int32`` as
    :func:`headrace.engine.random.row_keys` gives them.

    Of equally likely tokens at the edge of what ``top_k`` or ``top_p`` keep, those with lower ids stay.
    """
    vocab = logits.shape[1]
    filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)
    floor = torch.full_like(temperature, -torch.inf)
    last_id = torch.full_like(temperature, vocab, dtype=torch.int32)
    rows = (filtered & (temperature > 0.0)).nonzero()[:, 0]
    for tile in torch.split(rows, _FILTERED_TILE_ROWS if rows.device.type == "cpu" else max(1, len(rows))):
        floor[tile], last_id[tile] = _edges(
            logits[tile].float(), temperature[tile], top_k[tile], top_p[tile], min_p[tile]
        )
    if logits.device.type == "cpu":
        return race(logits if logits.dtype in DTYPES else logits.float(), temperature, keys, floor, last_id)
    return race_in_torch(logits, temperature, keys, floor, last_id)


def race_in_torch(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, floor: torch.Tensor, last_id: torch.Tensor
) -> torch.Tensor:
    """What :func:`headrace.nn.ops.race.race` does, on any device and for any float dtype."""
    vocab = logits.shape[1]
    winners = logits.argmax(1)
    broken = ~torch.isfinite(logits.gather(1, winners[:, None])[:, 0])
    token_ids = torch.arange(vocab, device=logits.device)
    for rows in torch.split((temperature > 0.0).nonzero()[:, 0], max(1, _TILE_ELEMENTS // vocab)):
        scores = logits[rows].double()
        edge = floor[rows, None]
        barred = (scores < edge) | ((scores == edge) & (token_ids > last_id[rows, None]))
        scores -= temperature[rows, None] * log_exponentials(token_bits(keys[rows], vocab))
        winners[rows] = scores.masked_fill_(barred, -torch.inf).argmax(1)
    return winners.masked_fill_(broken, -1)


def _edges(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit that each row keeps ``[num_rows] float32``, and the last id that it keeps of those equal to it.

    Looks at the likeliest tokens, and widens the window row by row until it surely holds all that is kept.
    """
    vocab = logits.shape[1]
    peak = logits.amax(1, keepdim=True)
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    total = torch.zeros_like(temperature, dtype=torch.float64)
    if ((k == vocab) & (top_p < 1.0)).any():
        total = _chunked(_weights(logits, peak, temperature)).sum(2, dtype=torch.float64).cumsum(1)[:, -1]
    floor = torch.full_like(temperature, -torch.inf)
    last_id = torch.full_like(temperature, vocab, dtype=torch.int32)
    # Rows that hold no numbers keep everything; the race names them.
    open_rows = torch.isfinite(peak[:, 0]).nonzero()[:, 0]
    for window in (*(w for w in _WINDOWS if w < vocab), vocab):
        if not len(open_rows):
            break
        values = logits[open_rows].topk(window, dim=1).values
        limit = k[open_rows]
        weights = _weights(values, peak[open_rows], temperature[open_rows])
        num_kept = _count_kept(weights, limit, top_p[open_rows], min_p[open_rows], total[open_rows])
        # Not settled while the window's end is kept, or as likely as the last token that is: more may lie beyond.
        # Nor while top_k reaches beyond the window, since top_p is a share of all that top_k leaves.
        edge = values.gather(1, num_kept[:, None] - 1)
        settled = (values[:, -1:] < edge)[:, 0] & ((limit <= window) | (limit == vocab)) | (window == vocab)
        floor[open_rows[settled]] = edge[settled, 0]
        num_tied_kept = num_kept - (values > edge).sum(1)
        split = ((values == edge).sum(1) > num_tied_kept) & settled
        if split.any():
            rows = open_rows[split]
            place = (logits[rows] == edge[split]).cumsum(1)
            last_id[rows] = (place < num_tied_kept[split, None]).sum(1, dtype=torch.int32)
        open_rows = open_rows[~settled]
    return floor, last_id


def _weights(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities at each row's temperature over the likeliest token's, whose logit is ``peak [num_rows, 1]``."""
    return (logits - peak).div_(temperature[:, None]).exp_()


def _count_kept(
    weights: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """How many of the sorted ``weights [num_rows, window]`` each row keeps, at least 1: ``[num_rows] int64``."""
    weights = weights.double()
    place = torch.arange(weights.shape[1], device=weights.device)
    weights *= place < k[:, None]
    cumulative = weights.cumsum(1)
    # top_p is a share of what top_k left.
    mass = torch.where(k <= weights.shape[1], cumulative[:, -1], total)
    by_p = (cumulative - weights) < (top_p.double() * mass)[:, None]
    by_p |= (top_p >= 1.0)[:, None]
    by_min = weights >= min_p[:, None]
    return (by_p & by_min & (place < k[:, None])).sum(1).clamp(min=1)


def _chunked(weights: torch.Tensor) -> torch.Tensor:
    """``[num_rows, vocab]`` as ``[num_rows, num_chunks, _CHUNK]``, filled up with zeros."""
    missing = -weights.shape[1] % _CHUNK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(len(weights), -1, _CHUNK)

"""Drawing from a row of logits by inverting its cumulative distribution at a given number.

The choice is a function of the row, its parameters and the number alone. Tokens stand in the order of their ids, so a
rounding error in one logit moves the borders a little instead of swapping neighbours' places, and every sum is made of
parts whose size does not depend on how many rows there are.
"""

import torch

_CHUNK = 256
_WINDOWS = (256, 4096)
"""How many of the likeliest tokens to look at before all of them are sorted."""
_TILE_ROWS = 8
"""Rows worked on together: few enough for their probabilities to stay in a CPU's cache."""
_FILTERED_TILE_ROWS = 32
"""More of those that are filtered, for which the number of small operations counts as well."""


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """One token id for each row ``[num_rows] int64``.

    ``logits [num_rows, vocab] float32``; ``temperature``, ``top_p``, ``min_p`` ``[num_rows] float32``;
    ``top_k [num_rows] int64`` (0: all); ``uniform [num_rows] float64`` in [0, 1).

    Of equally likely tokens at the edge of what ``top_k`` or ``top_p`` keep, those with lower ids stay.
    """
    vocab = logits.shape[1]
    filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows in _tiles((~filtered).nonzero()[:, 0], _TILE_ROWS):
        chosen[rows] = _draw_all(_tempered(logits, temperature, rows), uniform[rows])
    for rows in _tiles(filtered.nonzero()[:, 0], _FILTERED_TILE_ROWS):
        tempered = _tempered(logits, temperature, rows)
        chosen[rows] = _draw_filtered(tempered, top_k[rows], top_p[rows], min_p[rows], uniform[rows])
    return chosen


def _tiles(rows: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    size = num_rows if rows.device.type == "cpu" else max(1, len(rows))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _tempered(logits: torch.Tensor, temperature: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits of ``rows`` over their temperatures, moved so that the likeliest token's is 0."""
    tempered = logits[rows]
    tempered -= tempered.amax(1, keepdim=True)
    tempered /= temperature[rows, None]
    return tempered


def _draw_all(tempered: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """From all tokens: first the chunk of the vocabulary that the number falls into, then the token inside it.

    Overwrites ``tempered``.
    """
    weights = _chunked(tempered.exp_())
    borders = weights.sum(2, dtype=torch.float64).cumsum(1)
    target = uniform * borders[:, -1]
    chunk = _first_above(borders, target)
    rows = torch.arange(len(weights), device=weights.device)
    before = torch.where(chunk > 0, borders[rows, (chunk - 1).clamp(min=0)], 0.0)
    inside = weights[rows, chunk].cumsum(1, dtype=torch.float64)
    return chunk * _CHUNK + _first_above(inside, target - before)


def _draw_filtered(
    tempered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """From the likeliest tokens: widen the window row by row until it surely holds all that is kept."""
    vocab = tempered.shape[1]
    total = _chunked(tempered.exp()).sum(2, dtype=torch.float64).cumsum(1)[:, -1]
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    chosen = torch.empty(len(tempered), dtype=torch.int64, device=tempered.device)
    open_rows = torch.arange(len(tempered), device=tempered.device)
    for window in (*(w for w in _WINDOWS if w < vocab), vocab):
        values, ids = tempered[open_rows].topk(window, dim=1)
        limit = k[open_rows]
        num_kept = _count_kept(values, limit, top_p[open_rows], min_p[open_rows], total[open_rows])
        # Not settled while the window's end is kept, or as likely as the last token that is: more may lie beyond.
        # Nor while top_k reaches beyond the window, since top_p is a share of all that top_k leaves.
        edge = values.gather(1, num_kept[:, None] - 1)[:, 0]
        settled = (values[:, -1] < edge) & ((limit <= window) | (limit == vocab)) | (window == vocab)
        rows = open_rows[settled]
        if len(rows):
            chosen[rows] = _draw_kept(values[settled], ids[settled], num_kept[settled], uniform[rows])
        open_rows = open_rows[~settled]
        if not len(open_rows):
            break
    return chosen


def _count_kept(
    values: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """How many of the sorted ``values [num_rows, window]`` each row keeps, at least 1: ``[num_rows] int64``."""
    weights = values.exp().double()
    place = torch.arange(values.shape[1], device=values.device)
    weights *= place < k[:, None]
    cumulative = weights.cumsum(1)
    # top_p is a share of what top_k left.
    mass = torch.where(k <= values.shape[1], cumulative[:, -1], total)
    by_p = (cumulative - weights) < (top_p.double() * mass)[:, None]
    by_p |= (top_p >= 1.0)[:, None]
    by_min = weights >= min_p[:, None]
    return (by_p & by_min & (place < k[:, None])).sum(1).clamp(min=1)


def _draw_kept(values: torch.Tensor, ids: torch.Tensor, num_kept: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    ids, by_id = ids.sort(1)
    values = values.gather(1, by_id)
    by_value = values.argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(by_value)
    place.scatter_(1, by_value, torch.arange(values.shape[1], device=values.device).expand_as(by_value))
    weights = values.exp().double() * (place < num_kept[:, None])
    borders = weights.cumsum(1)
    return ids.gather(1, _first_above(borders, uniform * borders[:, -1])[:, None])[:, 0]


def _chunked(weights: torch.Tensor) -> torch.Tensor:
    """``[num_rows, vocab]`` as ``[num_rows, num_chunks, _CHUNK]``, filled up with zeros."""
    missing = -weights.shape[1] % _CHUNK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(len(weights), -1, _CHUNK)


def _first_above(borders: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place whose border is above the target ``[num_rows]``; one that has weight, whatever rounding does."""
    end = borders[:, -1]
    target = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    return torch.searchsorted(borders, target[:, None], right=True)[:, 0]

"""When results count as equal. Rounding depends on the shape of a batch, so that bits cannot be
compared; these rules take their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOGITS_TOLERANCE = 1e-4
"""Most difference of teacher-forced logits in float32."""
SURE_MARGIN = 1e-3
"""A greedy token may differ only where the reference's two best logits are closer than this."""
BF16_FACTOR = 1.5
"""Most error in half precision, in units of the error that the reference makes in the same
precision."""


def assert_same_logits(ours: Tensor, reference: Tensor) -> None:
    """Both [T, V] in float32: logits, or log probabilities, along the same tokens
    (teacher-forced)."""
    assert ours.shape == reference.shape, (
        f"logits have shape {list(ours.shape)}, not {list(reference.shape)}"
    )
    difference = (ours - reference).abs().max().item()
    # Written so that NaN, which is in no order, fails.
    assert difference <= LOGITS_TOLERANCE, (
        f"logits differ by {difference:.3g}, which is more than {LOGITS_TOLERANCE}"
    )


def assert_same_tokens(token_ids: Sequence[int], reference: Tensor) -> None:
    """Greedy tokens [T] and the reference's logits [T, V] at their positions."""
    assert len(token_ids) == len(reference), (
        f"{len(token_ids)} tokens, but {len(reference)} rows of logits"
    )
    best = reference.topk(2, dim=-1)
    sure = best.values[:, 0] - best.values[:, 1] > SURE_MARGIN
    wrong = sure & (torch.tensor(token_ids, device=reference.device) != best.indices[:, 0])
    places = wrong.nonzero()[:, 0].tolist()
    assert not places, (
        f"tokens at {places} are {[token_ids[i] for i in places]}, not "
        f"{best.indices[places, 0].tolist()}"
    )


def assert_bf16_error(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Compares half-precision results with the reference's in the same precision, and with exact
    ones (float32 or float64), one for one.

    Our error (root mean square over all) is at most BF16_FACTOR times theirs."""
    our_error = _error(ours, exact)
    their_error = _error(theirs, exact)
    assert our_error <= BF16_FACTOR * their_error, (
        f"error {our_error:.3g}, which is more than {BF16_FACTOR} times {their_error:.3g}"
    )


def _error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    squares = [
        (a.double() - b.double()).square().flatten() for a, b in zip(results, exact, strict=True)
    ]
    return torch.cat(squares).mean().sqrt().item()

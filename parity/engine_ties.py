"""What a near-tie of a router can excuse in a row with another best token.

Nearly every row has a near-tie somewhere, so that there is one says nothing; what it can do in that
row has to be as much as the two programs differ by. Two measurements tell:

- the exchange. Exact arithmetic is run again with a near-tied expert of the row in place of the
  other (or two at once, of the nearest). Both tokens, the engine's and ours, have to be near the
  best one, in the usual unit, in exact arithmetic as it is or with one exchange; and the deficit
  may be no larger than what an exchange moves these two logits by against each other, and the usual
  margin. A token that no decision brings near the best one is not excused.
- the row itself, where no exchange suffices. `torch_ref` in bf16 turns choices too, in this row and
  in earlier ones, whose states the row reads. The unit is then what bf16 moved this very row's
  logits by: the deficit, and both tokens in exact arithmetic, have to be within the usual multiple
  of it (`engine_margin`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from parity.engine_truth import Noise, Truth
from parity.tolerances import tolerance

PAIRED = 3  # nearest ties of a row that are also exchanged two at a time: three further passes


class Found(NamedTuple):
    """Whether near-ties explain a deficit, and the words that name them."""

    enough: bool
    words: str


def near_ties(truth: Truth, noise: Noise, at: int, token: int, best: int, deficit: float) -> Found:
    """The near-ties of row `at` (of all T rows) against a deficit.

    Exchanges run until they suffice, nearest ties first: each is a pass of the exact model.

    Args:
        token: the engine's best token in that row.
        best: ours, `deficit` ahead of the engine's in our logits.
    """
    ratios, margin = truth.gaps[at] / noise.gaps, tolerance("engine_margin").limit
    order = np.argsort(ratios, kind="stable").tolist()
    ties = [p for p in order if ratios[p] <= tolerance("engine_near_tie").limit]
    if not ties or not np.isfinite(deficit):
        return Found(False, "")
    words = "".join(_name(truth, at, place, ratios[place]) for place in ties)
    pair, exact = [token, best], truth.logits[at]
    near, moved, enough = _below(exact, pair), 0.0, False
    choose = truth.other_choice
    for places in _decisions(ties) if choose else ():
        assert choose
        now = _below(choose(at, places), pair)
        layers = " and ".join(str(truth.layers[p]) for p in places)
        words += f", layer {layers} decided otherwise: the recorded token {now[0]:.2g} below the "
        words += f"best, ours {now[1]:.2g}"
        moved = max(moved, abs(np.diff(now - _below(exact, pair)).item()))
        near, limit = np.minimum(near, now), margin * noise.logit
        if enough := bool(max(near) <= limit and deficit <= moved + limit):
            break
    unit = row_noise(truth, at)
    if not enough and max(deficit, *_below(exact, pair)) <= margin * unit:
        enough, words = True, f"{words}, but bf16 moves this row by {unit:.2g}"
    return Found(enough, words)


def _decisions(ties: list[int]) -> Iterator[tuple[int, ...]]:
    """What is decided otherwise: each tie alone, then the nearest ones in pairs."""
    for count, among in ((1, ties), (2, ties[:PAIRED])):
        yield from combinations(among, count)


def row_noise(truth: Truth, at: int) -> float:
    """Rms by which bf16 moves the logits of one row against each other, turned choices included."""
    error = truth.bf16[at] - truth.logits[at]
    return float(np.sqrt(np.square(error - error.mean()).mean()))


def _below(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """How far tokens are below the best of a row [V]."""
    return logits.max() - logits[ids]


def _name(truth: Truth, at: int, place: int, ratio: float) -> str:
    pair = " and ".join(map(str, truth.edges[at, place].tolist()))
    return (
        f", near-tie in layer {truth.layers[place]} (experts {pair}, gap "
        f"{truth.gaps[at, place]:.1e}, {ratio:.2f} of its noise)"
    )

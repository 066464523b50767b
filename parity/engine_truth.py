"""What `torch_ref` says about recorded texts: exact logits, and how far bf16 is from them.

The distance between a bf16 run and exact arithmetic is the yardstick for every other bf16 program.
It is one draw of rounding noise, and another order of the same sums is another draw; so what one
draw decides (equal best tokens) is taken as the median over `THREADS`, which cut the sums
differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from parity.op_torch import DTYPES
from parity.records import Text
from parity.torch_threads import threads
from torch_ref.model import Model
from torch_ref.numerics import Numerics

THREADS = (1, 2, 4)
KEEP_BYTES = 32 << 30  # larger checkpoints are read anew in every pass instead of being held

Choose = Callable[[int, tuple[int, ...]], np.ndarray]  # (row, places of layers) -> logits [V]


class Truth(NamedTuple):
    """What `torch_ref` says about a text. L layers with experts, X chosen ones."""

    logits: np.ndarray  # float32 V, [T, V]
    gaps: np.ndarray  # [T, L], see `ops.Routing`
    chosen: np.ndarray  # experts, ascending, [T, L, X]
    edges: np.ndarray  # the last chosen expert and the next best, [T, L, 2]
    layers: list[int]  # 0-based
    bf16: np.ndarray  # bf16 H on one thread, [T, V]
    bf16_gaps: np.ndarray  # [T, L]
    bf16_chosen: np.ndarray  # [T, L, X]
    draws: list[np.ndarray]  # bf16 H by `THREADS`, where the engine's log-probabilities are known
    other_choice: Choose | None = None  # exact logits with the next best expert in those


class Noise(NamedTuple):
    """How far bf16 moves things, root of the mean square over rows where no choice differs."""

    logit: float
    gaps: np.ndarray  # by layer with experts, [L]


def measure(truths: list[Truth]) -> Noise:
    """The noise of `torch_ref` in bf16 (H) against float32, over all texts of a record.

    A shift that all logits of a row share moves no margin and is left out.
    """
    logits, gaps = [], []
    for t in truths:
        same = (t.chosen == t.bf16_chosen).all(-1)
        error = t.bf16 - t.logits
        error -= error.mean(-1, keepdims=True)
        logits.append(np.square(error[same.all(-1)]).mean(-1))
        gaps.append(np.where(same, np.square(t.bf16_gaps - t.gaps), np.nan))
    found = np.nanmean(np.concatenate(gaps), axis=0)
    return Noise(float(np.sqrt(np.concatenate(logits).mean())), np.sqrt(found))


class _Pass(NamedTuple):
    """One pass over a text."""

    logits: np.ndarray
    gaps: np.ndarray
    chosen: np.ndarray
    edges: torch.Tensor  # [T, L, 2]
    layers: list[int]


def torch_truths(
    checkpoint: Path, texts: list[Text], recorded: Callable[[Text], bool]
) -> dict[tuple[str, str], Truth]:
    """`torch_ref` on every text, by (case, kind).

    Args:
        checkpoint: the target's directory.
        texts: what to feed.
        recorded: whether the engine's log-probabilities of a text are known; then all draws run.
    """
    keep = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors")) <= KEEP_BYTES
    exact = Model.load(checkpoint, Numerics(DTYPES["float32"], "V"), keep=keep)
    rounded = Model.load(checkpoint, Numerics(DTYPES["bfloat16"], "H"), keep=keep)
    found: dict[tuple[str, str], Truth] = {}
    known: dict[tuple[bytes, bool], Truth] = {}
    for text in texts:
        key = text.fed.tobytes(), recorded(text)
        if key not in known:
            known[key] = _truth(exact, rounded, text, draw=recorded(text))
        found[text.key] = known[key]
    return found


def _truth(exact: Model, rounded: Model, text: Text, *, draw: bool) -> Truth:
    with threads(1):
        a, b = _pass(exact, text), _pass(rounded, text)
    draws = [b.logits] if draw else []
    for count in THREADS[1:] if draw else ():
        with threads(count):
            draws.append(_logits(rounded, text))
    return Truth(
        a.logits, a.gaps, a.chosen, a.edges.numpy(), a.layers, b.logits, b.gaps, b.chosen, draws,
        _other_choice(exact, text, a),
    )  # fmt: skip


def _logits(model: Model, text: Text, **settings) -> np.ndarray:
    ids = torch.from_numpy(text.fed.astype(np.int64))
    return model.forward(ids, model.new_state(), **settings).double().numpy()


def _pass(model: Model, text: Text) -> _Pass:
    record: dict[str, torch.Tensor] = {}
    logits = _logits(model, text, record=record)
    layers = sorted(int(k[5:7]) for k in record if k.endswith(".router_gap"))
    of = lambda name: [record[f"layer{i:02d}.router_{name}"] for i in layers]  # noqa: E731
    gaps, chosen = torch.stack(of("gap"), -1).double(), torch.stack(of("idx"), 1)
    return _Pass(logits, gaps.numpy(), chosen.numpy(), torch.stack(of("edge"), 1), layers)


def _other_choice(model: Model, text: Text, exact: _Pass) -> Choose:
    @lru_cache(maxsize=1024)
    def choose(row: int, places: tuple[int, ...]) -> np.ndarray:
        forced = {}
        for place in places:
            last, following = exact.edges[row, place]
            ids = torch.from_numpy(exact.chosen[:, place].copy())
            ids[row][ids[row] == last] = following
            forced[exact.layers[place]] = ids
        with threads(1):
            return _logits(model, text, forced=forced)[row].copy()

    return choose

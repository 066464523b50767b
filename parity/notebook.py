"""Everything a notebook needs, under one name: `from parity import notebook as k3`.

    session = k3.make_tiny("build/notebooks")     or k3.load("CKPT", draft="DRAFT")
    first = k3.prefill(session, [5, 17, 101], record=True)
    first.stages["layer03.heads"]                 what a stage gave, [T, ...]
    then = k3.step(session, first.state)          one token; `first.state` stays valid
    other = k3.replace_stages(session, kda=mine)  this session only
    k3.compare(other, first.state.ids).table()    against PyTorch, layer by layer

`Session` and `State` are frozen, every function returns new ones, and there is no global state. The
names in `__all__` are stable: they change with an entry in the changelog only.

Here are the comparisons with `torch_ref`; the rest comes from `jax_impl.session`,
`jax_impl.session_run` and `jax_impl.session_view`. PyTorch is imported by the functions that need
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from jax_impl.acceptance_config import Acceptance
from jax_impl.session import (
    Drafts,
    Pass,
    Session,
    SessionError,
    State,
    load,
    make_tiny,
    replace_config,
    replace_run,
    replace_stages,
    require_recorded,
    require_session,
)
from jax_impl.session_checks import require_kind, require_one_of, require_whole, token_ids
from jax_impl.session_run import draft, feed, greedy, new_state, prefill, step, verify
from jax_impl.session_view import depth_mixtures, kda_state, latent_rows
from parity import metrics
from parity.verdict import Verdict

if TYPE_CHECKING:
    from torch_ref.model import Model

__all__ = [
    "Acceptance", "Comparison", "Drafts", "Pass", "Reference", "Session", "SessionError", "State",
    "Verdict", "compare", "depth_mixtures", "draft", "drift", "feed", "greedy", "kda_state",
    "latent_rows", "load", "make_tiny", "new_state", "prefill", "replace_config", "replace_run",
    "replace_stages", "step", "torch_greedy", "torch_prefill", "verify",
]  # fmt: skip

Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reference:
    """A sequence through `torch_ref`.

    Attributes:
        ids: the tokens.
        logits: [T, vocabulary].
        streams: by name, as `torch_ref.model.Model.forward` records them
            (`layer03.prefix_sum_out` [T, D]), and `layerNN.kda_state_vk` [H, V, K] at the end.
    """

    ids: tuple[int, ...]
    logits: Doubles
    streams: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Verdicts of a session against `torch_ref` on the same tokens.

    Attributes:
        verdicts: logits and choices of the whole sequence (case `whole`), then every layer on the
            reference's own input of that layer (`injected layerNN`), so that errors do not chain.
    """

    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether everything ran and held."""
        return all(v.passed for v in self.verdicts)

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """What did not hold, in order of depth."""
        return tuple(v for v in self.verdicts if not v.passed)

    def by_layer(self, quantity: str) -> dict[int, Verdict]:
        """The verdicts on one quantity of the injected layers, by 0-based layer.

        Raises:
            SessionError: no layer has it; lists those there are.
        """
        layers = [v for v in self.verdicts if v.where.case.startswith("injected layer")]
        found = {
            int(v.where.case.removeprefix("injected layer")): v
            for v in layers
            if v.quantity == quantity
        }
        if not found:
            known = sorted({v.quantity for v in layers})
            raise SessionError(f"{quantity!r}: expected one of {', '.join(known)}")
        return found

    def table(self) -> str:
        """One line per verdict: case, quantity, metric, value, limit, outcome."""
        lines: list[tuple[str, ...]] = [("case", "quantity", "metric", "value", "limit", "")]
        for v in self.verdicts:
            value, limit = ("-" if x is None else f"{x:.2e}" for x in (v.value, v.limit))
            lines.append((v.where.case, v.quantity, v.judged, value, limit, v.status))
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        return "\n".join(
            "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def torch_prefill(
    session: Session,
    ids: Sequence[int],
    *,
    dtype: Literal["float32", "bfloat16", "float64"] | None = None,
    profile: Literal["H", "V"] | None = None,
) -> Reference:
    """The session's checkpoint through `torch_ref`, on the same tokens.

    It reads the folder: replaced stages, settings or weights of the session do not reach it.

    Args:
        session: names the folder.
        ids: the tokens.
        dtype: None: the session's.
        profile: None: the session's.

    Raises:
        SessionError: the folder is a prepared checkpoint, which `torch_ref` does not read.
            Also no tokens, ids that are no whole numbers of the vocabulary, or a `dtype` or
            `profile` that there is not.
    """
    from parity.pair import reference

    known = _known(session, ids)
    logits, streams = reference(_model(session, dtype, profile), np.asarray(known, np.int64))
    return Reference(known, logits, streams)


def torch_greedy(session: Session, prompt: Sequence[int], steps: int) -> tuple[int, ...]:
    """What `torch_ref` puts behind a prompt, in the session's dtype and profile; as `greedy`."""
    from torch_ref.model import greedy as decode

    require_whole("steps", steps, 1)
    known = _known(session, prompt)
    found, _ = decode(_model(session, None, None), list(known), steps)
    return tuple(int(i) for i in found)


def compare(session: Session, ids: Sequence[int], *, prompt: int = 1) -> Comparison:
    """A session against `torch_ref`: logits, choices, and every layer on the reference's input.

    Distances, limits and their reasons are those of `python -m parity compare`. Latent caches in
    FP8 are not compared here.

    Args:
        session: with the stages and settings to judge.
        ids: tokens of one sequence.
        prompt: how many of them were given; the choices behind them are judged.

    Raises:
        SessionError: no room for the tokens, ids that are no whole numbers of the vocabulary, or a
            folder that `torch_ref` does not read.
    """
    ids = _known(session, ids)
    require_whole("prompt", prompt, 1)
    from parity.driver import PAGE, ROWS, SLOTS, Driver
    from parity.layerwise import Built, build_layer
    from parity.pair import AGAINST, check_layers, check_logits, reference
    from parity.verdict import Where

    if session.run.fp8:
        raise SessionError("kv_dtype float8_e4m3fn: latent rows are compared unquantised only")
    if not 1 <= prompt <= len(ids):
        raise SessionError(f"prompt {prompt}: expected 1..{len(ids)}, the number of tokens")
    run, model = session.run, _model(session, None, None)
    where = Where(
        "compare", session.path.name, "whole", run.compute, run.profile, AGAINST, "session"
    )
    # recorded, as for `drift`: one compilation serves both
    own = prefill(session, ids, record=True).logits.astype(np.float64)
    array = np.asarray(ids, np.int64)
    want, streams = reference(model, array)
    verdicts = list(check_logits(where, own, want, prompt))
    pages = -(-len(ids) // PAGE) * (ROWS + 1) + 1
    room = replace(run, slots=SLOTS, pages=pages, page_size=PAGE)
    driver = Driver(session.config, session.weights, room, len(ids))
    build: Callable[..., Built] = partial(build_layer, backend=session.backend)
    verdicts += check_layers(where, driver, model, array, streams, build)
    return Comparison(tuple(verdicts))


def drift(found: Pass, reference: Reference) -> dict[str, float]:
    """How far a recorded pass is from the reference when errors chain: relative L2 by stream.

    Args:
        found: of `prefill(..., record=True)` on the reference's tokens.
        reference: of `torch_prefill`.

    Returns:
        `layerNN`, the running sum behind each layer, and `logits`, in order of depth. There is no
        limit on the former: rounding grows with depth, and `compare` judges layers alone.

    Raises:
        SessionError: nothing was recorded, other tokens, a pass over some of them only, or
            arguments of other types.
    """
    require_recorded(found)
    require_kind("reference", reference, Reference, "`torch_prefill` makes one")
    ids = found.state.ids[: found.state.position]
    if ids != reference.ids:
        raise SessionError(f"tokens differ: the pass has {ids}, the reference {reference.ids}")
    if (rows := len(found.logits)) != len(ids):
        raise SessionError(
            f"found a pass over {rows} of {len(ids)} tokens, expected all of them in one; use "
            "prefill(..., record=True)"
        )
    apart: dict[str, float] = {}
    for name, want in reference.streams.items():
        layer, _, stream = name.partition(".")
        if stream == "prefix_sum_out":
            own = found.stages[f"{layer}.prefix"] + found.stages[f"{layer}.delta"]
            apart[layer] = metrics.distance(own, want)["rel_l2"]
    apart["logits"] = metrics.distance(found.logits, reference.logits)["rel_l2"]
    return apart


def _known(session: Session, ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens of one sequence that the session's model knows."""
    require_session(session)
    known, last = token_ids(ids), session.config.vocab_size - 1
    if not known:
        raise SessionError("ids: found none, expected at least one token; give some")
    if outside := [i for i in known if not 0 <= i <= last]:
        raise SessionError(
            f"ids: found {outside[:5]}, expected ids of the vocabulary 0..{last}; use this "
            "model's tokenizer"
        )
    return known


def _model(session: Session, dtype: str | None, profile: str | None) -> Model:
    """The folder's model, in the session's numerics where nothing else is said."""
    from jax_impl.prepared import is_prepared
    from parity.op_torch import DTYPES
    from torch_ref.model import Model
    from torch_ref.numerics import Numerics

    if is_prepared(session.path):
        raise SessionError(
            f"{session.path}: a prepared checkpoint; torch_ref reads released ones, load that"
        )
    run = session.run
    dtype, profile = dtype or run.compute, profile or run.profile
    require_one_of("dtype", dtype, DTYPES)
    require_one_of("profile", profile, ("H", "V"))
    if run.kv_dtype not in (None, run.compute) and not run.fp8:
        raise SessionError(f"kv_dtype {run.kv_dtype}: torch_ref has {run.compute} or FP8 here")
    stored = ("fp8", run.kv_scale) if run.fp8 else ("compute", None)
    numerics = Numerics(
        DTYPES[dtype],
        profile,
        mla_norm_eps=run.mla_norm_eps,
        kv_dtype=stored[0],
        kv_scale=stored[1],
    )
    return Model.load(session.path, numerics)

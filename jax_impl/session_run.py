"""Passes of a session: prefill, decode, draft, verify. Pure: a state goes in, another comes out.

A pass compiles once for each number of tokens, stage table and setting.
"""

# pyright: reportUnknownMemberType=false
# JAX types some of its own functions in part.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import Backend
from jax_impl.cache import Cache, StepInputs, cache_shapes, make_cache
from jax_impl.draft_weights import DraftWeights
from jax_impl.drafter import propose, write_context
from jax_impl.model import forward
from jax_impl.params import Weights
from jax_impl.sampling_config import Sampling
from jax_impl.sequences import filters_of
from jax_impl.session import (
    Drafts,
    Floats,
    Pass,
    Session,
    SessionError,
    Stages,
    State,
    require_session,
    require_state,
    shapes_of,
)
from jax_impl.session_checks import Outputs, require_kind, require_whole, token_ids
from jax_impl.speculate import verify as verify_step
from jax_impl.static import DraftStatic, Static
from jax_impl.step import conclude

Settings = tuple[Static, DraftStatic | None, Backend]
Record = dict[str, jax.Array]


def new_state(session: Session) -> State:
    """The state before the first token."""
    require_session(session)
    config = None if session.draft is None else session.draft[0]
    return State((), 0, make_cache(session.config, session.run, draft=config))


def prefill(
    session: Session,
    ids: Sequence[int],
    *,
    record: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Pass:
    """All of a prompt in one pass; the state after it knows the first generated token.

    Raises:
        SessionError: see `feed`.
    """
    return feed(
        session, new_state(session), ids, record=record, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, seed=seed,
    )  # fmt: skip


def step(
    session: Session,
    state: State,
    *,
    record: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Pass:
    """Plain decoding: the anchor in, one token out."""
    return feed(
        session, state, (), record=record, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed,
    )  # fmt: skip


def feed(
    session: Session,
    state: State,
    ids: Sequence[int],
    *,
    record: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Pass:
    """The waiting anchor, if there is one, and further known tokens, in one pass.

    Args:
        session: the model.
        state: where the sequence stands.
        ids: tokens behind `state.ids`.
        record: keep every stage's output.
        temperature: of the draw of the next token; 0 takes the largest logit.
        top_k: how many of the most probable tokens may be drawn; 0: all. The filters need a
            temperature; passes with some are compiled apart.
        top_p: draw from the most probable tokens that have this probability together; 1: from all.
        min_p: share of the largest probability that a token needs to be drawn; 0: none.
        seed: of the draw, which depends on (seed, position) alone.

    Raises:
        SessionError: nothing to process, ids that are no whole numbers of the vocabulary, no room,
            an argument of another type, a state whose caches
            have other shapes or dtypes, or draws that are out of range. A state of a session with
            equal shapes is taken: that is how one state goes on under replaced stages. Whether
            it was computed with the same weights is not looked at.
    """
    require_state(session, state)
    known = (*state.ids, *token_ids(ids))
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    inputs = _inputs(session, state, known[state.position :], sampling)
    settings, weights = _parts(session)
    cache, token, logits, stages = _build_pass(*settings, record)(*weights, state.cache, inputs)
    new = (int(token[0]),)
    return Pass(State(known + new, len(known), cache), new, _host(logits[0]), _named(stages))


def draft(
    session: Session,
    state: State,
    drafts: int = 7,
    *,
    sample: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
) -> Drafts:
    """What the drafter proposes behind the anchor.

    Args:
        session: with a drafter.
        state: after a pass of this session.
        drafts: K.
        sample: draw from the drafter's distribution at `temperature`; else its largest logits.
        temperature: as of `feed`; so is `seed`. A drafter has no filters.

    Raises:
        SessionError: no drafter, no anchor, or no room for the block.
        ConfigError: K out of range.
    """
    require_state(session, state)
    if session.draft is None:
        raise SessionError("this session has no drafter; give `draft` to `load`")
    Acceptance().require(drafts)
    anchor = _anchor(state)
    _room(session, state.position + 1 + drafts)
    inputs = _inputs(session, state, (anchor,), Sampling(temperature, seed=seed))
    settings, weights = _parts(session)
    found, logits = _build_draft(*settings, drafts, sample)(*weights, state.cache, inputs)
    tokens = tuple(int(i) for i in found[0])
    return Drafts(tokens, None if logits is None else _host(logits[0]))


def verify(
    session: Session,
    state: State,
    drafts: Drafts | Sequence[int],
    method: Acceptance = Acceptance(),  # noqa: B008  (frozen)
    *,
    record: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Pass:
    """One speculative step: judge anchor and drafts, keep what was accepted and one token more.

    Args:
        session: the model.
        state: after a pass of this session.
        drafts: of `draft`, or any tokens.
        method: the rule, see `Acceptance`.
        record: keep every stage's output, those of rejected rows included.
        temperature: as of `feed`; so are the filters, which restrict the target, and `seed`.

    Raises:
        SessionError: no anchor, no room, ids outside the vocabulary, draft logits missing or of
            another shape, or arguments of other types.
        ConfigError: a method that does not fit the number of drafts.
    """
    require_state(session, state)
    given = _drafts(session, drafts, method)
    anchor = _anchor(state)
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    inputs = _inputs(session, state, (anchor, *given.tokens), sampling, given.logits)
    settings, weights = _parts(session)
    found = _build_verify(*settings, method, record)(*weights, state.cache, inputs)
    cache, tokens, count, logits, stages = found
    new = tuple(int(i) for i in tokens[0, : int(count[0])])
    after = State(state.ids + new, state.position + len(new), cache)
    return Pass(after, new, _host(logits[0]), _named(stages))


def greedy(session: Session, prompt: Sequence[int], steps: int) -> tuple[int, ...]:
    """The `steps` tokens that plain greedy decoding puts behind a prompt."""
    require_whole("steps", steps, 1)
    state = prefill(session, prompt).state
    for _ in range(steps - 1):
        state = step(session, state).state
    return state.ids[len(prompt) :]


def _parts(session: Session) -> tuple[Settings, tuple[Weights, DraftWeights | None]]:
    """What is compiled in, and the weights that a pass takes."""
    static = Static(session.config, session.run)
    if session.draft is None:
        return (static, None, session.backend), (session.weights, None)
    config, weights = session.draft
    return (static, DraftStatic(config, session.run), session.backend), (session.weights, weights)


def _drafts(session: Session, drafts: object, method: object) -> Drafts:
    """Drafts that `method` can judge; `Drafts`, or any tokens."""
    require_kind("method", method, Acceptance, "such as Acceptance('block', 'probabilistic')")
    given = drafts if isinstance(drafts, Drafts) else Drafts(token_ids(drafts, "drafts"))
    given = replace(given, tokens=token_ids(given.tokens, "drafts"))
    rule = cast("Acceptance", method)
    rule.require(len(given.tokens))
    if (rule.drafting == "probabilistic") != (given.logits is not None):
        raise SessionError(
            f"drafting {rule.drafting!r} and draft logits "
            f"{'missing' if given.logits is None else 'given'}: they belong to drawn drafts, "
            "draft(..., sample=True) with Acceptance(drafting='probabilistic')"
        )
    expected = (len(given.tokens), session.config.vocab_size)
    if given.logits is not None and (found := np.shape(given.logits)) != expected:
        raise SessionError(
            f"draft logits: found shape {found}, expected {expected}, a row for each draft; give "
            "what `draft` returned"
        )
    return given


def _anchor(state: State) -> int:
    if len(state.ids) != state.position + 1:
        raise SessionError(
            f"{len(state.ids)} known tokens, {state.position} processed: expected one more than "
            "processed, the anchor; prefill first"
        )
    return state.ids[-1]


def _room(session: Session, length: int) -> None:
    if length > session.tokens:
        raise SessionError(
            f"{length} tokens: this session has room for {session.tokens}; make one with `tokens=`"
        )


def _inputs(
    session: Session,
    state: State,
    ids: Sequence[int],
    sampling: Sampling,
    logits: Floats | None = None,
) -> StepInputs:
    """Inputs of a pass over `ids` [T] behind the processed tokens; slot 0, pages in order."""
    vocabulary = session.config.vocab_size
    config = None if session.draft is None else session.draft[0]
    expected = shapes_of(cache_shapes(session.config, session.run, draft=config))
    problems: list[str] = []
    if not ids:
        problems.append("no tokens to process; expected at least one")
    if outside := [i for i in ids if not 0 <= i < vocabulary]:
        problems.append(f"ids outside the vocabulary 0..{vocabulary - 1}: {outside[:5]}")
    problems += sampling.problems()
    if shapes_of(state.cache) != expected:
        problems.append("the state has other caches than this session; prefill with this one")
    if problems:
        raise SessionError("nothing was run:" + "".join(f"\n  - {p}" for p in problems))
    _room(session, state.position + len(ids))
    return StepInputs(
        tokens=jnp.asarray([list(ids)], jnp.int32),
        count=jnp.asarray([len(ids)], jnp.int32),
        position=jnp.asarray([state.position], jnp.int32),
        slot=jnp.zeros(1, jnp.int32),
        page_table=jnp.arange(session.run.pages, dtype=jnp.int32)[None],
        temperature=jnp.asarray([sampling.temperature], jnp.float32),
        seed=jnp.asarray([sampling.seed], jnp.uint32),
        filters=filters_of([sampling], 1) if sampling.filters() else None,
        draft_logits=None if logits is None else jnp.asarray(logits)[None],
    )


def _taps(draft: DraftStatic | None) -> tuple[int, ...]:
    return () if draft is None else draft.config.target_layer_ids


def _remember(
    draft: DraftStatic | None,
    backend: Backend,
    weights: DraftWeights | None,
    cache: Cache,
    inputs: StepInputs,
    taps: jax.Array | None,
    count: jax.Array,
) -> Cache:
    """The drafter's context of the tokens that were kept, where there is a drafter."""
    if draft is None or weights is None or taps is None:
        return cache
    return write_context(draft, backend, weights, cache, inputs, taps, count)


@lru_cache(maxsize=64)
def _build_pass(
    static: Static, draft: DraftStatic | None, backend: Backend, record: bool
) -> Callable[..., tuple[Cache, jax.Array, jax.Array, Record]]:
    """The compiled pass of known tokens: cache, token [1], logits [1, T, X], stage outputs."""

    def run(
        weights: Weights, draft_weights: DraftWeights | None, cache: Cache, inputs: StepInputs
    ) -> tuple[Cache, jax.Array, jax.Array, Record]:
        kept: Record | None = {} if record else None
        found = forward(static, backend, weights, cache, inputs, kept, taps=_taps(draft))
        outputs, _ = conclude(static, backend, "all", weights, inputs, found.hidden)
        cache = _remember(
            draft, backend, draft_weights, found.cache, inputs, found.taps, inputs.count
        )
        return cache, outputs.token, outputs.logits, kept or {}

    return jax.jit(run)


@lru_cache(maxsize=64)
def _build_draft(
    static: Static, draft: DraftStatic, backend: Backend, drafts: int, sample: bool
) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
    """The compiled block: drafts i32 [1, K], and their logits if they are drawn.

    The block's own rows in the drafter's cache are dropped: the next context is written over them
    before anything reads them.
    """

    def run(
        weights: Weights, draft_weights: DraftWeights, cache: Cache, inputs: StepInputs
    ) -> tuple[jax.Array, jax.Array | None]:
        _, following = propose(
            static, draft, backend, weights, draft_weights, cache, inputs, inputs.tokens[:, 0],
            drafts=drafts, sample=sample,
        )  # fmt: skip
        return following.tokens[:, 1:], following.draft_logits

    return jax.jit(run)


@lru_cache(maxsize=64)
def _build_verify(
    static: Static, draft: DraftStatic | None, backend: Backend, method: Acceptance, record: bool
) -> Callable[..., tuple[Cache, jax.Array, jax.Array, jax.Array, Record]]:
    """The compiled verification: cache, tokens [1, T], count [1], logits [1, T, X], stages."""

    def run(
        weights: Weights, draft_weights: DraftWeights | None, cache: Cache, inputs: StepInputs
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array, Record]:
        kept: Record = {}
        cache, outputs, taps = verify_step(
            static, backend, method, weights, cache, inputs, _taps(draft), kept
        )
        cache = _remember(draft, backend, draft_weights, cache, inputs, taps, outputs.count)
        logits = kept.pop("logits")
        return cache, outputs.tokens, outputs.count, logits, kept if record else {}

    return jax.jit(run)


def _host(x: jax.Array) -> Floats:
    return np.asarray(x, np.float32)


def _named(stages: Mapping[str, jax.Array]) -> Stages:
    """On the host; bf16 as f32, which plots and NumPy understand."""
    found = Outputs()
    for name, x in stages.items():
        found[name] = np.asarray(x) if jnp.issubdtype(x.dtype, jnp.integer) else _host(x)
    return found

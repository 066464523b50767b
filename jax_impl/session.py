"""Sessions for notebooks: a model with its stage table, and pure functions over it.

A `Session` is what stays (model, settings, stages), a `State` is what moves (one sequence: its ids
and caches). Both are frozen; every function returns a new one. Nothing is donated, so a state stays
valid after a step from it, and two continuations can be tried from the same one. The price is a
second cache; for batches, several ranks and long runs there is `jax_impl.engine`.

Here sessions are made and changed; `jax_impl.session_run` runs them, `jax_impl.session_view` looks
into them, and `parity.notebook` has all of it under one name.
"""

# pyright: reportUnknownMemberType=false
# JAX types some of its own functions in part.
from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np
from numpy.typing import NDArray

from jax_impl.backend import AUTO, STAGES, Backend, Stage
from jax_impl.cache import Cache, StepInputs
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.config_rules import change_problems
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import DraftWeights, open_draft
from jax_impl.loader import load_draft, load_weights
from jax_impl.make_tiny import make_checkpoint
from jax_impl.params import Kda, Weights, abstract_weights
from jax_impl.problems import listed
from jax_impl.session_checks import (
    Checked,
    SessionError,
    require_kind,
    require_path,
    require_whole,
)
from jax_impl.stages import standard
from jax_impl.static import Static

Floats = NDArray[np.float32]
Stages = Mapping[str, NDArray[Any]]
PAGE = 16  # tokens per page of the latent cache


@dataclass(frozen=True, eq=False)
class Session:
    """A model on one device, how it is run, and the functions it is made of.

    Attributes:
        path: the checkpoint folder.
        config: the architecture.
        run: dtype, rounding profile and room of the caches (one slot).
        weights: of the target.
        draft: settings and weights of the drafter; None: no drafter.
        backend: one function per stage; only this session calls them.
    """

    path: Path
    config: ModelConfig
    run: RunConfig
    weights: Weights
    draft: tuple[DraftConfig, DraftWeights] | None = None
    backend: Backend = AUTO

    @property
    def tokens(self) -> int:
        """Most tokens that a state may hold."""
        return min(self.run.pages * self.run.page_size, self.config.max_position_embeddings)


@dataclass(frozen=True, eq=False)
class State:
    """One sequence between two passes.

    Attributes:
        ids: all known tokens. The first `position` are in the caches; after a pass one more is
            known, the anchor of the next step.
        position: tokens that the caches hold.
        cache: recurrent states, windows, latent rows.
    """

    ids: tuple[int, ...]
    position: int
    cache: Cache


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass of T tokens gave.

    Attributes:
        state: the state after it.
        new: tokens that it appended to `ids`: one, or accepted drafts and one more.
        logits: f32 [T, vocabulary]; row i judges the token behind token i of the pass.
        stages: stage outputs by name (`layer03.heads`), [T, ...]; empty unless recorded. bf16
            values come as f32. A name that is not there is a `SessionError`, which says which are.
    """

    state: State
    new: tuple[int, ...]
    logits: Floats
    stages: Stages


@dataclass(frozen=True, eq=False)
class Drafts:
    """Proposed tokens behind the anchor, and the logits f32 [K, vocabulary] if they were drawn."""

    tokens: tuple[int, ...]
    logits: Floats | None = None


def require_session(value: object) -> None:
    """Refuse what is no session.

    Raises:
        SessionError: it is something else.
    """
    require_kind("session", value, Session, "make one with `load` or `make_tiny`")


def require_state(session: object, state: object) -> None:
    """Refuse what is no session, or no state.

    Raises:
        SessionError: it is something else.
    """
    require_session(session)
    require_kind("state", state, State, "a Pass has one as `.state`, `new_state` makes one")


def require_recorded(found: object) -> None:
    """Refuse what is no pass, or one that recorded nothing.

    Raises:
        SessionError: it is something else.
    """
    require_kind("found", found, Pass, "`prefill`, `feed`, `step` and `verify` give one")
    if not cast("Pass", found).stages:
        raise SessionError("nothing was recorded; run the pass with record=True")


def load(
    path: str | Path,
    draft: str | Path | None = None,
    *,
    tokens: int = 256,
    compute: Literal["bfloat16", "float32"] = "float32",
    profile: Literal["H", "V"] = "V",
) -> Session:
    """A session on a checkpoint folder, released or prepared layout.

    Args:
        path: the target.
        draft: its DSpark drafter; None: no speculation.
        tokens: room of one sequence, drafts included.
        compute: dtype of activations; float32 rounds nowhere.
        profile: rounding profile, see `RunConfig`.

    Raises:
        ConfigError, CheckpointError: a folder is no usable checkpoint, or they do not fit together.
        DoesNotFitError: weights and cache exceed the device's memory.
        SessionError: no room was asked for, or an argument is of another type.
    """
    require_path("path", path)
    if draft is not None:
        require_path("draft", draft)
    require_whole("tokens", tokens, 1, "room for ")
    pages = -(-tokens // PAGE)
    run = RunConfig(compute=compute, profile=profile, slots=1, pages=pages, page_size=PAGE)
    checkpoint = Checkpoint.open(path)
    assert isinstance(checkpoint.config, ModelConfig)  # `open` refuses a drafter here
    if draft is None:
        return Session(Path(path), checkpoint.config, run, load_weights(checkpoint, run=run))
    config, drafter = DraftConfig.load(draft), open_draft(draft)
    config.require_target(checkpoint.config)
    weights = load_weights(checkpoint, run=run)
    return Session(Path(path), checkpoint.config, run, weights, (config, load_draft(drafter)))


def make_tiny(
    where: str | Path,
    preset: str = "tiny",
    seed: int = 0,
    *,
    overrides: dict[str, Any] | None = None,
    tokens: int = 256,
    compute: Literal["bfloat16", "float32"] = "float32",
    profile: Literal["H", "V"] = "V",
) -> Session:
    """A session on a small random target with its drafter, written under `where` on first use.

    The folder's name holds the arguments, and equal arguments give equal bytes, so that a folder
    that is there is used again.

    Args:
        where: a folder for such checkpoints.
        preset: one of `k3 make-tiny --preset`.
        seed: of the weights.
        overrides: fields of the target's `text_config` to change.
        tokens: as of `load`; so are the others.

    Raises:
        ValueError: no such preset, or overrides that give no model.
    """
    require_path("where", where)
    name = f"{preset}-seed{seed}"
    if overrides:
        require_kind("overrides", overrides, dict, "give {field of text_config: value}")
        text = json.dumps(overrides, sort_keys=True, default=str)
        name += "-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = Path(where) / name
    if not folder.exists():
        make_checkpoint(folder, preset, seed, overrides=overrides)
    both = folder / "target", folder / "draft"
    return load(*both, tokens=tokens, compute=compute, profile=profile)


def replace_stages(session: Session, **stages: Stage) -> Session:
    """A session in which some stages are other functions; the given one stays as it was.

    A function takes the arguments of the one it replaces (`jax_impl.stages.standard`) and returns
    values of the same shapes and dtypes, which the first pass checks. `kda_step`, which runs in
    prefill and plain decoding, is always made of `kda` and `kda_commit`, so that one replacement
    serves every kind of pass.

    Raises:
        SessionError: names that are no stages, or functions that do not take those arguments.
    """
    require_session(session)
    known = [name for name in STAGES if name != "kda_step"]
    problems: list[str] = []
    for name, function in stages.items():
        if name == "kda_step":
            problems.append("kda_step: it is made of kda and kda_commit; replace those")
        elif name not in known:
            problems.append(f"{name}: no such stage; there are {', '.join(known)}")
        elif (expected := _not_taken(name, function)) is not None:
            problems.append(f"{name}: expected a function that takes {expected}")
    if problems:
        raise SessionError("stages not replaced:" + "".join(f"\n  - {p}" for p in problems))
    checked = {name: Checked(name, function) for name, function in stages.items()}
    backend = session.backend._replace(**checked)
    if {"kda", "kda_commit"} & set(stages):
        backend = backend._replace(kda_step=StepOf(backend.kda, backend.kda_commit))
    return replace(session, backend=backend)


def replace_config(session: Session, **changes: Any) -> Session:
    """A session with other fields of `ModelConfig`, on the same weights.

    Raises:
        ConfigError: values that no model can have; lists all.
        SessionError: unknown fields, or a model whose weights would have other shapes.
    """
    require_session(session)
    known = {f.name for f in fields(ModelConfig)}
    if unknown := sorted(set(changes) - known):
        raise SessionError(f"{', '.join(unknown)}: no field of ModelConfig; {sorted(known)}")
    if problems := change_problems(session.config, changes):
        raise ConfigError(listed("config not replaced", problems, "Change these values."))
    config = replace(session.config, **changes)
    expected = shapes_of(abstract_weights(config))
    found = shapes_of(session.weights)
    other = [
        f"{name}: found {found.get(name)}, expected {expected.get(name)}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if other:
        raise SessionError(
            f"{changes}: other weights would be needed; write them with `make_tiny(overrides=...)`:"
            + "".join(f"\n  - {line}" for line in other)
        )
    return replace(session, config=config)


def replace_run(session: Session, **changes: Any) -> Session:
    """A session with other fields of `RunConfig` (dtype, profile, latent cache), one device.

    Raises:
        ConfigError: values out of range.
        SessionError: unknown fields, or fields that a session does not serve.
    """
    require_session(session)
    fixed = {"slots", "decode_backend", "experts", "dcp", "dcp_interleave"}
    known = {f.name for f in fields(RunConfig)} - fixed
    if unknown := sorted(set(changes) - known):
        raise SessionError(f"{', '.join(unknown)}: a session takes {', '.join(sorted(known))}")
    return replace(session, run=replace(session.run, **changes))


@dataclass(frozen=True)
class StepOf:
    """`kda_step` made of `kda` and `kda_commit`, as the standard one is."""

    kda: Stage
    commit: Stage

    def __call__(
        self,
        static: Static,
        w: Kda,
        layer: int | jax.Array,
        x: jax.Array,
        inputs: StepInputs,
        state: jax.Array,
        window: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Arguments and results of `jax_impl.stages.standard.kda_step`."""
        heads, pending = self.kda(static, w, layer, x, inputs, state, window)
        own = state[layer][None], window[layer][None]
        new_state, new_window = self.commit(static, [pending], inputs.count, inputs, *own)
        return heads, state.at[layer].set(new_state[0]), window.at[layer].set(new_window[0])


def shapes_of(tree: Any) -> dict[str, str]:
    """Shape and dtype of every array, by path."""
    leaves = cast("list[tuple[Any, Any]]", jax.tree_util.tree_leaves_with_path(tree))
    return {jax.tree_util.keystr(path): f"{x.dtype} {tuple(x.shape)}" for path, x in leaves}


def _not_taken(name: str, function: Stage) -> str | None:
    """The arguments that a stage gets, if `function` does not take them."""
    expected = inspect.signature(getattr(standard, name))
    kinds = expected.parameters.values()
    given = [p.name for p in kinds if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: p.name for p in kinds if p.kind is p.KEYWORD_ONLY}
    try:
        inspect.signature(function).bind(*given, **named)
    except TypeError:
        return f"({', '.join([*given, *(f'{name}=' for name in named)])})"
    return None

"""What `k3 selftest` does: do the stages of a backend compute here what they should?

Random weights at the sizes of one rank, exchanges looped back. Each stage against `auto` and
float32 (`selftest_stages`); then a model of four layers, whose steps with changing batches are run
one by one and as one program, which must give the same bits.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl import selftest_stages as stages
from jax_impl.backend import AUTO, STAGES, Backend, choose_backend
from jax_impl.cache import PAD, Cache, StepInputs
from jax_impl.collectives import Ranks
from jax_impl.compiling import compile_all, default_workers
from jax_impl.config import ConfigError, ModelConfig
from jax_impl.draft_config import MAX_DRAFTS
from jax_impl.output import json_number
from jax_impl.params import Weights
from jax_impl.plan import MAX_ROWS
from jax_impl.problems import listed, seed_problems
from jax_impl.progress import note
from jax_impl.random_step import (
    Case,
    cases,
    load_config,
    make_inputs,
    random_cache,
    random_stream,
    run_for,
)
from jax_impl.random_weights import random_weights
from jax_impl.sharding import Placement, require_ranks
from jax_impl.static import Static
from jax_impl.step import build_step, step

if TYPE_CHECKING:
    from jax_impl.cli import SelftestOptions

LAYERS = {"dense": 0, "kda": 1, "mla": 2}  # of the model below; the dense layer's attention is KDA
STEPS = 6  # of the replay


def small(config: ModelConfig) -> ModelConfig:
    """Four layers at the model's widths: dense, KDA, MLA at the start of a block, KDA."""
    return replace(
        config, num_hidden_layers=4, mla_layers=(2,), attn_res_block_size=2, first_k_dense_replace=1
    )


@dataclass(frozen=True)
class Share:
    """One rank count: sizes, weights and cache."""

    static: Static
    backend: Backend
    weights: Weights
    cache: Cache


def run_selftest(o: SelftestOptions, backend: Backend | None = None) -> dict[str, Any]:
    """The result document: conditions, what runs where, every comparison, `passed`.

    Args:
        o: what to check.
        backend: in place of the one that the options name.

    Raises:
        ConfigError: options that cannot be checked.
        BackendUnavailableError: the backend cannot run here; lists every reason.
    """
    config = _require(o)
    asked = cases(o.rows, o.drafts)
    comparisons: list[dict[str, Any]] = []
    replays: list[dict[str, Any]] = []
    where: dict[str, Any] = {}
    planned = [_planned(o, config, tp, asked, backend) for tp in o.tp]  # or refused, all of them
    begun, compiling = time.perf_counter(), 0.0
    for tp, (static, found) in zip(o.tp, planned, strict=True):
        note(f"selftest: TP{tp}, random weights")
        made = _made(o, static, found)
        every = changing_batches(made, o)
        compared = dict(_comparisons(made, asked, o))
        replayed = _replay_programs(made, every)
        jobs = [(key, p.lower) for key, p in [*compared.items(), *replayed.items()]]
        begin = time.perf_counter()
        compiled = compile_all(jobs, default_workers(), f"selftest: TP{tp}, compiling")
        compiling += time.perf_counter() - begin
        for (case, layer), program in compared.items():
            distances = compiled[case, layer](*program.args)
            comparisons += _judged(made, case, layer, distances)
        replays.append({"tp": tp} | replay(made, every, *(compiled[key] for key in replayed)))
        where = where or runs_where(made.backend, replayed["one step"])
    took = {"compilation": compiling, "all else": time.perf_counter() - begun - compiling}
    passed = all(c["passed"] for c in [*comparisons, *replays])
    return {
        "conditions": _conditions(o) | {"seconds": {k: round(v, 1) for k, v in took.items()}},
        "runs_where": where,
        "comparisons": comparisons,
        "replays": replays,
        "passed": passed,
    }


def _require(o: SelftestOptions) -> ModelConfig:
    """The four layers to test, if the options make sense; refuses everything at once."""
    problems = []
    if not o.tp or min(o.tp) < 1:
        problems.append(f"--tp: found {list(o.tp)}, expected numbers of at least 1")
    if not o.rows or min(o.rows) < 1 or max(o.rows) > MAX_ROWS:
        problems.append(f"--rows: found {list(o.rows)}, expected numbers from 1 to {MAX_ROWS}")
    if not 0 <= o.drafts <= MAX_DRAFTS:
        problems.append(f"--drafts {o.drafts}: expected 0 to {MAX_DRAFTS}")
    problems += seed_problems(o.seed)
    config = load_config(o.preset)
    least, most = 1 + o.drafts + STEPS, config.max_position_embeddings
    if not least <= o.context <= most:
        problems.append(f"--context {o.context}: expected {least} to {most:,}")
    if o.page_size < 1:
        problems.append(f"--page-size {o.page_size}: expected at least 1")
    if problems:
        do = "Change these; `k3 selftest --help` has all options."
        raise ConfigError(listed("selftest", problems, do))
    return small(config)


def _planned(
    o: SelftestOptions, config: ModelConfig, tp: int, asked: list[Case], backend: Backend | None
) -> tuple[Static, Backend]:
    run = run_for(asked, o.context, o.page_size, o.kv_dtype, o.backend)
    require_ranks(config, run, tp)
    found = choose_backend(run, config, tp) if backend is None else backend
    return Static(config, run, Ranks(tp)), found


def _made(o: SelftestOptions, static: Static, backend: Backend) -> Share:
    placement = Placement(static.ranks)
    weights = random_weights(static.config, placement, o.seed, static.run)
    cache = random_cache(static.config, static.run, placement, o.seed)
    return Share(static, backend, weights, cache)


@dataclass(frozen=True)
class Program:
    """A jitted function and what it is called with."""

    function: Any
    args: tuple[Any, ...]

    def lower(self) -> Any:
        """For compilation."""
        return self.function.lower(*self.args)


def _comparisons(
    made: Share, asked: list[Case], o: SelftestOptions
) -> Iterator[tuple[tuple[Case, str], Program]]:
    """Every stage of every kind of layer, and of the head, in every case."""
    static, backend, weights = made.static, made.backend, made.weights
    for case in asked:
        inputs, _ = make_inputs(static.config, static.run, case, o.context, 1, o.seed)
        stream = random_stream(static, case, o.seed)
        for kind, layer in LAYERS.items():
            run = stages.layer_stages(static, backend, layer, case.verifies)
            yield (case, kind), Program(run, (weights, made.cache, inputs, *stream))
        yield (case, "head"), Program(stages.head_stages(static, backend), (weights, *stream))


def _judged(
    made: Share, case: Case, layer: str, found: stages.Distances
) -> Iterator[dict[str, Any]]:
    """Each distance with its limit and whether it is within."""
    for name, distance in jax.device_get(found).items():
        mine, auto = float(distance.backend), float(distance.auto)
        limit = stages.most(name, auto, made.static.run.fp8)
        yield {
            "tp": made.static.ranks.size, "case": case.name, "layer": layer, "quantity": name,
            "error": json_number(mine), "error_of_auto": json_number(auto), "limit": limit,
            "passed": mine <= limit,
        }  # fmt: skip


def changing_batches(made: Share, o: SelftestOptions) -> StepInputs:
    """Inputs [STEPS, B, ..] whose live requests, slots and positions change; some rows are pad."""
    static, rng = made.static, np.random.default_rng(o.seed + 5)
    batch = min(8, static.run.slots)
    case = Case("replay", batch, 1)
    inputs, tokens = make_inputs(static.config, static.run, case, o.context, STEPS, o.seed)
    slot = np.stack([rng.permutation(batch) for _ in range(STEPS)]).astype(np.int32)
    live = rng.random((STEPS, batch)) < 0.75
    live[np.arange(STEPS), rng.integers(0, batch, STEPS)] = True  # at least one
    every = jax.tree.map(lambda a: jnp.broadcast_to(a, (STEPS, *a.shape)), inputs)
    return every.replace(
        tokens=tokens,
        count=jnp.asarray(live, jnp.int32),
        slot=jnp.asarray(np.where(live, slot, PAD)),
        position=jnp.asarray(rng.integers(0, o.context, (STEPS, batch)), jnp.int32),
        page_table=jnp.asarray(np.asarray(inputs.page_table)[slot]),
    )


def _inputs_of(every: StepInputs, i: Any) -> StepInputs:
    return jax.tree.map(lambda a: a[i], every)


def _replay_programs(made: Share, every: StepInputs) -> dict[str, Program]:
    """One step, and all steps as one program."""
    held, step = (made.weights, made.cache), build_step(made.static, made.backend, "last")
    return {
        "one step": Program(step, (*held, _inputs_of(every, 0))),
        "captured": Program(_captured(made.static, made.backend), (*held, every)),
    }


def replay(made: Share, every: StepInputs, one: Any, captured: Any) -> dict[str, Any]:
    """Steps one by one and as one program: the same tokens and the same bits of every cache?"""
    weights = made.weights
    cache, tokens = _copy(made.cache), []
    for i in range(STEPS):
        cache, outputs, _ = one(weights, cache, _inputs_of(every, i))
        tokens.append(outputs.token)
    after, together = captured(weights, _copy(made.cache), every)
    want = np.stack(jax.device_get(tokens))
    changed = _changed(cache, after)
    same = bool(np.array_equal(want, np.asarray(together)))
    return {
        "steps": STEPS,
        "batch": every.tokens.shape[1],
        "live": np.asarray(every.live).sum(1).tolist(),
        "tokens_equal": same,
        "caches_that_differ": changed,
        "passed": same and not changed,
    }


def _captured(static: Static, backend: Backend) -> Callable[..., tuple[Cache, jax.Array]]:
    def run(weights: Weights, cache: Cache, every: StepInputs) -> tuple[Cache, jax.Array]:
        def body(i: Any, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
            cache, tokens = carry
            cache, outputs, _ = step(static, backend, "last", weights, cache, _inputs_of(every, i))
            return cache, tokens.at[i].set(outputs.token)

        start = jnp.zeros(every.tokens.shape[:2], jnp.int32)
        return lax.fori_loop(0, every.tokens.shape[0], body, (cache, start))

    return jax.jit(run, donate_argnums=1)


def _copy(cache: Cache) -> Cache:
    """For a step to donate."""
    return jax.tree.map(jnp.copy, cache)


def _changed(a: Cache, b: Cache) -> list[str]:
    """Names of the arrays whose bits differ."""
    return [
        name
        for name in ("kda_state", "conv_window", "kv_latent")
        if not bool(_equal_bits(getattr(a, name), getattr(b, name)))
    ]


@jax.jit
def _equal_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return jnp.all(lax.bitcast_convert_type(a, kind) == lax.bitcast_convert_type(b, kind))


def runs_where(backend: Backend, one: Program) -> dict[str, str]:
    """Per stage: the standard function, or a function of its own and the kernels of one step."""
    traced = one.function.trace(*one.args).jaxpr.jaxpr
    found = {
        name: "standard function"
        if getattr(backend, name) is getattr(AUTO, name)
        else "specialised"
        for name in STAGES
    }
    kernels = dict.fromkeys(kernels_of(traced))
    return found | {"kernels of a decode step": ", ".join(kernels) or "none"}


def kernels_of(jaxpr: Any) -> list[str]:
    """Names of the Pallas kernels of a jaxpr in order, those of inner calls included."""
    found: list[str] = []
    for equation in jaxpr.eqns:
        said = equation.params.get("name_and_src_info") or equation.params.get("name") or ""
        name = str(said).split(" ")[0]
        if name.startswith("k3_"):
            found.append(name)
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    found += kernels_of(getattr(inner, "jaxpr", inner))
    return found


def _conditions(o: SelftestOptions) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "backend": o.backend,
        "preset": o.preset,
        "kv_dtype": o.kv_dtype,
        "context": o.context,
        "seed": o.seed,
        "weights": "random; one rank's share, exchanges looped back",
    }


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows for a person: what runs where, each quantity at its worst, the replays."""
    rows = [(name, what, "", "", "") for name, what in result["runs_where"].items()]
    worst: dict[str, dict[str, Any]] = {}
    for one in result["comparisons"]:
        held = worst.get(one["quantity"])
        if held is None or _share(one) > _share(held):
            worst[one["quantity"]] = one
    for name, one in worst.items():
        at = f"tp{one['tp']} {one['case']} {one['layer']}"
        said = "ok" if one["passed"] else "FAILED"
        rows.append((name, at, f"{float(one['error']):.2e}", f"{one['limit']:.2e}", said))
    for one in result["replays"]:
        said = "ok" if one["passed"] else "FAILED"
        rows.append((f"replay of {one['steps']} steps", f"tp{one['tp']}", "", "equal bits", said))
    return rows


def _share(comparison: dict[str, Any]) -> float:
    """The error as a share of its limit; NaN is as bad as can be."""
    share = float(comparison["error"]) / comparison["limit"]
    return math.inf if math.isnan(share) else share

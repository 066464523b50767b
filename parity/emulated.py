"""Checks of the sharded step that need emulated devices: called by tests in a process of their own.

`python -c "from parity.emulated import exchanges; exchanges(16)"` under
XLA_FLAGS=--xla_force_host_platform_device_count=16; an AssertionError is the verdict.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.cache import StepInputs, cache_shapes
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.params import abstract_weights
from jax_impl.sharding import (
    Placement,
    cache_specs,
    global_shape,
    place_ranks,
    unequal_replicas,
    weight_specs,
)
from jax_impl.static import Static
from jax_impl.step import build_step

RANKS = 16
GOLDEN = Path(__file__).parent / "golden"
_EXCHANGE = re.compile(
    r"= .*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
_EVERYONE = ("[1,16]<=[16]", "{{" + ",".join(map(str, range(RANKS))) + "}}")


def compiled_step(config: ModelConfig, run: RunConfig, placement: Placement, tokens: int) -> Any:
    """The compiled step for one sequence, and the shapes of its global cache."""

    def spread(local: Any, specs: Any) -> Any:
        def one(a: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            cut = next((i for i, name in enumerate(spec) if name), None)
            shape = global_shape(a.shape, cut, placement.ranks.size)
            return jax.ShapeDtypeStruct(
                shape, a.dtype, sharding=NamedSharding(placement.mesh, spec)
            )

        return jax.tree.map(one, local, specs)

    weights = spread(abstract_weights(config, placement.ranks.size), weight_specs(config, run))
    specs = cache_specs(run).replace(kv_scale=None, draft_kv=None)
    cache = spread(cache_shapes(config, run, placement.ranks), specs)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    inputs = StepInputs(
        ints(1, tokens), ints(1), ints(1), ints(1), ints(1, run.pages),
        jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.uint32),
    )  # type: ignore[arg-type]  # fmt: skip
    step = build_step(Static(config, run, placement.ranks), rows="all", mesh=placement.mesh)
    return step.lower(weights, cache, inputs).compile(), cache


def exchanges_by_layer(text: str) -> dict[str, Counter[str]]:
    """Kinds of exchanges in compiled text by layer; `rest` is what belongs to none."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for line in text.splitlines():
        kind = _EXCHANGE.search(line)
        if kind is None:
            continue
        groups = re.search(r"replica_groups=(\S+)", line)
        assert groups and groups[1].rstrip(",") in _EVERYONE, f"not over all ranks: {line}"
        layer = re.search(r'op_name="[^"]*?(layer\d\d)', line)
        found[layer[1] if layer else "rest"][kind[1]] += 1
    return found


def exchanges(dcp: int) -> None:
    """Number and kind of exchanges per layer, and the cache fully aliased, on the compiled text."""
    config = ModelConfig.load(GOLDEN / "model_tiny16")
    run = RunConfig(slots=2, pages=2, page_size=2, dcp=dcp)
    compiled, cache = compiled_step(config, run, place_ranks(RANKS, run), tokens=8)
    found = exchanges_by_layer(compiled.as_text())
    for layer in range(config.num_hidden_layers):
        want = Counter({"all-reduce": 2})  # o_proj; dense, or routed and shared in one
        if not config.is_dense(layer):
            want["all-gather"] += 2  # scores and latent in one; the output
        if config.is_mla(layer) and dcp > 1:
            want += Counter({"all-gather": 1, "all-to-all": 1})
        assert found[f"layer{layer:02d}"] == want, (layer, want, dict(found))
    # embedding and finiteness; (max, argmax) per row and the drawn token
    assert found["rest"] == Counter({"all-reduce": 2, "all-gather": 2}), dict(found)
    held = sum(
        int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize
        for a in jax.tree.leaves(cache)
    )
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= held, f"{aliased} bytes aliased, the cache has {held}"


def tampered_replica() -> None:
    """A copy that differs in its last bit is found, and no other."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    parts = [jax.device_put(np.float32([1, 2]), d) for d in jax.devices()]
    laid = NamedSharding(mesh, P())
    same = jax.make_array_from_single_device_arrays((2,), laid, parts)
    changed = np.nextafter(np.float32([1, 2]), np.float32(3))
    parts[3] = jax.device_put(changed, jax.devices()[3])
    other = jax.make_array_from_single_device_arrays((2,), laid, parts)
    assert unequal_replicas({"a": same, "b": other}) == ["['b']"]


def looped_back() -> None:
    """One device computes one rank's share at that rank's shapes; exchanges keep the shapes."""
    from jax_impl.cache import make_cache
    from jax_impl.checkpoint import Checkpoint
    from jax_impl.collectives import Ranks
    from jax_impl.loader import load_weights

    checkpoint = Checkpoint.open(GOLDEN / "model_tiny16")
    config, ranks = checkpoint.config, Ranks(RANKS)
    run = RunConfig(slots=2, pages=2, page_size=2, dcp=RANKS)
    weights = load_weights(checkpoint, placement=Placement(ranks, rank=5))
    shapes = jax.tree.map(lambda a: a.shape, weights)
    assert shapes == jax.tree.map(lambda a: a.shape, abstract_weights(config, RANKS))
    inputs = StepInputs(
        np.arange(8, dtype=np.int32)[None], np.int32([8]), np.int32([0]), np.int32([1]),
        np.int32([[1, 0]]), np.float32([0]), np.uint32([0]),
    )  # type: ignore[arg-type]  # fmt: skip
    step = build_step(Static(config, run, ranks), rows="all")
    cache = make_cache(config, run, ranks)
    text = step.lower(weights, cache, inputs).compile().as_text()
    assert not exchanges_by_layer(text)
    _, out, _ = step(weights, cache, inputs)
    assert out.logits.shape == (1, 8, config.vocab_size // RANKS) and bool(out.finite[0])


def in_place() -> None:
    """Steps in place over all ranks: the results of ordinary ones, one compilation."""
    from jax_impl.checkpoint import Checkpoint
    from jax_impl.loader import load_weights
    from jax_impl.sharding import make_spread_cache
    from jax_impl.step import Turn, build_step_in_place, first_turn, with_inputs

    checkpoint = Checkpoint.open(GOLDEN / "model_tiny16")
    config, run = checkpoint.config, RunConfig(slots=2, pages=2, page_size=2)
    placement = place_ranks(RANKS, run)
    weights = load_weights(checkpoint, placement=placement)
    static, mesh = Static(config, run, placement.ranks), placement.mesh
    inputs = StepInputs(
        np.int32([[5]]), np.int32([1]), np.int32([0]), np.int32([1]), np.int32([[1, 0]]),
        np.float32([0]), np.uint32([0]),
    )  # type: ignore[arg-type]  # fmt: skip
    step, turned = build_step(static, mesh=mesh), build_step_in_place(static, mesh=mesh)
    cache, following = make_spread_cache(config, run, placement), inputs
    other = make_spread_cache(config, run, placement)
    turn = first_turn(static, weights, other, inputs, mesh=mesh)
    for turns in range(4):
        if turns == 2:
            turn, following = with_inputs(turn, inputs), inputs
        cache, outputs, following = step(weights, cache, following)
        turn = turned(weights, turn)
        want = Turn(cache, following, outputs)
        for a, b in zip(jax.tree.leaves(turn), jax.tree.leaves(want), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    assert turned._cache_size() == 1  # type: ignore[attr-defined]


def filtered_draws() -> None:
    """Draws and verdicts from filtered rows: over all ranks those of one, placeholders and all."""
    from functools import partial

    from jax_impl.acceptance import accept
    from jax_impl.acceptance_config import Acceptance
    from jax_impl.collectives import ONE_RANK, Ranks
    from jax_impl.sampling import Filters, acceptance_uniforms, draw, token_noise

    n, k, v = 64, 3, 512
    rng = np.random.default_rng(3)
    base = rng.normal(size=(n, k + 1, v)).astype(np.float32)
    near = base[:, :k] + 0.3 * rng.normal(size=(n, k, v)).astype(np.float32)
    drafts = np.argmax(near, axis=-1).astype(np.int32)
    drafts[::7, 2] = -1
    heat = rng.choice(np.float32([0, 0.3, 1.0]), n)
    seed, position = np.arange(n, dtype=np.uint32), rng.integers(1, 99, n).astype(np.int32)
    limits = Filters(
        rng.choice(np.int32([0, 1, 3, 40]), n), rng.choice(np.float32([0.4, 0.9, 1]), n),
        rng.choice(np.float32([0, 0.05, 1]), n),
    )  # type: ignore[arg-type]  # fmt: skip

    def both(ranks: Ranks, logits: jax.Array, proposed: jax.Array, limits: Filters) -> Any:
        u = acceptance_uniforms(seed, position, k, salted=True)
        noise = lambda row: token_noise(seed, position + row + 1, logits.shape[-1], ranks)  # noqa: E731
        method = Acceptance("block", "probabilistic")
        judged = accept(method, logits, drafts, proposed, heat, u, noise, limits, ranks)
        return *judged, draw(logits[:, 0], heat, seed, position, limits, ranks)

    want = jax.jit(partial(both, ONE_RANK))(base, near, limits)
    placement = place_ranks(RANKS)
    cut = P(None, None, placement.mesh.axis_names[0])
    shared = jax.shard_map(
        partial(both, placement.ranks), mesh=placement.mesh, in_specs=(cut, cut, P()), out_specs=P()
    )
    for a, b in zip(jax.jit(shared)(base, near, limits), want, strict=True):
        assert np.array_equal(a, b)
    assert len(set(np.asarray(want[1]).tolist())) == k + 1  # every number of accepted drafts


def filtered_texts() -> None:
    """Texts and counts of a speculative engine with filters: over two ranks those of one."""
    import tempfile

    from jax_impl.acceptance_config import Acceptance
    from jax_impl.checkpoint import Checkpoint
    from jax_impl.draft_weights import open_draft
    from jax_impl.loader import load_draft, load_weights
    from jax_impl.make_tiny import make_checkpoint
    from jax_impl.sharding import ONE_DEVICE
    from jax_impl.speculative_engine import SpeculativeEngine

    run = RunConfig(compute="float32", slots=4, pages=32, page_size=4)
    settings: tuple[dict[str, Any], ...] = (
        {}, {"temperature": 3.0, "seed": 1}, {"temperature": 4.0, "top_k": 3, "seed": 2},
        {"temperature": 4.0, "top_p": 0.5, "min_p": 0.01, "seed": 3},
    )  # fmt: skip

    def texts(placement: Placement, folder: Path) -> list[tuple[list[int], list[int]]]:
        target, draft = Checkpoint.open(folder / "target"), open_draft(folder / "draft")
        engine = SpeculativeEngine(
            target.config, run, load_weights(target, placement=placement), draft.config,
            load_draft(draft, placement=placement), Acceptance("block", "probabilistic"), 3,
            chunk=8, context=32, placement=placement, check_replicas=True, filters=True,
        )  # fmt: skip
        handles = [engine.add([5, 17, 101, 9, 12][i:], **s) for i, s in enumerate(settings)]
        for handle in handles:
            engine.prefill(handle)
        for _ in range(5):
            engine.decode(handles)
        return [(engine.sequences[h].ids, engine.sequences[h].emitted) for h in handles]

    with tempfile.TemporaryDirectory() as scratch:
        make_checkpoint(Path(scratch) / "pair", "tiny", 0, overrides={"num_hidden_layers": 2})
        folder = Path(scratch) / "pair"
        want = texts(ONE_DEVICE, folder)
        assert texts(place_ranks(2), folder) == want
    assert max(n for _, counts in want for n in counts) > 1

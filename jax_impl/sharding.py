"""The mesh, and how every array lies on it: one axis, one `shard_map` around a step.

A global array is the ranks' local arrays one behind the other along the axis that the weight table
(or `cache_cuts`) names; a part that all ranks need whole stands in it once per rank. The check of
varying axes is on everywhere but in steps built from kernels (`CHECK_EXCEPTIONS`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.binding import EXPERT_AXIS, bind, bound_specs, is_bound
from jax_impl.cache import Cache, StepInputs, StepOutputs, cache_cuts, cache_shapes
from jax_impl.collectives import ONE_RANK, Ranks
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import DraftWeights, draft_from_arrays, draft_table
from jax_impl.params import Weights, from_arrays
from jax_impl.problems import listed
from jax_impl.weights import Experts, WeightArray, choose_ranks, indivisible, weight_table

AXIS = "tp"
# call without the check of varying axes -> (reason, numeric test in its place)
CHECK_EXCEPTIONS = {
    "steps of `latency_specialized`": (
        "a Pallas kernel takes no Ref whose value varies over a mesh axis (JAX 0.11.2, 0.12.0)",
        "`check_replicas` of the engine compares what should be equal on all ranks, bit by bit",
    ),
}


@dataclass(frozen=True)
class Placement:
    """Where the ranks' shares go.

    Attributes:
        ranks: over how many ranks the model is cut.
        mesh: the ranks' devices in rank order; None: the default device holds one rank's share.
        rank: that rank's number, where there is no mesh.
        experts: how routed experts are cut.
    """

    ranks: Ranks = ONE_RANK
    mesh: Mesh | None = None
    rank: int = 0
    experts: Experts = "tp"

    @property
    def here(self) -> tuple[int, ...]:
        """Ranks whose shares this process holds."""
        if self.mesh is None:
            return (self.rank,)
        mine = jax.process_index()
        return tuple(i for i, d in enumerate(self.mesh.devices.flat) if d.process_index == mine)

    def sharding(self, cut: int | None) -> NamedSharding | None:
        """Sharding of an array cut along `cut`; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec(cut))

    def assemble(self, shares: list[np.ndarray], cut: int | None) -> jax.Array:
        """One array from the shares of this process's ranks, in the order of `here`."""
        if self.mesh is None:
            return jnp.asarray(shares[0])
        devices = [self.mesh.devices.flat[rank] for rank in self.here]
        placed = [jax.device_put(s, d) for s, d in zip(shares, devices, strict=True)]
        shape = global_shape(shares[0].shape, cut, self.ranks.size)
        return jax.make_array_from_single_device_arrays(shape, self.sharding(cut), placed)


ONE_DEVICE = Placement()


def place_ranks(tp: int, run: RunConfig = RunConfig()) -> Placement:  # noqa: B008  (frozen)
    """Placement of `tp` ranks on the first `tp` devices of all processes.

    Raises:
        ConfigError: fewer devices than ranks, or processes with and without ranks.
    """
    if tp == 1 and jax.process_count() == 1:
        return Placement(experts=run.experts)
    devices = jax.devices()
    if tp < 2 or len(devices) < tp or (jax.process_count() > 1 and len(devices) != tp):
        raise ConfigError(
            f"tp {tp}: {len(devices)} device(s) in {jax.process_count()} process(es) found; "
            f"expected one device per rank"
            + (", all of them used" if jax.process_count() > 1 else "")
            + f". Ask for fewer ranks, start more processes, or on a CPU emulate {tp} devices "
            f"(--local-devices {tp}, or JAX_NUM_CPU_DEVICES={tp})"
        )
    mesh = Mesh(np.array(devices[:tp]), (AXIS,))
    return Placement(Ranks(tp, AXIS), mesh, experts=run.experts)


def require_ranks(
    config: ModelConfig,
    run: RunConfig,
    ranks: int,
    draft: DraftConfig | None = None,
    called: Callable[[str], str] = str,
) -> None:
    """Check that model, drafter and run settings can be cut over `ranks`; takes no memory.

    Args:
        config: the model.
        run: how to run it.
        ranks: `tp`.
        draft: its drafter, if there is one.
        called: what the user calls a setting, by its name here.

    Raises:
        ConfigError: listing everything that does not divide, with its numbers.
    """
    if type(ranks) is not int or ranks < 1:
        wanted = "expected a whole number of ranks, at least 1; change it"
        raise ConfigError(f"{called('tp')} {ranks!r}: {wanted}")
    problems = indivisible(config, weight_table(config), ranks, run.experts)
    if draft is not None:
        problems += [f"drafter: {p}" for p in indivisible(draft, draft_table(draft, ranks), ranks)]
    if run.dcp not in (1, ranks):
        wanted = f"expected 1 or the number of ranks, {ranks}"
        problems.append(f"{called('dcp')} {run.dcp}: {wanted}")
    if problems:
        do = choose_ranks(config, weight_table(config), run.experts)
        raise ConfigError(listed(f"{ranks} rank(s) do not fit this model", problems, do))


def spec(cut: int | None) -> P:
    """Spec of an array cut along axis `cut`."""
    return P() if cut is None else P(*[None] * cut, AXIS)


def global_shape(local: tuple[int, ...], cut: int | None, ranks: int) -> tuple[int, ...]:
    """Shape of the whole array whose shares have shape `local`."""
    return tuple(n * ranks if i == cut else n for i, n in enumerate(local))


def _table_specs(table: tuple[WeightArray, ...], experts: Experts) -> dict[tuple[str, str], Any]:
    return {(a.kind, a.name): spec(a.cut_axis(experts)) for a in table}


def weight_specs(config: ModelConfig, run: RunConfig) -> Weights:
    """A PartitionSpec per weight array, from the `cut` column of the table."""
    specs = checkpoint_specs(config, run.experts)
    return bound_specs(specs, spec(EXPERT_AXIS)) if is_bound(run) else specs


def checkpoint_specs(config: ModelConfig, experts: Experts) -> Weights:
    """The same for weights that are not bound."""
    return from_arrays(_table_specs(weight_table(config), experts))


def draft_specs(config: DraftConfig, ranks: int) -> DraftWeights:
    """A PartitionSpec per array of the drafter."""
    return draft_from_arrays(_table_specs(draft_table(config, ranks), "tp"))


def cache_specs(run: RunConfig) -> Cache:
    """A PartitionSpec per array of the cache."""
    return Cache(**{name: spec(cut) for name, cut in cache_cuts(run).items()})


def input_specs() -> StepInputs:
    """Inputs are equal on all ranks but for the drafts' logits, which stay vocabulary shards."""
    equal = {f.name: P() for f in fields(StepInputs)}
    return StepInputs(**(equal | {"draft_logits": spec(2)}))


def output_specs() -> StepOutputs:
    """Outputs are equal on all ranks but for the logits, which stay vocabulary shards."""
    equal = {f.name: P() for f in fields(StepOutputs)}
    return StepOutputs(**(equal | {"logits": spec(2)}))


def spread(
    function: Callable,
    mesh: Mesh | None,
    in_specs: Any,
    out_specs: Any,
    *,
    donate: int | tuple[int, ...],
    check: bool = True,
    keep_unused: bool = False,
    options: dict[str, Any] | None = None,
) -> Callable:
    """The jitted function over the ranks of `mesh`, on one device without one.

    Arguments `donate` (a number, several or none) are donated; with `keep_unused` what is not read
    gives its memory to a result, too. `check` False is for what `CHECK_EXCEPTIONS` names. `options`
    are the compiler's, for this program alone.
    """
    if mesh is not None:
        function = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check
        )
    return jax.jit(
        function, donate_argnums=donate, keep_unused=keep_unused, compiler_options=options
    )


def bind_spread(
    weights: Weights, config: ModelConfig, run: RunConfig, placement: Placement
) -> Weights:
    """`binding.bind` on every rank; donates the weights. Unchanged where `run` needs no binding."""
    if not is_bound(run):
        return weights
    after = weight_specs(config, run)
    before = checkpoint_specs(config, run.experts) if weights.moe.w13_tiles is None else after
    return spread(bind, placement.mesh, (before,), after, donate=0)(weights)


def make_spread_cache(
    config: ModelConfig, run: RunConfig, placement: Placement, draft: DraftConfig | None = None
) -> Cache:
    """A zeroed cache, every rank's share on its device; see `cache.make_cache`."""
    local = cache_shapes(config, run, placement.ranks, draft)
    cuts = cache_cuts(run)
    arrays: dict[str, jax.Array | None] = {}
    for name, cut in cuts.items():
        one = getattr(local, name)
        if one is None:
            arrays[name] = None
            continue
        shape = global_shape(one.shape, cut, placement.ranks.size if placement.mesh else 1)
        make = partial(jnp.full, shape, run.kv_scale if name == "kv_scale" else 0, one.dtype)
        arrays[name] = jax.jit(make, out_shardings=placement.sharding(cut))()
    return Cache(**arrays)  # type: ignore[arg-type]


def unequal_replicas(tree: Any) -> list[str]:
    """Leaves that should be equal on all ranks and are not, bit for bit; by path.

    The debug check of what the type system promises: arrays whose sharding is replicated. With
    several processes all of them must call it.
    """
    found, sums = [], {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array) or not leaf.sharding.is_fully_replicated:
            continue
        name = jax.tree_util.keystr(path)
        copies = [np.asarray(s.data).tobytes() for s in leaf.addressable_shards]
        sums[name] = zlib.crc32(copies[0])
        if any(c != copies[0] for c in copies):
            found.append(name)
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        everyone = np.asarray(process_allgather(np.array(list(sums.values()), np.uint32)))
        apart = np.flatnonzero((everyone != everyone[0]).any(axis=0))
        found += [name for i, name in enumerate(sums) if i in apart and name not in found]
    return found

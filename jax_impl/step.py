"""The jitted step: forward, commit, logits, draw.

`build_step` donates the cache. `build_step_in_place` donates inputs and outputs too, so that no
address changes from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.backend import AUTO, Backend
from jax_impl.cache import Cache, StepInputs, StepOutputs
from jax_impl.collectives import all_reduce
from jax_impl.model import forward
from jax_impl.params import Weights
from jax_impl.sampling import all_finite, draw, first_id, highest
from jax_impl.sharding import cache_specs, input_specs, output_specs, spec, spread, weight_specs
from jax_impl.static import Static

Rows = Literal["last", "all"]
# XLA captures in CUDA graphs what it does by default, and loops as all their turns, so that a step
# is one graph: not one per turn, which the host launches, nor one with a node that decides about
# each turn, which takes the device 7 us.
CAPTURED = {
    "xla_gpu_enable_command_buffer":
    "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
}  # fmt: skip


class Turn(NamedTuple):
    """What a decode loop hands from step to step, all of which stays where it is in memory."""

    cache: Cache
    inputs: StepInputs  # of the step that comes
    outputs: Any  # of the step that was: StepOutputs or SpeculativeOutputs


AnyTurn = TypeVar("AnyTurn", bound=NamedTuple)
Step = Callable[[Weights, Cache, StepInputs], tuple[Cache, StepOutputs, StepInputs]]


def step(
    static: Static,
    backend: Backend,
    rows: Rows,
    weights: Weights,
    cache: Cache,
    inputs: StepInputs,
    record: dict[str, Any] | None = None,
) -> tuple[Cache, StepOutputs, StepInputs]:
    """One step: T tokens of each of B sequences in, the token after the last real one out.

    Args:
        rows: `last` computes logits for each sequence's last real token only (prefill of long
            chunks), `all` for every token.
        record: if given, filled with every stage output while tracing.

    Returns:
        The cache, the outputs, and the inputs of the next decode step (one token per sequence), so
        that steps chain on the device.
    """
    found = forward(static, backend, weights, cache, inputs, record)
    return found.cache, *conclude(static, backend, rows, weights, inputs, found.hidden)


def conclude(
    static: Static,
    backend: Backend,
    rows: Rows,
    weights: Weights,
    inputs: StepInputs,
    hidden: jax.Array,
) -> tuple[StepOutputs, StepInputs]:
    """Logits, the drawn token and the next inputs from the hidden rows [N, D] of a step."""
    batch, tokens = inputs.tokens.shape
    hidden = hidden.reshape(batch, tokens, -1)
    last = jnp.maximum(inputs.count - 1, 0)
    real = inputs.row_live()
    if rows == "last":
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        real, last = jnp.any(real, axis=1, keepdims=True), jnp.zeros_like(last)
    flat = hidden.reshape(-1, hidden.shape[-1])
    values, top, argmax = backend.logits(static, weights.root, flat)
    top, argmax = highest(top, argmax + first_id(values, static.ranks), static.ranks)
    shape = hidden.shape[:2]
    values = jnp.where(real[..., None], values.reshape(*shape, -1), 0.0)
    final = jnp.take_along_axis(values, last[:, None, None], axis=1)[:, 0]
    position = inputs.position + inputs.count
    token = draw(final, inputs.temperature, inputs.seed, position, inputs.filters, static.ranks)
    token = jnp.where(inputs.live, token, static.config.pad_token_id)
    finite = all_finite(values, static.ranks)
    following = inputs.replace(
        tokens=token[:, None], count=jnp.minimum(inputs.count, 1), position=position
    )
    masked = [jnp.where(real, a.reshape(shape), 0) for a in (top, argmax)]
    return StepOutputs(token, finite, values, *masked), following


@lru_cache(maxsize=64)
def build_step(
    static: Static, backend: Backend = AUTO, rows: Rows = "last", mesh: Mesh | None = None
) -> Step:
    """The jitted step; compiles once per shape of the inputs. Donates the cache.

    The same arguments give the same callable, and with it the same compilations. With a mesh the
    arrays are global ones, laid out as `jax_impl.sharding` says.
    """
    return spread(
        partial(step, static, backend, rows),
        mesh,
        (weight_specs(static.config, static.run), cache_specs(static.run), input_specs()),
        (cache_specs(static.run), output_specs(), input_specs()),
        donate=1,
        check=not backend.whole_stacks,
    )


@lru_cache(maxsize=64)
def build_step_in_place(
    static: Static, backend: Backend = AUTO, rows: Rows = "last", mesh: Mesh | None = None
) -> Callable[[Weights, Turn], Turn]:
    """`build_step` that writes its results over those of the step before; donates the turn.

    A CUDA graph holds addresses. XLA keeps what passes from layer to layer in the memory of results
    as well, so with results in new memory it records most of a step's kernels again, every step,
    which takes the host longer than 1 ms; see docs/kernels.md. Here all addresses stay. What of
    the outputs is wanted later has to be read or copied before the next call.
    """

    def turned(weights: Weights, turn: Turn) -> Turn:
        cache, outputs, following = step(static, backend, rows, weights, turn.cache, turn.inputs)
        return Turn(cache, following, outputs)

    specs = Turn(cache_specs(static.run), input_specs(), output_specs())
    weights = weight_specs(static.config, static.run)
    return spread(turned, mesh, (weights, specs), specs, donate=1, **in_place(backend))


def in_place(backend: Backend) -> dict[str, Any]:
    """What `spread` has to know of a step that writes over what it is given."""
    options = CAPTURED if backend.whole_stacks else None
    return dict(check=not backend.whole_stacks, keep_unused=True, options=options)


def first_turn(
    static: Static, weights: Weights, cache: Cache, inputs: StepInputs, rows: Rows = "last",
    mesh: Mesh | None = None,
) -> Turn:  # fmt: skip
    """A turn before any step: `inputs` in memory of their own, outputs that hold zeros.

    Raises:
        ValueError: inputs of more than one token per sequence; a step's results are one each.
    """
    if inputs.tokens.shape[1] != 1:
        raise ValueError(
            f"found {inputs.tokens.shape[1]} tokens per sequence, but a step in place takes 1, as "
            "it writes the next one over it; use build_step for a prefill or a verify step"
        )
    ended = spread(
        partial(conclude, static, AUTO, rows),
        mesh,
        (weight_specs(static.config, static.run), input_specs(), P()),
        (output_specs(), input_specs()),
        donate=(),
    )
    hidden = jax.ShapeDtypeStruct((inputs.tokens.size, static.config.hidden_size), jnp.bfloat16)
    shapes = jax.eval_shape(ended, weights, inputs, hidden)[0]
    return Turn(cache, *in_memory(cache, inputs, shapes, output_specs(), mesh))


def in_memory(
    cache: Cache, inputs: StepInputs, shapes: Any, specs: Any, mesh: Mesh | None
) -> tuple[StepInputs, Any]:
    """The inputs in memory of their own, and outputs of these shapes that hold zeros.

    Both are committed to a device if the cache is, as what a step returns: the step would be
    compiled a second time for results that are not as they were given.
    """

    def made(cache: Cache, inputs: StepInputs) -> tuple[StepInputs, StepOutputs]:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.tree.map(jnp.copy, inputs), zeros

    if mesh is None:
        return jax.jit(made, keep_unused=True)(cache, inputs)
    places = jax.tree.map(
        lambda cut: NamedSharding(mesh, cut), (input_specs(), specs), is_leaf=_is_spec
    )
    return jax.jit(made, out_shardings=places)(cache, inputs)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def _written_over(held: StepInputs, inputs: StepInputs) -> StepInputs:
    return jax.tree.map(jnp.copy, inputs)


def with_inputs(turn: AnyTurn, inputs: StepInputs) -> AnyTurn:
    """The turn, of any kind, with other inputs, from the host or the device, where its own were.

    `inputs` may hold arrays of `turn.inputs` (`turn.inputs.replace(...)`); these are copied first.
    """
    held = {id(a) for a in jax.tree.leaves(turn.inputs)}
    inputs = jax.tree.map(lambda a: jnp.copy(a) if id(a) in held else a, inputs)
    return turn._replace(inputs=_written_over(turn.inputs, inputs))


@lru_cache(maxsize=16)
def build_recording_step(
    static: Static, backend: Backend = AUTO, mesh: Mesh | None = None
) -> Callable:
    """Like `build_step` with all rows, returning the stage outputs by name as a fourth result.

    With a mesh they are those of all ranks together: heads side by side, partial sums added up.
    """

    def recorded(weights: Weights, cache: Cache, inputs: StepInputs):
        record: dict[str, Any] = {}
        cache, outputs, following = step(static, backend, "all", weights, cache, inputs, record)
        for name, value in record.items():
            if name.endswith((".routed", ".shared")):
                record[name] = all_reduce(value, static.ranks)
        heads = {n: record.pop(n) for n in list(record) if n.endswith(".heads")}
        return cache, outputs, following, record, heads

    built = spread(
        recorded,
        mesh,
        (weight_specs(static.config, static.run), cache_specs(static.run), input_specs()),
        (cache_specs(static.run), output_specs(), input_specs(), P(), spec(1)),
        donate=1,
        check=not backend.whole_stacks,
    )

    def joined(weights: Weights, cache: Cache, inputs: StepInputs):
        *found, record, heads = built(weights, cache, inputs)
        return *found, record | heads

    return joined

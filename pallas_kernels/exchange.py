"""Exchanges between the ranks of one NVLink domain: writes to the peers' memory and semaphores.

    all_gather  x [S], 4 bytes per element, on each of R ranks -> [R, S], in rank order
    all_reduce  x f32 [S] on each rank -> their sum, f32 [S]

Called inside a `shard_map` over a mesh of the one axis, without the check of varying axes. No
multicast. Sums are
added in rank order, each element on one rank or on all from the same numbers, so that all ranks
hold the same bits; XLA's `psum` promises no order. Nothing is rounded.

A sum goes in one shot (everybody sends all it has to everybody and adds) or, where that would send
more than `ONE_SHOT_BYTES`, in two (each rank adds one piece and sends it round). An exchange is a
chain of phases, each of which reads what the phase before has left; between them a rank waits until
every peer has signalled. The interpreter, which knows neither peers nor semaphores, runs the same
phases one by one for all ranks, from x [R, S] to the same results [R, ..].

Several processes: all that peers reach lies in symmetric memory then, which JAX 0.12 asks XLA for
(`multi_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common

CHUNK = 512  # elements that a CTA moves at once, 16 bytes per thread
MAX_CTAS = 128  # all wait for their likes on the peers, so all must be resident: of few registers
# and without shared memory, several fit on a multiprocessor
ONE_SHOT_BYTES = 1 << 20  # that a rank sends; 1 us of NVLink 5, the price of a second meeting


def limits(
    x: jax.Array | jax.ShapeDtypeStruct, ranks: int, *, multi_process: bool = False
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    common.expect(out, "rank of x", x.ndim, 1, x.ndim == 1)
    common.expect(out, "bytes per element", x.dtype.itemsize, 4, x.dtype.itemsize == 4)
    common.expect(out, "ranks", ranks, "2 or more", ranks >= 2)
    fits = x.size > 0 and x.size % CHUNK == 0
    common.expect(out, "elements", x.size, f"a multiple of {CHUNK}", fits)
    if multi_process:
        found, wanted = jax.__version__, "0.12 or newer for several processes"
        common.expect(out, "JAX", found, wanted, jax.__version_info__ >= (0, 12))
    return out


def gather_reference(x: jax.Array) -> jax.Array:
    """What every rank holds after `all_gather`, [R, R, S] from x [R, S]."""
    return jnp.broadcast_to(x, (x.shape[0], *x.shape))


def reduce_reference(x: jax.Array) -> jax.Array:
    """What every rank holds after `all_reduce`, f32 [R, S] from x [R, S]."""
    total = x[0]
    for row in x[1:]:
        total = total + row
    return jnp.broadcast_to(total, x.shape)


def two_shots(size: int, ranks: int) -> bool:
    """Whether a sum of `size` elements is added piece by piece, each on one rank.

    Two ranks would send the same bytes and meet twice.
    """
    large = size * 4 * (ranks - 1) > ONE_SHOT_BYTES
    return ranks > 2 and large and size % (ranks * CHUNK) == 0


@dataclass(frozen=True)
class _Wire:
    """One CTA of one rank while its kernel is traced: who it is, and how it sees all ranks."""

    ranks: int
    me: Any
    part: Any
    interpret: bool

    def own(self, ref: Any) -> Any:
        return ref.at[self.me] if self.interpret else ref

    def everywhere(self, ref: Any) -> Iterator[tuple[Any, Any]]:
        """(rank, its ref), the peers in turn from the next one, then this rank."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        for step in range(1, self.ranks):
            peer = lax.rem(self.me + step, self.ranks)
            yield peer, ref.at[peer] if self.interpret else plgpu.remote_ref(ref, peer)
        yield self.me, self.own(ref)

    def meet(self, arrived: Any) -> None:
        """Tell every peer that all was sent, and wait until all of them have told so."""
        from jax.experimental import pallas as pl

        # a release each: `semaphore_signal_parallel` fences behind each signal, not before
        for step in range(1, self.ranks):
            pl.semaphore_signal(arrived, device_id=lax.rem(self.me + step, self.ranks))
        pl.semaphore_wait(arrived, self.ranks - 1)


Phase = Callable[[_Wire, Any, Any], None]  # (wire, what the phase before left, what this one fills)


def _send(w: _Wire, source: Any, target: Any) -> None:
    """[S] of each rank -> [R, S] on all."""
    value = w.own(source)[w.part]
    for _, ref in w.everywhere(target):
        ref[w.me, w.part] = value


def _add(w: _Wire, source: Any, target: Any) -> None:
    """[R, S] -> [S]."""
    w.own(target)[w.part] = _total(w, source)


def _send_pieces(w: _Wire, source: Any, target: Any) -> None:
    """[R, s], a piece for each rank -> [R, s], each rank's piece of all."""
    for rank, ref in w.everywhere(target):
        ref[w.me, w.part] = w.own(source)[rank, w.part]


def _add_and_send(w: _Wire, source: Any, target: Any) -> None:
    """[R, s], one piece of all -> [R, s], the sums of all pieces on all."""
    total = _total(w, source)
    for _, ref in w.everywhere(target):
        ref[w.me, w.part] = total


def _total(w: _Wire, source: Any) -> jax.Array:
    rows = w.own(source)
    total = rows[0, w.part]
    for rank in range(1, w.ranks):
        total = total + rows[rank, w.part]
    return total


def all_gather(
    x: jax.Array,
    axis: str,
    ranks: int,
    *,
    multi_process: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """All ranks' x in rank order, [R, S].

    Raises:
        ValueError: `limits` are not met.
    """
    size = x.shape[-1]
    _require("k3_all_gather", x, ranks, multi_process, interpret)
    phases = [(_send, (ranks, size), True)]
    return _run("k3_all_gather", x, axis, ranks, size, phases, multi_process, interpret)


def all_reduce(
    x: jax.Array,
    axis: str,
    ranks: int,
    *,
    multi_process: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """The sum of all ranks' x, f32 [S].

    Raises:
        ValueError: `limits` are not met.
    """
    size, shape = x.shape[-1], x.shape
    _require("k3_all_reduce", x, ranks, multi_process, interpret, jnp.float32)
    if two_shots(size, ranks):
        size //= ranks
        pieces = (ranks, size)
        phases = [(_send_pieces, pieces, True), (_add_and_send, pieces, True)]
        x = x.reshape(*x.shape[:-1], *pieces)
    else:
        phases = [(_send, (ranks, size), True), (_add, (size,), False)]
    y = _run("k3_all_reduce", x, axis, ranks, size, phases, multi_process, interpret)
    return y.reshape(shape)


def _require(
    name: str, x: jax.Array, ranks: int, multi_process: bool, interpret: bool, dtype: Any = None
) -> None:
    own = jax.ShapeDtypeStruct(x.shape[1:] if interpret else x.shape, x.dtype)
    reasons = limits(own, ranks, multi_process=multi_process)
    if dtype is not None:
        common.expect(reasons, "dtype of x", x.dtype, jnp.dtype(dtype), x.dtype == dtype)
    common.require(reasons, name)


def _run(
    name: str,
    x: jax.Array,
    axis: str,
    ranks: int,
    size: int,
    phases: list[tuple[Phase, tuple[int, ...], bool]],
    multi_process: bool,
    interpret: bool,
) -> jax.Array:
    """The phases (each with its target's shape and whether it sends) over `size` elements."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    chunks = size // CHUNK

    def wire(me: Any, chunk: Any) -> _Wire:
        return _Wire(ranks, me, pl.ds(chunk * CHUNK, CHUNK), interpret)

    if interpret:

        def alone(phase: Phase) -> Callable[[Any, Any], None]:
            def body(a: Any, b: Any) -> None:
                phase(wire(lax.axis_index("rank"), lax.axis_index("chunk")), a, b)

            return body

        for phase, shape, _ in phases:
            x = common.kernel(
                alone(phase),
                name,
                interpret=True,
                out_type=jax.ShapeDtypeStruct((ranks, *shape), x.dtype),
                grid=(ranks, chunks),
                grid_names=("rank", "chunk"),
            )(x)
        return x

    ctas = min(chunks, MAX_CTAS)

    def body(source: Any, *refs: Any) -> None:
        me, cta = lax.axis_index(axis), lax.axis_index("cta")
        targets, arrived = refs[: len(phases)], iter(refs[len(phases) :])
        for (phase, _, sends), target in zip(phases, targets, strict=True):
            for first in range(0, chunks, ctas):
                w = wire(me, first + cta)
                pl.when(first + cta < chunks)(partial(phase, w, source, target))
            if sends:
                wire(me, cta).meet(next(arrived))
            source = target

    outputs = common.kernel(
        body,
        name,
        multi_process=multi_process,
        out_type=[jax.ShapeDtypeStruct(shape, x.dtype) for _, shape, _ in phases],
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=[plgpu.SemaphoreType.REGULAR] * sum(sends for _, _, sends in phases),
    )(x)
    return outputs[-1]

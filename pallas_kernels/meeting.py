"""CTAs of a running kernel wait for others of them, so that one kernel can have several phases.

The counter is a global i32 that is 0 when the kernel starts, best made so by a kernel before it:
what Pallas offers for this, a semaphore, costs a launch of its own that clears it. Every CTA that
is waited for must be resident, or the others wait for ever: all of them where all meet, and where
some hand over to others those that come first in the grid, which wait for nobody.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import common

COUNTERS = jax.ShapeDtypeStruct((128,), jnp.int32)  # as many as a warpgroup writes at once
APART = 32  # numbers of 128 bytes: counters that do not share a line of L2

# $0 counter, $1 thread of the warpgroup. What the warpgroup's other threads have written is behind
# the same fence: a barrier comes before. A `red.release` would be a second such fence.
_ARRIVE = """
{
.reg .pred out;
setp.ne.u32 out, $1, 0;
@out bra others;
fence.acq_rel.gpu;
red.relaxed.gpu.global.add.u32 [$0], 1;
others:
}
"""
# $0 counter, $1 arrivals at which all are there, $2 thread, $3 looks at most
_WAIT = """
{
.reg .pred out;
.reg .b32 seen, left;
setp.ne.u32 out, $2, 0;
@out bra others;
mov.b32 left, $3;
again:
ld.acquire.gpu.global.u32 seen, [$0];
setp.ge.u32 out, seen, $1;
@out bra others;
sub.u32 left, left, 1;
setp.ne.u32 out, left, 0;
@out bra again;
others:
}
"""
FOREVER = 0  # looks: one less than 0 is many
# what ordinary stores have left in global memory is copied by the copy engine afterwards
_ENGINE = "fence.proxy.async.global;"


def counters() -> jax.Array:
    """Counters at 0 where no kernel came before that could leave them."""
    return jnp.zeros(COUNTERS.shape, COUNTERS.dtype)


def one(counters: Any, number: int) -> Any:
    """Counter 0..3 of a global ref of them, i32 [1]."""
    from jax.experimental import pallas as pl

    return counters.at[pl.ds(number * APART, 1)]


def clear(counters: Any) -> None:
    """Called by a warpgroup: leave counters, a global ref, at 0."""
    counters[...] = jnp.zeros(COUNTERS.shape, COUNTERS.dtype)


def arrive(counter: Any, copied: bool = True) -> None:
    """Called by a warpgroup; what it has written to global memory is there for those that `wait`.

    `counter` is a global ref i32 [1]. Not `copied`: for ordinary loads only.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any, ref: Any) -> None:
        reg = common.Registers()
        if copied:
            reg.ptx(_ENGINE, volatile=True)
        reg.barrier()
        reg.ptx(_ARRIVE, reg.global_address(ref), reg.thread(), volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)(counter)


def wait(counter: Any, arrivals: int, looks: int = FOREVER) -> None:
    """Called by a warpgroup, until so many have arrived since the kernel's start.

    What they have written before is there for ordinary loads and for the copy engine; not so with
    a number of `looks` at the counter, a memory latency each, after which it is given up.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any, ref: Any) -> None:
        reg = common.Registers()
        look(reg, ref, arrivals, looks)
        reg.ptx(_ENGINE, volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)(counter)


def look(reg: common.Registers, counter: Any, arrivals: int, looks: int = FOREVER) -> None:
    """`wait` inside of register code, for ordinary loads only."""
    place = reg.global_address(counter), reg.constant(arrivals), reg.thread()
    reg.ptx(_WAIT, *place, reg.constant(looks), volatile=True)
    reg.barrier()


def meet(counter: Any, arrivals: int) -> None:
    """Called by every warpgroup of every CTA; `arrivals` is their number so far, over all calls."""
    arrive(counter)
    wait(counter, arrivals)


# one warp waits, the others stand at the next barrier: $0 thread, $1 ns
_PAUSE = """
{
.reg .pred out;
.reg .b32 start, now;
setp.ge.u32 out, $0, 32;
@out bra others;
mov.u32 start, %globaltimer_lo;
again:
mov.u32 now, %globaltimer_lo;
sub.u32 now, now, start;
setp.lt.u32 out, now, $1;
@out bra again;
others:
}
"""


def pause(ns: int) -> None:
    """Called by a warpgroup: about so long."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any) -> None:
        reg = common.Registers()
        reg.ptx(_PAUSE, reg.thread(), reg.constant(ns), volatile=True)

    plgpu.inline_mgpu()(code)()

"""All CTAs of a running kernel wait for each other, so that one kernel can have several phases.

The counter is a global i32 that is 0 when the kernel starts, best made so by a kernel before it:
what Pallas offers for this, a semaphore, costs a launch of its own that clears it. Every CTA must
be resident, or those that are wait for ever.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels import common

# $0 counter, $1 arrivals at which all are there, $2 thread of the warpgroup. What the warpgroup's
# other threads have written is behind the same fence: a barrier comes before.
_MEET = """
{
.reg .pred out;
.reg .b32 seen;
setp.ne.u32 out, $2, 0;
@out bra others;
fence.acq_rel.gpu;
red.release.gpu.global.add.u32 [$0], 1;
again:
ld.acquire.gpu.global.u32 seen, [$0];
setp.lt.u32 out, seen, $1;
@out bra again;
others:
}
"""
# what ordinary stores have left in global memory is copied by the copy engine afterwards
_ENGINE = "fence.proxy.async.global;"


def meet(counter: Any, arrivals: int) -> None:
    """Called by every warpgroup of every CTA; `arrivals` is their number so far, over all calls.

    What each has written to global memory before is there for all of them behind it, for ordinary
    loads and for the copy engine. `counter` is a global ref i32 [1].
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any, ref: Any) -> None:
        reg = common.Registers()
        reg.ptx(_ENGINE, volatile=True)
        reg.barrier()
        place = reg.global_address(ref), reg.constant(arrivals), reg.thread()
        reg.ptx(_MEET, *place, volatile=True)
        reg.barrier()
        reg.ptx(_ENGINE, volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)(counter)

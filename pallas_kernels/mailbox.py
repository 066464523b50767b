"""Word from other CTAs of a cluster: a barrier in shared memory that counts the bytes sent to it.

A CTA opens its mailboxes once per kernel, each with the number of bytes that it expects, and waits
for all of them before it leaves, so that nobody writes to a CTA that has left. Who sends uses
`SEND`, which stores a number in that CTA's memory and counts it in its mailbox.

A barrier of the cluster would do it too, but its fence waits for whatever is in flight: up to
3.5 us while weights stream in, 0.5 us in a kernel that reads little. A mailbox takes one store
after the other: 900 of 4 bytes cost 1.5 us, so nothing is sent twice, nor for rows that do not
exist.

Register code: the interpreter has no clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import common

SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes"
BOX = 2  # i32 words of a mailbox

# by one thread of the CTA: $0 mailboxes, $1 thread
_OPEN = """
{
.reg .pred one;
.reg .b64 state;
setp.eq.u32 one, $1, 0;
INIT@one fence.mbarrier_init.release.cluster;
EXPECT}
"""
_INIT = "@one mbarrier.init.shared::cta.b64 [$0+{}], 1;\n"
_EXPECT = "@one mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0+{}], {};\n"
_RECEIVE = """
{
.reg .pred there;
again:
mbarrier.try_wait.parity.shared::cta.b64 there, [$0], 0;
@!there bra again;
}
"""


def scratch(count: int) -> Any:
    """Scratch memory for so many."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.SMEM((count * BOX,), jnp.int32)


def box(mail: Any, number: int) -> Any:
    """One of the mailboxes."""
    from jax.experimental import pallas as pl

    return mail.at[pl.ds(number * BOX, BOX)]


def open_mail(mail: Any, expected: Sequence[int]) -> None:
    """Once, by all threads of a cluster: what each mailbox of a CTA waits for, in bytes.

    Nobody sends before `enter`, which is to be called once, by all threads, too.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any, ref: Any) -> None:
        reg = common.Registers()
        inits = "".join(_INIT.format(8 * i) for i in range(len(expected)))
        expects = "".join(_EXPECT.format(8 * i, size) for i, size in enumerate(expected))
        text = _OPEN.replace("INIT", inits).replace("EXPECT", expects)
        reg.ptx(text, reg.shared_address(ref), reg.utils.thread_idx(), volatile=True)
        reg.ptx("barrier.cluster.arrive.relaxed.aligned;", volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)(mail)


def enter() -> None:
    """Wait until all mailboxes of the cluster are open."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    text = "barrier.cluster.wait.acquire.aligned;"
    plgpu.inline_mgpu()(lambda _: common.Registers().ptx(text, volatile=True))()


def receive(mail: Any, number: int, engine: bool = False) -> None:
    """By a warpgroup: wait for all that a mailbox expects; `engine`: the tensor core reads it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any, ref: Any) -> None:
        reg = common.Registers()
        reg.ptx(_RECEIVE, reg.shared_address(ref), volatile=True)
        if engine:
            reg.ptx("fence.proxy.async;", volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)(box(mail, number))

"""Rows of a table as the tensor core's narrow operand, fetched by number inside the kernel.

The copy engine cannot place single rows into a swizzled tile, so threads do: 16 bytes each, the
pieces of a row permuted as in `row_norm`. Register code; the interpreter copies row by row.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels import common

STEP = 128  # columns of a tile that `gather_tile` fills

# byte of a row's 256 that thread $1 brings: 64 threads are 8 rows of 64 columns
_COLUMN = """
{
.reg .b32 a, b;
shr.u32 a, $1, 3;
xor.b32 a, a, $1;
and.b32 a, a, 7;
shl.b32 a, a, 4;
and.b32 b, $1, 64;
shl.b32 b, b, 1;
add.u32 $0, a, b;
}
"""
# $0 thread, $1 numbers, $2 table at this thread's column, $3 place in the tile
_FETCH = """
{
.reg .pred in;
.reg .b32 row, number, r0, r1, r2, r3;
.reg .b64 far;
shr.u32 row, $0, 3;
and.b32 row, row, 7;
add.u32 row, row, FIRST;
setp.lt.u32 in, row, ROWS;
mul.wide.u32 far, row, 4;
add.u64 far, far, $1;
mov.b32 number, 0;
@in ld.global.b32 number, [far];
max.s32 number, number, 0;
min.s32 number, number, LAST;
mul.wide.u32 far, number, STRIDE;
add.u64 far, far, $2;
mov.b32 r0, 0;
mov.b32 r1, 0;
mov.b32 r2, 0;
mov.b32 r3, 0;
@in ld.global.v4.b32 {r0, r1, r2, r3}, [far];
st.shared.v4.b32 [$3+PLACE], {r0, r1, r2, r3};
}
"""


def gather_tile(tile: Any, table: Any, columns: Any, numbers: Any, interpret: bool) -> None:
    """Rows `numbers` (global i32 [N], clipped to the table) of global bf16 [V, K] at `columns`.

    Into shared bf16 [width, 128], zeros beyond row N. By one warpgroup, which afterwards sees it
    complete.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    width, rows, entries = tile.shape[0], numbers.shape[0], table.shape[0]
    if interpret:
        found = [table[jnp.clip(numbers[i], 0, entries - 1), columns] for i in range(rows)]
        zeros = [jnp.zeros_like(found[0])] * (width - rows)
        tile[...] = jnp.stack([*found, *zeros])
        plgpu.commit_smem()
        return
    fetch = _FETCH.replace("ROWS", str(rows)).replace("LAST", str(entries - 1))
    fetch = fetch.replace("STRIDE", str(2 * table.shape[1]))

    def code(_: Any, tile: Any, table: Any, numbers: Any) -> None:
        reg = common.Registers()
        thread = reg.thread()
        (column,) = reg.ptx(_COLUMN, thread, results=1)
        source = reg.wide_add(reg.global_address(table), column)
        place = reg.add(reg.shared_address(tile), reg.mul(thread, 16))
        at = reg.global_address(numbers)
        reg.barrier()  # the last product has read the tile in every warp
        for block in range(width // 8):
            text = fetch.replace("FIRST", str(8 * block)).replace("PLACE", str(2048 * block))
            reg.ptx(text, thread, at, source, place, volatile=True)
        reg.fence_and_barrier()

    types = (plgpu.RefType(common.tiled(jnp.bfloat16, STEP)), plgpu.RefType(), plgpu.RefType())
    call = plgpu.inline_mgpu(arg_types=types)
    call(code)(tile, table.at[:, columns], numbers)

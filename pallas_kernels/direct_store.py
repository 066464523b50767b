"""A tile of results from registers to a global array: rows and columns beyond it are dropped.

    value [width, columns] f32 or bf16, to y [M, N] from column `start` on

The copy engine would do the same through shared memory, 0.3 us later.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import common

# $0 number, $1 element of [width, columns], $2 y, $3 bytes of `start`
_STORE = """
{
.reg .pred in, more;
.reg .b16 half;
.reg .b32 m, n;
.reg .b64 at;
div.u32 m, $1, COLUMNS;
rem.u32 n, $1, COLUMNS;
mad.lo.u32 n, n, SIZE, $3;
setp.lt.u32 in, m, ROWS;
setp.lt.u32 more, n, LIMIT;
and.pred in, in, more;
mad.lo.u32 n, m, STRIDE, n;
cvt.u64.u32 at, n;
add.u64 at, at, $2;
cvt.u16.u32 half, $0;
STORES}
"""
_DISTANCE = "{ .reg .b64 d; sub.u64 d, $1, $2; cvt.u32.u64 $0, d; }"


def store(y: Any, start: Any, value: jax.Array, limit: int, copies: int = 1) -> None:
    """By one warpgroup: columns of y below `limit`, `copies` times, `limit` apart.

    The value has the layout WG_STRIDED with vectors of 1.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (rows, stride), (_, columns), size = y.shape, value.shape, value.dtype.itemsize
    one = "@in st.global.b32 [at+{}], $0;\n" if size == 4 else "@in st.global.b16 [at+{}], half;\n"
    text = _STORE.replace("STORES", "".join(one.format(i * limit * size) for i in range(copies)))
    for name, number in (
        ("COLUMNS", columns), ("SIZE", size), ("ROWS", rows), ("LIMIT", limit * size),
        ("STRIDE", stride * size),
    ):  # fmt: skip
        text = text.replace(name, str(number))

    def code(_: Any, whole: Any, first: Any, fragment: Any) -> None:
        reg = common.Registers()
        base = reg.global_address(whole)
        (offset,) = reg.ptx(_DISTANCE, reg.global_address(first), base, results=1)
        for i, register in enumerate(fragment.registers.flat):
            if size == 4:
                word = reg.llvm.bitcast(reg.i32, register)
            else:
                half = reg.llvm.bitcast(reg.ir.IntegerType.get_signless(16), register)
                word = reg.arith.extui(reg.i32, half)
            element = reg.add(reg.thread(), 128 * i)
            reg.ptx(text, word, element, base, offset, volatile=True)

    layout = plgpu.Layout.WG_STRIDED(value.shape, vec_size=1)
    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), layout))
    call(code)(y, y.at[pl.ds(0, 1), pl.ds(start, 1)], value)

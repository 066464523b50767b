"""RMS norm of a product's rows, inside the product's kernel (`skinny` with `norm`).

y = W round(x w r) with r = rsqrt(mean(x^2) + eps) needs r before the product, which would cost
another pass over x. r is one number per row, so it is applied to the sums instead: y = r (W
round(x w)). The rounding is of x w in place of x w r: as many roundings of the same relative size.

A warpgroup scales each of its x tiles in shared memory after the copy engine brought it, and adds
up the squares of what it sees; the sums of squares meet where the sums of the product meet.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import common

STEP = 128  # columns of a tile that `scale_tile` takes

# 8 numbers: $0 sum of squares so far -> $0; $1 the same, $2 place of x, $3..$6 w
_SCALE = """
{
.reg .b32 x0, x1, x2, x3, low, high, sum;
ld.shared.v4.b32 {x0, x1, x2, x3}, [$2];
mov.b32 sum, $1;
SQUARES
mul.rn.bf16x2 x0, x0, $3;
mul.rn.bf16x2 x1, x1, $4;
mul.rn.bf16x2 x2, x2, $5;
mul.rn.bf16x2 x3, x3, $6;
st.shared.v4.b32 [$2], {x0, x1, x2, x3};
mov.b32 $0, sum;
}
""".replace(
    "SQUARES",
    "".join(
        f"shl.b32 low, x{i}, 16;\nand.b32 high, x{i}, 0xFFFF0000;\n"
        "fma.rn.f32 sum, low, low, sum;\nfma.rn.f32 sum, high, high, sum;\n"
        for i in range(4)
    ),
)
# eight neighbouring lanes hold the same row: $0 sum, $1 thread, $2 place of 16 numbers
_STORE = """
{
.reg .pred one;
.reg .b32 sum, other, at;
mov.b32 sum, $0;
shfl.sync.bfly.b32 other, sum, 1, 31, 0xFFFFFFFF;
add.f32 sum, sum, other;
shfl.sync.bfly.b32 other, sum, 2, 31, 0xFFFFFFFF;
add.f32 sum, sum, other;
shfl.sync.bfly.b32 other, sum, 4, 31, 0xFFFFFFFF;
add.f32 sum, sum, other;
and.b32 at, $1, 7;
setp.eq.u32 one, at, 0;
shr.u32 at, $1, 3;
mad.lo.u32 at, at, 4, $2;
@one st.shared.b32 [at], sum;
}
"""


def _layout(width: int) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.Layout.WG_STRIDED((16 * width,), vec_size=1)


def no_squares(width: int) -> jax.Array:
    """Sums of squares to start from, one per thread and 8 rows."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(jnp.zeros((16 * width,), jnp.float32), _layout(width))


# 64 pieces of 16 bytes are 8 rows of 64 columns; a row's pieces are permuted by its number
_PIECE = (
    "{ .reg .b32 a, b; shr.u32 a, $1, 3; xor.b32 a, a, $1; and.b32 a, a, 7; shl.b32 a, a, 4;"
    " and.b32 b, $1, 64; shl.b32 b, b, 1; add.u32 $0, a, b; }"
)
_EIGHT = 1024  # numbers that 128 threads hold, eight each


def load_weights(weight: Any) -> jax.Array:
    """Each thread's eight numbers of a global bf16 [128], as `scale_tile` takes them, bf16 [1024].

    To be called before the tile is waited for: they come from memory, and cold.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WG_STRIDED((_EIGHT,), vec_size=8)

    def code(_: Any, w: Any) -> Any:
        reg = common.Registers()
        (column,) = reg.ptx(_PIECE, reg.thread(), results=1)
        source = reg.wide_add(reg.global_address(w), column)
        words = reg.ptx(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", source, results=4, volatile=True
        )
        frag = layout.to_mgpu()
        registers = np.empty(frag.registers_shape((_EIGHT,)), dtype=object)
        kind = frag.registers_element_type(reg.ir.BF16Type.get())
        registers.flat[0] = reg.vector_of(words, kind)
        return reg.fa.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None)

    out = plgpu.ShapeDtypeStruct((_EIGHT,), jnp.bfloat16, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)(code)(weight)


def scale_tile(squares: jax.Array, tile: Any, weights: jax.Array, width: int) -> jax.Array:
    """Multiply a tile, shared bf16 [width, 128], by `load_weights`; add up its squares."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = _layout(width)

    def code(_: Any, old: Any, x: Any, w: Any) -> Any:
        reg = common.Registers()
        words = reg.words(w.registers.flat[0])
        place = reg.add(reg.shared_address(x), reg.mul(reg.thread(), 16))
        out = old.registers.copy()
        kind = old.layout.registers_element_type(reg.f32)
        for j in range(width // 8):
            before = reg.llvm.bitcast(reg.i32, old.registers.flat[j])
            at = reg.add(place, j * 2048)
            (after,) = reg.ptx(_SCALE, before, at, *words, results=1, volatile=True)
            out.flat[j] = reg.as_type(after, kind)
        reg.fence_and_barrier()
        return reg.fa.FragmentedArray(_registers=out, _layout=old.layout, _is_signed=None)

    call = plgpu.inline_mgpu(
        arg_types=(
            layout,
            plgpu.RefType(common.tiled(jnp.bfloat16, STEP)),
            plgpu.Layout.WG_STRIDED((_EIGHT,), vec_size=8),
        ),
        return_type=plgpu.ShapeDtypeStruct((16 * width,), jnp.float32, layout=layout),
    )
    return call(code)(squares, tile, weights)


def store_squares(squares: jax.Array, into: Any, width: int) -> None:
    """To shared f32 [width / 8, 16]: for each 8 rows their sums over two halves of the columns."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def code(_: Any, sums: Any, ref: Any) -> None:
        reg = common.Registers()
        base = reg.shared_address(ref)
        for j in range(width // 8):
            word = reg.llvm.bitcast(reg.i32, sums.registers.flat[j])
            reg.ptx(_STORE, word, reg.thread(), reg.add(base, 64 * j), volatile=True)

    plgpu.inline_mgpu(arg_types=(_layout(width), plgpu.RefType()))(code)(squares, into)


# $1 sum, $2 sum of squares
_NORM = """
{
.reg .b32 v;
fma.rn.f32 v, $2, INVERSE, EPSILON;
rsqrt.approx.f32 v, v;
mul.f32 $0, v, $1;
}
"""


def scaled(reg: common.Registers, value: Any, squares: Any, count: int, eps: float) -> Any:
    """A sum of the product times rsqrt(mean(x^2) + eps) of its row, all f32 registers."""
    text = _NORM.replace("INVERSE", _literal(1 / count)).replace("EPSILON", _literal(eps))
    return reg.ptx(text, value, squares, results=1, kind=reg.f32)[0]


def _literal(value: float) -> str:
    return f"0f{int(np.float32(value).view(np.uint32)):08X}"

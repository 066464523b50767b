"""Sums that lie in the shared memory of several CTAs, added in one fixed order.

    sums f32 [warpgroups, rows, width] in each CTA of a cluster -> f32 [width, columns], the total
    of `columns` of the rows, transposed

Register code (distributed shared memory has no place in Pallas); `local_total` is plain.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import common, row_norm


def barrier() -> None:
    """Wait for every thread of the cluster."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.inline_mgpu()(lambda _: common.Registers().cluster_barrier())()


def local_total(sums: Any, first: Any, columns: int) -> jax.Array:
    """Rows first.. of the sums of this CTA's warpgroups, f32 [width, columns]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warpgroups, _, width = sums.shape
    layout = plgpu.Layout.WG_STRIDED((width, columns), vec_size=1)
    parts = [
        plgpu.load(common.tref(sums.at[g, pl.ds(first, columns)]), layout=layout, optimized=False)
        for g in range(warpgroups)
    ]
    return sum(parts[1:], parts[0])


# element $1 of [width, columns] -> byte offsets of its sum, and of its row's squares
_PLACE = """
{
.reg .b32 m, r;
div.u32 m, $1, COLUMNS;
rem.u32 r, $1, COLUMNS;
mad.lo.u32 r, r, WIDTH, m;
shl.b32 r, r, 2;
add.u32 $0, r, $2;
}
"""
_SQUARES_PLACE = """
{
.reg .b32 m, r;
div.u32 m, $1, COLUMNS;
and.b32 r, m, 7;
shr.u32 m, m, 3;
mad.lo.u32 r, m, 16, r;
shl.b32 r, r, 2;
add.u32 $0, r, $2;
}
"""


def cluster_total(
    sums: Any,
    squares: Any,
    first: Any,
    columns: int,
    ctas: int,
    norm: tuple[int, float] | None,
) -> jax.Array:
    """The same over all CTAs of a cluster; with `norm` (count, eps) times the row's scale.

    `squares` f32 [warpgroups, width / 8, 16] is what `row_norm.store_squares` left, if there is a
    norm.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warpgroups, tile, width = sums.shape
    layout = plgpu.Layout.WG_STRIDED((width, columns), vec_size=1)
    out = plgpu.ShapeDtypeStruct((width, columns), jnp.float32, layout=layout)

    def code(_: Any, ref: Any, squares_ref: Any) -> Any:
        reg = common.Registers()
        frag = layout.to_mgpu()

        def gathered(at: Any, offsets: list[int]) -> Any:
            value = None
            for cta in range(ctas):
                (there,) = reg.ptx(f"mapa.shared::cluster.u32 $0, $1, {cta};", at, results=1)
                for offset in offsets:
                    load = f"ld.shared::cluster.b32 $0, [$1 + {offset}];"
                    part = reg.as_f32(reg.ptx(load, there, results=1, volatile=True)[0])
                    value = part if value is None else reg.arith.addf(value, part)
            return value

        def place(text: str, element: Any, base: Any) -> Any:
            text = text.replace("COLUMNS", str(columns)).replace("WIDTH", str(width))
            return reg.ptx(text, element, base, results=1)[0]

        groups = range(warpgroups)
        registers = np.empty(frag.registers_shape((width, columns)), dtype=object)
        for i in range(registers.size):
            element = reg.add(reg.thread(), 128 * i)
            at = place(_PLACE, element, reg.shared_address(ref))
            value = gathered(at, [g * tile * width * 4 for g in groups])
            if norm is not None:
                at = place(_SQUARES_PLACE, element, reg.shared_address(squares_ref))
                seen = gathered(at, [g * width * 8 + half for g in groups for half in (0, 32)])
                value = row_norm.scaled(reg, value, seen, *norm)
            word = reg.llvm.bitcast(reg.i32, value)
            registers.flat[i] = reg.as_type(word, frag.registers_element_type(reg.f32))
        return reg.fa.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None)

    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=out)
    unused = sums.at[0]
    return call(code)(sums.at[0, pl.ds(first, columns)], unused if squares is None else squares)

"""Register code of `attn_res`: sources read as vectors, their sums, and plain vector stores.

Each has a plain twin that the interpreter runs instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cluster_sum, common


def _layout(span: int) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.Layout.WG_STRIDED((span,), vec_size=span // 128)


def sources(bank: Any, count: Any, eager: bool, interpret: bool) -> list[jax.Array]:
    """Rows of a global ref bf16 [J, span], one array [span] each; zeros from `count` on."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, span = bank.shape
    if interpret:
        last = jnp.maximum(count[0] - 1, 0)
        numbers = range(rows)
        return [jnp.where(j < count[0], bank[jnp.minimum(j, last)], 0) for j in numbers]
    one = plgpu.ShapeDtypeStruct((span,), jnp.bfloat16, layout=_layout(span))
    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=(one,) * rows)
    return list(call(lambda _, *refs: _load_sources(*refs, span, eager))(bank, count))


def _load_sources(bank: Any, count: Any, span: int, eager: bool) -> tuple[Any, ...]:
    reg = common.Registers()
    rows, words = bank.type.shape[0], span // 256
    strides, _ = bank.type.get_strides_and_offset()
    names = [f"r{i}" for i in range(words)]
    load = f"{{{', '.join(names)}}}" if words > 1 else names[0]
    load = f"ld.global.{f'v{words}.' if words > 1 else ''}b32 {load}, [${words}+PLACE];"
    moves = "".join(f"mov.b32 ${i}, {name};" for i, name in enumerate(names))
    clear = "".join(f"mov.b32 {name}, 0;" for name in names)
    declare = f".reg .b32 {', '.join(names)};"
    plain = "{" + declare + load + moves + "}"
    guarded = f"{{.reg .pred in; setp.gt.s32 in, ${words + 1}, NUMBER;"
    guarded += declare + clear + "@in " + load + moves + "}"

    def row(text: str, j: int, *args: Any) -> list[Any]:
        text = text.replace("PLACE", str(2 * strides[0] * j)).replace("NUMBER", str(j))
        return reg.ptx(text, *args, results=words, volatile=True)

    at = reg.wide_add(reg.global_address(bank), reg.mul(reg.thread(), 4 * words))
    number = reg.global_address(count)
    if eager:
        loaded = [row(plain, j, at) for j in range(rows)]
    (valid,) = reg.ptx("ld.global.b32 $0, [$1];", number, results=1, volatile=True)
    if eager:
        select = "{.reg .pred in; setp.gt.s32 in, $2, NUMBER; selp.b32 $0, $1, 0, in;}"
        loaded = [
            [reg.ptx(select.replace("NUMBER", str(j)), v, valid, results=1)[0] for v in source]
            for j, source in enumerate(loaded)
        ]
    else:
        loaded = [row(guarded, j, at, valid) for j in range(rows)]
    bf16 = reg.ir.BF16Type.get()
    frag = _layout(span).to_mgpu()
    out = []
    for source in loaded:
        registers = np.empty(frag.registers_shape((span,)), dtype=object)
        registers.flat[0] = reg.vector_of(source, frag.registers_element_type(bf16))
        out.append(reg.fa.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None))
    return tuple(out)


def store(target: Any, value: jax.Array, interpret: bool) -> None:
    """Value bf16 [span] to a global ref. A plain store would wait for all warps, twice."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        target[...] = value
        return

    def code(_: Any, ref: Any, fragment: Any) -> None:
        reg = common.Registers()
        words = reg.words(fragment.registers.flat[0])
        at = reg.wide_add(reg.global_address(ref), reg.mul(reg.thread(), 4 * len(words)))
        places = ", ".join(f"${i + 1}" for i in range(len(words)))
        text = f"st.global.v{len(words)}.b32 [$0], {{{places}}};"
        if len(words) == 1:
            text = "st.global.b32 [$0], $1;"
        reg.ptx(text, at, *words, volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _layout(value.shape[0])))(code)(target, value)


# $0, $1 sums of squares and of products with $3, $4 so far; $2 two bf16 numbers; $5, $6 the same
_SCORE = """
{
.reg .b32 low, high, squares, products;
shl.b32 low, $2, 16;
and.b32 high, $2, 0xFFFF0000;
fma.rn.f32 squares, low, low, $5;
fma.rn.f32 products, low, $3, $6;
fma.rn.f32 squares, high, high, squares;
fma.rn.f32 products, high, $4, products;
mov.b32 $0, squares;
mov.b32 $1, products;
}
"""


def push_scores(
    values: Sequence[jax.Array], c: jax.Array, into: Any, part: Any, interpret: bool, mail: Any
) -> None:
    """For each source the sums of s s and of s c, f32 [warps, 2 sources], to all parts' CTAs."""

    def sums(reg: common.Registers, c: Any, *fragments: Any) -> list[Any]:
        factors = reg.elements(c.registers.flat[0])
        zero, out = reg.as_f32(reg.constant(0)), []
        for fragment in fragments:
            pair = [zero, zero]
            for i, word in enumerate(reg.words(fragment.registers.flat[0])):
                two = factors[2 * i : 2 * i + 2]
                pair = reg.ptx(_SCORE, word, *two, *pair, results=2, kind=reg.f32)
            out += pair
        return out

    def twin(c: jax.Array, *sources: jax.Array) -> list[jax.Array]:
        wide = [s.astype(jnp.float32) for s in sources]
        return [jnp.sum(v) for s in wide for v in (s * s, s * c)]

    layout = _layout(c.shape[0])
    operands = [c, *values]
    cluster_sum.push(sums, operands, layout, into, part, twin if interpret else None, mail)


def push_squares(
    mixed: jax.Array, into: Any, part: Any, interpret: bool, mail: Any, ctas: int | None = None
) -> None:
    """The sum of squares, f32 [warps, 1], to all parts' CTAs, or so many."""

    def sums(reg: common.Registers, fragment: Any) -> list[Any]:
        values = reg.elements(fragment.registers.flat[0])
        total = reg.arith.mulf(values[0], values[0])
        for v in values[1:]:
            total = reg.ptx("fma.rn.f32 $0, $1, $1, $2;", v, total, results=1, kind=reg.f32)[0]
        return [total]

    def twin(mixed: jax.Array) -> list[jax.Array]:
        return [jnp.sum(mixed * mixed)]

    layout = _layout(mixed.shape[0])
    plain = twin if interpret else None
    cluster_sum.push(sums, [mixed], layout, into, part, plain, mail, ctas)

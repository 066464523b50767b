"""The packed layout of MXFP4 expert weights, and its decode on Hopper.

A matrix [64 T, K] of E2M1 codes with one E8M0 scale byte per 32 of K becomes T tiles of 64 rows.
A tile is one run of bytes: for each 128 of K a block of 4096 code bytes and 256 scale bytes, and,
where K = 64 mod 128, a last block of half the size. The bytes are those of the checkpoint in
another order, so one array serves both backends (`unpack` gives the checkpoint's order back).

Order inside a block of 128, for the 128 threads of a warpgroup (warp w, g = lane / 4, q = lane % 4;
the tensor core wants rows 16 w + g and 16 w + 8 + g there):

    codes   [half, w, g, q, 16 bytes]   row 16 w + 8 half + g, its scale group q of the block
    scales  [w, g, q, half]

and of a block of 64: codes [w, g, q, half, 8 bytes] (half a group each), scales [w, g, q / 2,
half]. A thread so reads 16 bytes at a time, all of one scale group, without bank conflicts, and
one TMA copy of contiguous bytes brings a block.

Along K the tensor core sees another order than the checkpoint (`k_order`): word i of lane q holds
eight neighbours, and its nibbles p and p + 4 become one pair of bf16 numbers (e = 0, 1). The other
operand, 8 columns of K numbers, is stored as the lanes want it: for each 32 positions [column, q,
p, e] (`operand_order`), so that a lane's share of a block is 16 bytes four times. A sum over K
does not care about its order.

The products are `mma.sync` m16n8k16, not wgmma: with 8 columns wgmma wins nothing, and its
registers would have to be waited for before the next block could be decoded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import common

ROWS = 64  # of a tile
GROUP = 32  # weights per scale byte
LINE = 32  # 32-bit words of one line: tiles are stored as lines of 128 bytes
BLOCK_LINES = 34  # of a block of 128: 32 lines of codes, 2 of scales
TAIL_LINES = 17


def tile_lines(k: int) -> int:
    """Lines of one tile [64, k]."""
    return k // 64 * TAIL_LINES


def k_order(k: int) -> np.ndarray:
    """Position in the tensor core's order -> natural index along K."""
    out = []
    for first in range(0, k - k % 128, 128):
        natural = np.arange(128).reshape(4, 4, 2, 4)  # q, word, e, p
        out.append(first + natural.transpose(1, 3, 0, 2).reshape(-1))
    if k % 128:
        natural = np.arange(64).reshape(4, 2, 2, 4)
        out.append(k - 64 + natural.transpose(1, 3, 0, 2).reshape(-1))
    return np.concatenate(out).astype(np.int32)


def operand_order(x: jax.Array) -> jax.Array:
    """bf16 [8, K] in natural order -> [K/32, 8, 32] as `multiply` reads it; K a multiple of 128."""
    n, k = x.shape
    parts = x.reshape(n, k // 128, 4, 4, 2, 4)  # column, block, q, word, e, p
    return parts.transpose(1, 3, 0, 2, 5, 4).reshape(k // 32, n, 32)


def unit_rows(k: int) -> np.ndarray:
    """Natural indices along K in the order [K/32, 32] of one column of the operand."""
    order = k_order(k).reshape(-1, 4, 4, 2)  # 32 positions each: p, q, e
    return order.transpose(0, 2, 1, 3).reshape(-1, 32)


def pack(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Codes u8 [.., 64 T, K/2] and scales u8 [.., 64 T, K/32] -> u32 [.., T, lines, 32]."""
    lead, (rows, half_k) = packed.shape[:-2], packed.shape[-2:]
    k, t = 2 * half_k, rows // ROWS
    full, tail = k // 128, k % 128 // 64
    code = packed.reshape(*lead, t, 4, 2, 8, half_k)  # warp, half, g
    byte = scale.reshape(*lead, t, 4, 2, 8, k // GROUP)
    n = len(lead) + 1
    order = tuple(range(n))
    parts = []
    if full:
        c = code[..., : 64 * full].reshape(*lead, t, 4, 2, 8, full, 4, 16)
        c = c.transpose(*order, n + 3, n + 1, n, n + 2, n + 4, n + 5)
        s = byte[..., : 4 * full].reshape(*lead, t, 4, 2, 8, full, 4)
        s = s.transpose(*order, n + 3, n, n + 2, n + 4, n + 1)
        both = [c.reshape(*lead, t, full, 4096), s.reshape(*lead, t, full, 256)]
        parts.append(jnp.concatenate(both, -1).reshape(*lead, t, full * BLOCK_LINES * 128))
    if tail:
        c = code[..., 64 * full :].reshape(*lead, t, 4, 2, 8, 4, 8)
        c = c.transpose(*order, n, n + 2, n + 3, n + 1, n + 4)
        s = byte[..., 4 * full :].transpose(*order, n, n + 2, n + 3, n + 1)
        parts += [c.reshape(*lead, t, 2048), s.reshape(*lead, t, 128)]
    joined = jnp.concatenate(parts, -1).reshape(*lead, t, tile_lines(k), LINE, 4)
    return lax.bitcast_convert_type(joined, jnp.uint32)


def unpack(tiles: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack`: codes u8 [.., 64 T, K/2], scales u8 [.., 64 T, K/32]."""
    lead, t = tiles.shape[:-3], tiles.shape[-3]
    full, tail = k // 128, k % 128 // 64
    data = lax.bitcast_convert_type(tiles, jnp.uint8).reshape(*lead, t, -1)
    n = len(lead) + 1
    order = tuple(range(n))
    codes, scales = [], []
    if full:
        blocks = data[..., : full * BLOCK_LINES * 128].reshape(*lead, t, full, -1)
        c = blocks[..., :4096].reshape(*lead, t, full, 2, 4, 8, 4, 16)
        c = c.transpose(*order, n + 2, n + 1, n + 3, n, n + 4, n + 5)
        s = blocks[..., 4096:].reshape(*lead, t, full, 4, 8, 4, 2)
        s = s.transpose(*order, n + 1, n + 4, n + 2, n, n + 3)
        codes.append(c.reshape(*lead, t * ROWS, 64 * full))
        scales.append(s.reshape(*lead, t * ROWS, 4 * full))
    if tail:
        block = data[..., full * BLOCK_LINES * 128 :]
        c = block[..., :2048].reshape(*lead, t, 4, 8, 4, 2, 8)
        c = c.transpose(*order, n, n + 3, n + 1, n + 2, n + 4)
        s = block[..., 2048:].reshape(*lead, t, 4, 8, 2, 2)
        s = s.transpose(*order, n, n + 3, n + 1, n + 2)
        codes.append(c.reshape(*lead, t * ROWS, 32))
        scales.append(s.reshape(*lead, t * ROWS, 2))
    return jnp.concatenate(codes, -1), jnp.concatenate(scales, -1)


def values(codes: jax.Array, byte: jax.Array) -> jax.Array:
    """bf16 value of E2M1 codes 0..15 under scale bytes 0..254, put together from integers.

    Exact, subnormal results included; what exceeds bf16 becomes an infinity, as a product would.
    """
    codes, byte = codes.astype(jnp.int32), byte.astype(jnp.int32)
    magnitude = codes & 7
    # 0.5 and 1 have no fraction bit; from 1 on the codes count in halves of a power of two
    power = byte + jnp.where(magnitude == 1, -1, (magnitude >> 1) - 1)
    fraction = jnp.where(magnitude > 1, magnitude & 1, 0)
    # 2^(power - 127) with one fraction bit; below power 1 the leading bit moves into the fraction
    small = ((2 | fraction) << 5) >> jnp.clip(-power, 0, 7)
    bits = jnp.where(power > 0, (power << 7) | (fraction << 6), small)
    bits = jnp.where(power > 254, 0x7F80, bits)
    bits = jnp.where(magnitude == 0, 0, bits) | ((codes & 8) << 12)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def decode_twin(lines: jax.Array, k: int) -> jax.Array:
    """What the GPU decode makes of a run of lines: bf16 [64, k] in the tensor core's order.

    `k` 128 or 64: one block. Word by word as the registers see it, not through `unpack`.
    """
    words = lines.reshape(-1)
    per = k // 32  # words per thread and row
    body, scale = words[: k * 8], words[k * 8 :]
    byte = (scale[:, None] >> (jnp.arange(4, dtype=jnp.uint32) * 8)) & 0xFF
    if k == 128:
        grid = body.reshape(2, 128, per)  # half, thread, word
        byte = byte.reshape(128, 2).T
    else:
        grid = body.reshape(128, 2, per).transpose(1, 0, 2)
        byte = jnp.repeat(byte.reshape(64, 2).T, 2, axis=1)
    nibble = (grid[..., None] >> (jnp.arange(8, dtype=jnp.uint32) * 4)) & 0xF  # n = 4 e + p
    decoded = values(nibble, byte[..., None, None])
    # [half, (warp, g, q), word, e, p] -> row (warp, half, g), position (word, p, q, e)
    decoded = decoded.reshape(2, 4, 8, 4, per, 2, 4).transpose(1, 0, 2, 4, 6, 3, 5)
    return decoded.reshape(ROWS, k)


# Nibbles p and p + 4 of a word, one per 16-bit half: sign to bit 15, magnitude to bits 6..8 by one
# multiplication (it runs beside the logic unit), which as bf16 is the value times 2^-126.
_SPREAD = """
shr.b32 h, $4, 8;
and.b32 a0, $4, 0x000F000F;
and.b32 a1, $4, 0x00F000F0;
and.b32 a2, h, 0x000F000F;
and.b32 a3, h, 0x00F000F0;
mul.lo.u32 a0, a0, 0x1040;
mul.lo.u32 a1, a1, 0x0104;
mul.lo.u32 a2, a2, 0x1040;
mul.lo.u32 a3, a3, 0x0104;
and.b32 a0, a0, 0x81C081C0;
and.b32 a1, a1, 0x81C081C0;
and.b32 a2, a2, 0x81C081C0;
and.b32 a3, a3, 0x81C081C0;
"""
_DECLARE = "{\n.reg .b32 h, a0, a1, a2, a3;\n"
_UP = "".join(f"mul.rn.bf16x2 a{p}, a{p}, $6;\n" for p in range(4))
_SCALED = "".join(f"mul.rn.bf16x2 ${p}, a{p}, $5;\n" for p in range(4)) + "}"
# Two exact multiplications, by 2^126 and by the scale; or, for scale bytes up to 128, one by their
# product, which beyond would overflow.
_WIDE = _DECLARE + _SPREAD + _UP + _SCALED
_NARROW = _DECLARE + _SPREAD + _SCALED
# A scale byte s in both halves as bf16 2^(s - 127): s << 7, and the subnormal 2^-127 for s = 0.
_WIDE_SCALE = "{ .reg .b32 t; prmt.b32 t, $1, 0, SELECT; shr.b32 t, t, 1; max.u16x2 $0, t, $2; }"
# The same times 2^126: (s + 126) << 7.
_NARROW_SCALE = "{ .reg .b32 t; prmt.b32 t, $1, 0, SELECT; shr.b32 t, t, 1; add.u32 $0, t, $2; }"
_SELECT = ("0x0404", "0x1414")  # byte 0 or 1 to the upper byte of both halves
NARROW_LIMIT = 128  # largest scale byte of the narrow form


_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
_LOAD4 = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
_LOAD_SCALE = "{ .reg .b16 s; ld.shared.b16 s, [$1]; cvt.u32.u16 $0, s; }"


def _multiply_registers(acc: Any, block: Any, operand: Any, k: int, wide: bool) -> Any:
    reg = common.Registers()
    thread, base = reg.thread(), reg.shared_address(block)
    at = reg.add(base, reg.mul(thread, 16))
    if k == 128:
        words = [
            reg.ptx(_LOAD4, reg.add(at, half * 2048), results=4, volatile=True) for half in (0, 1)
        ]
        scale_at = reg.add(reg.add(base, 4096), reg.mul(thread, 2))
    else:
        four = reg.ptx(_LOAD4, at, results=4, volatile=True)
        words = [four[:2], four[2:]]
        pair = reg.ptx("and.b32 $0, $1, 0xFFFFFFFE;", thread, results=1)[0]  # 2 (thread / 2)
        scale_at = reg.add(reg.add(base, 2048), pair)
    (both,) = reg.ptx(_LOAD_SCALE, scale_at, results=1, volatile=True)
    reg.barrier()  # every warp has read the block: it may be overwritten
    text, scale_text = (_WIDE, _WIDE_SCALE) if wide else (_NARROW, _NARROW_SCALE)
    bias = reg.constant(0x00400040 if wide else 0x3F003F00)
    up = (reg.constant(0x7E807E80),) if wide else ()
    factors = [
        reg.ptx(scale_text.replace("SELECT", select), both, bias, results=1)[0]
        for select in _SELECT
    ]
    lane = reg.ptx("and.b32 $0, $1, 31;", thread, results=1)[0]
    x_at = reg.add(reg.shared_address(operand), reg.mul(lane, 16))
    flat = acc.registers.reshape(2)
    sums = [v for half in (0, 1) for v in reg.pair(flat[half])]
    for i in range(k // 32):
        x = reg.ptx(_LOAD4, reg.add(x_at, 512 * i), results=4, volatile=True)
        a = [reg.ptx(text, words[half][i], factors[half], *up, results=4) for half in (0, 1)]
        for p in (0, 2):
            rows = a[0][p], a[1][p], a[0][p + 1], a[1][p + 1]
            sums = reg.ptx(_MMA, *rows, x[p], x[p + 1], *sums, results=4, kind=reg.f32)
    out = np.empty(acc.registers.shape, dtype=object)
    out.reshape(2)[:] = [reg.paired(*sums[:2]), reg.paired(*sums[2:])]
    return reg.fa.FragmentedArray(_registers=out, _layout=acc.layout, _is_signed=None)


def zeros() -> jax.Array:
    """A sum [64, 8] to start from."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)


def multiply(
    acc: jax.Array, block: Any, operand: Any, k: int, *, wide: bool, interpret: bool
) -> jax.Array:
    """Acc f32 [64, 8] plus the product of one block, k = 128 or 64, with `operand` [k/32, 8, 32].

    Both are shared-memory refs. `wide` False takes scale bytes up to 128 only. The block may be
    overwritten when this returns: all warps of the warpgroup have read it. The interpreter, which
    has no register code, runs the same sum on `decode_twin`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        w, x = decode_twin(block[...], k), operand[...]
        plgpu.commit_smem()  # the barrier, in the form the interpreter knows
        # [column, q, p, e] of each 32 -> positions (word, p, q, e)
        x = x.reshape(k // 32, 8, 4, 4, 2).transpose(1, 0, 3, 2, 4).reshape(8, k)
        return acc + jnp.einsum(
            "nk,ck->nc",
            w.astype(jnp.float32),
            x.astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
    layout = plgpu.Layout.WGMMA
    call = plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((ROWS, 8), jnp.float32, layout=layout),
    )
    return call(lambda _, *args: _multiply_registers(*args, k, wide))(acc, block, operand)

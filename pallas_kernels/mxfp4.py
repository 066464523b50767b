"""The packed layout of MXFP4 expert weights, and its decode on Hopper.

A matrix [64 T, K] of E2M1 codes with one E8M0 scale byte per 32 of K becomes T tiles of 64 rows.
A tile is one run of bytes: for each 128 of K a block of 4096 code bytes and 256 scale bytes, and,
where K = 64 mod 128, a last block of half the size. The bytes are those of the checkpoint in
another order, so one array serves both backends (`unpack` gives the checkpoint's order back).

Order inside a block of 128, for the 128 threads of a warpgroup (warp w, g = lane / 4, q = lane % 4;
a wgmma A operand puts rows 16 w + g and 16 w + 8 + g there):

    codes   [half, w, g, q, 16 bytes]   row 16 w + 8 half + g, its scale group q of the block
    scales  [w, g, q, half]

and of a block of 64: codes [w, g, q, half, 8 bytes] (half a group each), scales [w, g, q / 2, half].
A thread so reads 16 bytes at a time, all of one scale group, without bank conflicts, and one TMA
copy of contiguous bytes brings a block.

The tensor core sees K in another order than the checkpoint (`k_order`): a 32-bit word holds eight
neighbours, and nibbles p and p + 4 of it become one pair of bf16 numbers. Whoever supplies the
other operand permutes it; a sum over K does not care.
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


def in_k_order(x: jax.Array) -> jax.Array:
    """`x[k_order]` for x [K], K a multiple of 128, without an index array."""
    return x.reshape(-1, 4, 4, 2, 4).transpose(0, 2, 4, 1, 3).reshape(-1)


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


def _decode_registers(ref: Any, k: int, wide: bool) -> Any:
    reg = common.Registers()
    thread, base = reg.thread(), reg.shared_address(ref)
    load = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    at = reg.add(base, reg.mul(thread, 16))
    if k == 128:
        words = [reg.ptx(load, reg.add(at, half * 2048), results=4, volatile=True) for half in (0, 1)]
        scale_at = reg.add(reg.add(base, 4096), reg.mul(thread, 2))
    else:
        four = reg.ptx(load, at, results=4, volatile=True)
        words = [four[:2], four[2:]]
        pair = reg.ptx("and.b32 $0, $1, 0xFFFFFFFE;", thread, results=1)[0]  # 2 (thread / 2)
        scale_at = reg.add(reg.add(base, 2048), pair)
    load_scale = "{ .reg .b16 s; ld.shared.b16 s, [$1]; cvt.u32.u16 $0, s; }"
    (both,) = reg.ptx(load_scale, scale_at, results=1, volatile=True)
    reg.barrier()  # every warp has read the block: it may be overwritten
    text, scale_text = (_WIDE, _WIDE_SCALE) if wide else (_NARROW, _NARROW_SCALE)
    bias = reg.constant(0x00400040 if wide else 0x3F003F00)
    up = (reg.constant(0x7E807E80),) if wide else ()
    layout = reg.fa.WGMMA_LAYOUT
    out = np.empty(layout.registers_shape((ROWS, k)), dtype=object)
    flat = out.reshape(k // 8, 2)
    for half in (0, 1):
        (factor,) = reg.ptx(scale_text.replace("SELECT", _SELECT[half]), both, bias, results=1)
        for i, word in enumerate(words[half]):
            pairs = reg.ptx(text, word, factor, *up, results=4)
            for p, pair in enumerate(pairs):
                flat[i * 4 + p, half] = reg.as_bf16x2(pair)
    return reg.fa.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def decode(ref: Any, k: int, wide: bool, spare: Any = None) -> Any:
    """bf16 [64, k] of one block in shared memory, as the A operand of wgmma.

    `wide` False takes scale bytes up to 128 only. The block may be overwritten when this returns
    (all warps of the warpgroup have read it). The
    interpreter has neither the register code nor products with A in registers: there `spare`, a
    shared-memory ref [64, k], takes what `decode_twin` makes of the block.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if spare is not None:
        spare[...] = decode_twin(ref[...], k)
        plgpu.commit_smem()
        return spare
    out = plgpu.ShapeDtypeStruct((ROWS, k), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return call(lambda _, block: _decode_registers(block, k, wide))(ref)

"""The packed layout of MXFP4 expert weights, and their product on Hopper's tensor cores.

A matrix [64 T, K] of E2M1 codes with one E8M0 scale byte per 32 of K becomes T tiles of 64 rows.
A tile is one run of bytes: for each 128 of K a block of 4096 code bytes and 256 scale bytes, and,
where K = 64 mod 128, a last block of half the size. The bits are those of the checkpoint in
another order, so one array serves both backends (`unpack` gives the checkpoint's order back).

Order inside a block of 128, for the 128 threads of a warpgroup (warp w, g = lane / 4, q = lane % 4;
the tensor core wants rows 16 w + g and 16 w + 8 + g there):

    codes   [half, w, g, q, word]   row 16 w + 8 half + g; word i: 8 codes from k = 32 i + 8 q on
    scales  [w, g, half, group]

and of a block of 64, which has two words and groups: codes [w, g, q, half, word], scales as above.
A thread so reads 16 bytes at a time without bank conflicts, one TMA copy of contiguous bytes brings
a block, and the four lanes of a row hold one scale group at a time: the scale belongs to the
products' sum, not to each weight.

Inside a word the bits stand (`mixed`) so that one shift and one mask bring codes p and p + 4 to the
two halves of a register, sign at bit 15 and magnitude at bits 6..8: as bf16 numbers the values
times 2^-126, exactly, the code for 0.5 being a subnormal number there. Only p = 3 takes one
operation more.

For this the other operand holds its numbers times `LIFT`, a power of two that keeps the products
normal: exact for all scale bytes 0..254, and for operands from about 2^-60 to 2^63. It has 8
columns of K numbers, stored as the lanes want them: for each 32 of K [column, q, p, e]
(`operand_order`; natural index 8 q + 4 e + p), so that a lane's share of 32 is 16 bytes.

The products are `mma.sync` m16n8k16, not wgmma: with 8 columns wgmma wins nothing, and its
registers would have to be waited for before the next block could be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

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
LIFT = 2.0**64  # of the operand's numbers


def tile_lines(k: int) -> int:
    """Lines of one tile [64, k]."""
    return k // 64 * TAIL_LINES


def k_order(k: int) -> np.ndarray:
    """Position in the tensor core's order -> natural index along K."""
    natural = np.arange(k).reshape(k // GROUP, 4, 2, 4)  # group, q, e, p
    return natural.transpose(0, 3, 1, 2).reshape(-1).astype(np.int32)


def operand_order(x: jax.Array) -> jax.Array:
    """bf16 [8, K] in natural order -> [K/32, 8, 32] as `multiply` reads it, but for `LIFT`."""
    n, k = x.shape
    parts = x.reshape(n, k // GROUP, 4, 2, 4)  # column, group, q, e, p
    return parts.transpose(1, 0, 2, 4, 3).reshape(k // GROUP, n, GROUP)


def unit_rows(k: int) -> np.ndarray:
    """Natural indices along K in the order [K/32, 32] of one column of the operand."""
    order = k_order(k).reshape(-1, 4, 4, 2)  # 32 positions each: p, q, e
    return order.transpose(0, 2, 1, 3).reshape(-1, GROUP)


# bits m, e0, e1, s of code p (and, 16 above, of code p + 4) in a packed word
_BITS = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15))
_MOVES: dict[int, int] = {}  # rotation to the left -> mask of the bits that it moves
for _p, _places in enumerate(_BITS):
    for _bit, _place in enumerate(_places):
        for _e in (0, 16):
            _from, _to = 4 * _p + _bit + _e, (_place + _e) % 32
            _turn = (_to - _from) % 32
            _MOVES[_turn] = _MOVES.get(_turn, 0) | 1 << _from


def _rotated(words: jax.Array, left: int) -> jax.Array:
    return words << left | words >> (32 - left) if left else words


def mixed(words: jax.Array) -> jax.Array:
    """Eight codes u32, lowest first -> the bits in the order of a packed word."""
    parts = [_rotated(words & np.uint32(mask), turn) for turn, mask in _MOVES.items()]
    return reduce(jnp.bitwise_or, parts)


def unmixed(words: jax.Array) -> jax.Array:
    """The inverse of `mixed`."""
    masks = [(turn, (mask << turn | mask >> (32 - turn)) % 2**32) for turn, mask in _MOVES.items()]
    parts = [_rotated(words & np.uint32(mask), -turn % 32) for turn, mask in masks]
    return reduce(jnp.bitwise_or, parts)


def pack(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Codes u8 [.., 64 T, K/2] and scales u8 [.., 64 T, K/32] -> u32 [.., T, lines, 32]."""
    lead, (rows, half_k) = packed.shape[:-2], packed.shape[-2:]
    k, t = 2 * half_k, rows // ROWS
    full, tail = k // 128, k % 128 // 64
    words = lax.bitcast_convert_type(jnp.reshape(packed, (*lead, rows, k // 8, 4)), jnp.uint32)
    words = mixed(words).reshape(*lead, t, 4, 2, 8, k // 8)  # warp, half, g
    scale = jnp.reshape(scale, (*lead, t, 4, 2, 8, k // GROUP))
    n = len(lead) + 1
    order = tuple(range(n))
    parts = []
    for blocks, groups, first in ((full, 4, 0), (tail, 2, 4 * full)):
        if not blocks:
            continue
        last = first + blocks * groups
        c = words[..., 4 * first : 4 * last].reshape(*lead, t, 4, 2, 8, blocks, groups, 4)
        # warp, half, g, block, word, q -> as the module's docstring has it
        inner = (n + 1, n, n + 2, n + 5, n + 4) if groups == 4 else (n, n + 2, n + 5, n + 1, n + 4)
        c = c.transpose(*order, n + 3, *inner).reshape(*lead, t, blocks, -1)
        s = scale[..., first:last].reshape(*lead, t, 4, 2, 8, blocks, groups)
        s = s.transpose(*order, n + 3, n, n + 2, n + 1, n + 4).reshape(*lead, t, blocks, -1, 4)
        both = jnp.concatenate([c, lax.bitcast_convert_type(s, jnp.uint32)], -1)
        parts.append(both.reshape(*lead, t, -1))
    return jnp.concatenate(parts, -1).reshape(*lead, t, tile_lines(k), LINE)


def unpack(tiles: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack`: codes u8 [.., 64 T, K/2], scales u8 [.., 64 T, K/32]."""
    lead, t = tiles.shape[:-3], tiles.shape[-3]
    full, tail = k // 128, k % 128 // 64
    data = tiles.reshape(*lead, t, -1)
    n = len(lead) + 1
    order = tuple(range(n))
    codes, scales = [], []
    for blocks, groups, first in ((full, 4, 0), (tail, 2, full * BLOCK_LINES * LINE)):
        if not blocks:
            continue
        size = groups * TAIL_LINES // 2 * LINE
        part = data[..., first : first + blocks * size].reshape(*lead, t, blocks, size)
        c, s = part[..., : groups * 256], part[..., groups * 256 :]
        dims = (2, 4, 8, 4, groups) if groups == 4 else (4, 8, 4, 2, groups)
        inner = (n + 2, n + 1, n + 3, n, n + 5, n + 4)
        if groups == 2:  # block, warp, g, q, half, word
            inner = (n + 1, n + 4, n + 2, n, n + 5, n + 3)
        c = c.reshape(*lead, t, blocks, *dims).transpose(*order, *inner)
        codes.append(c.reshape(*lead, t * ROWS, -1))
        s = lax.bitcast_convert_type(s, jnp.uint8).reshape(*lead, t, blocks, 4, 8, 2, groups)
        s = s.transpose(*order, n + 1, n + 3, n + 2, n, n + 4)
        scales.append(s.reshape(*lead, t * ROWS, -1))
    whole = lax.bitcast_convert_type(unmixed(jnp.concatenate(codes, -1)), jnp.uint8)
    return whole.reshape(*lead, t * ROWS, k // 2), jnp.concatenate(scales, -1)


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
    per = k // GROUP  # words per thread and row
    body, scale = words[: k * 8], words[k * 8 :]
    byte = (scale[:, None] >> (jnp.arange(4, dtype=jnp.uint32) * 8)) & 0xFF
    byte = byte.reshape(32, 2, per).transpose(1, 0, 2)  # half, (warp, g), group
    byte = jnp.repeat(byte, 4, axis=1)
    pairs = body.reshape(128, 2, per).transpose(1, 0, 2)
    grid = body.reshape(2, 128, per) if k == 128 else pairs  # half, thread, word
    registers = _spread_twin(grid)  # [half, thread, word, p]
    halves = jnp.stack([registers & 0xFFFF, registers >> 16], axis=-2)  # [.., e, p]
    codes = (halves >> 12 & 8) | (halves >> 6 & 7)
    decoded = values(codes, byte[..., None, None])
    # [half, (warp, g, q), word, e, p] -> row (warp, half, g), position (word, p, q, e)
    decoded = decoded.reshape(2, 4, 8, 4, per, 2, 4).transpose(1, 0, 2, 4, 6, 3, 5)
    return decoded.reshape(ROWS, k)


def _spread_twin(words: jax.Array) -> jax.Array:
    """`_SPREAD` in plain jnp: u32 [.., 4]."""
    mask = np.uint32(0x81C081C0)
    last = (words & np.uint32(0x81808180)) | ((words >> 8) & np.uint32(0x00400040))
    return jnp.stack([words << 6 & mask, words << 2 & mask, _rotated(words, 28) & mask, last], -1)


# codes p and p + 4 of word $SOURCE as a register of two bf16 numbers, times 2^-126
_SPREAD = """
shl.b32 R0, SOURCE, 6;
shl.b32 R1, SOURCE, 2;
shf.r.wrap.b32 R2, SOURCE, SOURCE, 4;
shr.u32 R3, SOURCE, 8;
and.b32 R0, R0, 0x81C081C0;
and.b32 R1, R1, 0x81C081C0;
and.b32 R2, R2, 0x81C081C0;
and.b32 R3, R3, 0x00400040;
lop3.b32 R3, SOURCE, 0x81808180, R3, 0xEA;
"""
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0, d1, d2, d3},"
# $0..$3 sums, of rows g and g + 8, from $12..$15; $4, $5 words of these rows; $6..$9 operand;
# $10, $11 their scale bytes, of which GROUP's is used: 2^(s - 127), subnormal for s = 0
_GROUP = (
    "{\n.reg .b32 a0, a1, a2, a3, b0, b1, b2, b3, s, t;\n.reg .f32 d0, d1, d2, d3, z;\n"
    + "".join(
        _SPREAD.replace("SOURCE", word).replace("R", name)
        for word, name in (("$4", "a"), ("$5", "b"))
    )
    + f"""
mov.f32 z, 0f00000000;
{_MMA} {{a0, b0, a1, b1}}, {{$6, $7}}, {{z, z, z, z}};
{_MMA} {{a2, b2, a3, b3}}, {{$8, $9}}, {{d0, d1, d2, d3}};
SHIFT s, $10, COUNT;
SHIFT t, $11, COUNT;
and.b32 s, s, 0x7F800000;
and.b32 t, t, 0x7F800000;
max.u32 s, s, 0x00400000;
max.u32 t, t, 0x00400000;
mul.rn.f32 d0, d0, DROP;
fma.rn.f32 d0, d0, s, $12;
mul.rn.f32 d1, d1, DROP;
fma.rn.f32 d1, d1, s, $13;
mul.rn.f32 d2, d2, DROP;
fma.rn.f32 d2, d2, t, $14;
mul.rn.f32 d3, d3, DROP;
fma.rn.f32 d3, d3, t, $15;
mov.f32 $0, d0;
mov.f32 $1, d1;
mov.f32 $2, d2;
mov.f32 $3, d3;
}}
"""
)
_SHIFTS = (("shl.b32", 23), ("shl.b32", 15), ("shl.b32", 7), ("shr.u32", 1))
_LOAD4 = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
_LOAD2 = "ld.shared.v2.b32 {$0, $1}, [$2];"
_LOAD_HALVES = "{ .reg .b32 v; ld.shared.b32 v, [$2]; mov.b32 $0, v; shr.u32 $1, v, 16; }"


class Block(NamedTuple):
    """A thread's part of a block in registers: words and scale bytes of its rows g and g + 8."""

    words: Sequence[Sequence[Any]]
    scales: Sequence[Any]


def load_block(reg: common.Registers, base: Any, k: int) -> Block:
    """A block of 128 or 64 from shared memory, at the address `base` i32."""
    thread = reg.thread()
    at = reg.add(base, reg.mul(thread, 16))
    row = reg.ptx("shr.u32 $0, $1, 2;", thread, results=1)[0]
    if k == 128:
        words = [
            reg.ptx(_LOAD4, reg.add(at, half * 2048), results=4, volatile=True) for half in (0, 1)
        ]
        scale_at = reg.add(reg.add(base, 4096), reg.mul(row, 8))
        return Block(words, reg.ptx(_LOAD2, scale_at, results=2, volatile=True))
    four = reg.ptx(_LOAD4, at, results=4, volatile=True)
    scale_at = reg.add(reg.add(base, 2048), reg.mul(row, 4))
    scales = reg.ptx(_LOAD_HALVES, scale_at, results=2, volatile=True)
    return Block([four[:2], four[2:]], scales)


def multiply_block(
    reg: common.Registers, block: Block, operand: Callable[[int], Sequence[Any]], sums: Any
) -> Any:
    """The four sums of a thread with a block's products added.

    `operand(i)`: the lane's four words of the block's i-th 32 numbers.
    """
    for i in range(len(block.words[0])):
        x = operand(i)
        shift, count = _SHIFTS[i]
        text = _GROUP.replace("SHIFT", shift).replace("COUNT", str(count))
        text = text.replace("DROP", common.literal(2.0**126 / LIFT))
        both = block.words[0][i], block.words[1][i]
        sums = reg.ptx(text, *both, *x, *block.scales, *sums, results=4, kind=reg.f32)
    return sums


def _multiply_registers(acc: Any, block: Any, operand: Any, k: int) -> Any:
    reg = common.Registers()
    held = load_block(reg, reg.shared_address(block), k)
    reg.barrier()  # every warp has read the block: it may be overwritten
    lane = reg.ptx("and.b32 $0, $1, 31;", reg.thread(), results=1)[0]
    x_at = reg.add(reg.shared_address(operand), reg.mul(lane, 16))
    flat = acc.registers.reshape(2)
    sums = [v for half in (0, 1) for v in reg.pair(flat[half])]

    def x(i: int) -> Any:
        return reg.ptx(_LOAD4, reg.add(x_at, 512 * i), results=4, volatile=True)

    sums = multiply_block(reg, held, x, sums)
    out = np.empty(acc.registers.shape, dtype=object)
    out.reshape(2)[:] = [reg.paired(*sums[:2]), reg.paired(*sums[2:])]
    return reg.fa.FragmentedArray(_registers=out, _layout=acc.layout, _is_signed=None)


def zeros() -> jax.Array:
    """A sum [64, 8] to start from."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)


def multiply(acc: jax.Array, block: Any, operand: Any, k: int, *, interpret: bool) -> jax.Array:
    """Acc f32 [64, 8] plus the product of one block, k = 128 or 64, with `operand` [k/32, 8, 32].

    Both are shared-memory refs; the operand holds its numbers times `LIFT`. The block may be
    overwritten when this returns: all warps of the warpgroup have read it. The interpreter, which
    has no register code, runs the same sum on `decode_twin`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        w, x = decode_twin(block[...], k), operand[...]
        plgpu.commit_smem()  # the barrier, in the form the interpreter knows
        # [column, q, p, e] of each 32 -> positions (word, p, q, e)
        x = x.reshape(k // GROUP, 8, 4, 4, 2).transpose(1, 0, 3, 2, 4).reshape(8, k)
        w, x = w.astype(jnp.float32), x.astype(jnp.float32) / LIFT
        return acc + jnp.einsum("nk,ck->nc", w, x, precision=lax.Precision.HIGHEST)
    layout = plgpu.Layout.WGMMA
    call = plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((ROWS, 8), jnp.float32, layout=layout),
    )
    return call(lambda _, *args: _multiply_registers(*args, k))(acc, block, operand)

"""The packed expert layout and the decode's plain twin, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.ops.mxfp4 import dequantise
from pallas_kernels import experts_pack, mxfp4


def random_matrix(rows, k, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*rows, k // 2), dtype=np.uint8)
    scales = rng.integers(0, 255, (*rows, k // 32), dtype=np.uint8)
    return codes, scales


def bits(x):
    return np.asarray(x).view(np.uint16)


def decoded(tile, k):
    """All blocks of one tile, in the tensor core's order."""
    parts = [
        mxfp4.decode_twin(tile[b * mxfp4.BLOCK_LINES : (b + 1) * mxfp4.BLOCK_LINES], 128)
        for b in range(k // 128)
    ]
    if k % 128:
        parts.append(mxfp4.decode_twin(tile[k // 128 * mxfp4.BLOCK_LINES :], 64))
    return jnp.concatenate(parts, axis=-1)


@pytest.mark.parametrize("k", [64, 128, 192, 384])
def test_pack_is_a_permutation_of_bytes(k):
    codes, scales = random_matrix((2, 3, 128), k)
    tiles = mxfp4.pack(codes, scales)
    assert tiles.shape == (2, 3, 2, mxfp4.tile_lines(k), mxfp4.LINE)
    assert tiles.nbytes == codes.nbytes + scales.nbytes
    back = mxfp4.unpack(tiles, k)
    assert (np.asarray(back[0]) == codes).all() and (np.asarray(back[1]) == scales).all()


@pytest.mark.parametrize("k", [64, 128, 192])
def test_twin_equals_dequantised_weights(k):
    codes, scales = random_matrix((64,), k, seed=k)
    tile = mxfp4.pack(codes, scales)[0]
    want = bits(dequantise(codes, scales))[:, mxfp4.k_order(k)]
    assert (bits(decoded(tile, k)) == want).all()


def test_twin_over_all_bytes_and_scales():
    """256 code bytes under 255 scales, through the packed layout; float64 where bf16 is finite."""
    pairs = np.stack(np.meshgrid(np.arange(255), np.arange(256), indexing="ij"), -1).reshape(-1, 2)
    # one scale group of 16 equal code bytes for each pair, 4 groups per row of 128
    count = -(-len(pairs) // (64 * 4)) * 64 * 4
    pairs = np.resize(pairs, (count, 2)).astype(np.uint8).reshape(-1, 64, 4, 2)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([table, -table])
    for block in pairs:
        scales = block[..., 0]
        codes = np.repeat(block[..., 1], 16, axis=-1)
        got = decoded(mxfp4.pack(codes, scales)[0], 128)
        nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(64, 128)
        exact = table[nibbles] * 2.0 ** (np.repeat(scales, 32, axis=-1).astype(int) - 127)
        exact = exact[:, mxfp4.k_order(128)]
        # read from the bits: a conversion on the CPU may flush subnormals
        raw = bits(got).astype(np.uint32) << 16
        power = ((raw >> 23) & 255).astype(int)
        fraction = (raw & 0x7FFFFF) / 2.0**23
        value = np.where(power == 0, fraction * 2.0**-126, (1 + fraction) * 2.0 ** (power - 127.0))
        value = np.where(raw >> 31 == 1, -value, value)
        finite = np.abs(exact) < 2.0**128
        assert (value[finite] == exact[finite]).all()
        assert (power[~finite] == 255).all() and (fraction[~finite] == 0).all()


def test_operand_order_is_that_of_the_weights():
    x = np.arange(8 * 256).reshape(8, 256)
    got = np.asarray(mxfp4.operand_order(jnp.asarray(x)))
    want = x[:, mxfp4.unit_rows(256)].transpose(1, 0, 2)
    assert (got == want).all()
    assert sorted(mxfp4.unit_rows(192).reshape(-1)) == list(range(192))


@pytest.mark.parametrize("width", [64, 192])
def test_expert_stacks_round_trip(width):
    rng = np.random.default_rng(1)
    e, z = 3, 256
    raw = [
        rng.integers(0, 255, shape, dtype=np.uint8)
        for shape in (
            (2, e, 2 * width, z // 2),
            (2, e, 2 * width, z // 32),
            (2, e, z, width // 2),
            (2, e, z, width // 32),
        )
    ]
    w13, w2 = experts_pack.pack(*raw)
    assert w13.shape == (2, e * width // 32, mxfp4.tile_lines(z), 32)
    back = experts_pack.unpack(w13, w2, width=width, latent=z)
    assert all((np.asarray(a) == b).all() for a, b in zip(back, raw, strict=True))

"""MXFP4 weights to bf16, exactly (specification §4.4)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, UInt8


def dequantise(
    packed: UInt8[Array, "*lead o i_half"], scale: UInt8[Array, "*lead o i_groups"]
) -> BFloat16[Array, "*lead o i"]:
    """Values of packed E2M1 codes under E8M0 scales, bit-exact for scale bytes 0..254.

    A scale serves `GROUP` columns, or fewer where ranks share it: the shapes tell.

    The bf16 bits are put together as integers: a float multiplication would lose the subnormal
    values of scale bytes 0 and 1 wherever subnormals are flushed (XLA's CPU code does). What
    exceeds bf16 (scale bytes 253 and 254) becomes an infinity; byte 255 becomes NaN.
    """
    codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    codes = codes.reshape(*scale.shape, -1).astype(jnp.int32)
    byte = scale[..., None].astype(jnp.int32)
    magnitude = codes & 7
    # magnitude 1 is 0.5; 2k and 2k+1 are 2^(k-1) and 1.5 * 2^(k-1)
    exponent = byte + jnp.where(magnitude == 1, -1, (magnitude >> 1) - 1)
    half = jnp.where(magnitude == 1, 0, magnitude & 1)
    normal = (exponent << 7) | (half << 6)
    subnormal = (2 + half) << jnp.clip(exponent + 5, 0, 5)
    bits = jnp.where(exponent > 0, normal, subnormal)
    bits = jnp.where(exponent >= 255, 0x7F80, bits)
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(byte == 255, 0x7FC0, bits)
    bits = (bits | ((codes >> 3) << 15)).astype(jnp.uint16)
    values = lax.bitcast_convert_type(bits, jnp.bfloat16)
    return values.reshape(*packed.shape[:-1], -1)

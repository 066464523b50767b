"""Where rounding happens: the compute dtype and the rounding profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Numerics:
    """Rounding rules, passed to every formula.

    Attributes:
        compute: `bfloat16`, or `float32`, in which `round` is the identity.
        profile: `H` rounds where the published code does, `V` where vLLM's NVIDIA path does.
    """

    compute: Literal["bfloat16", "float32"] = "bfloat16"
    profile: Literal["H", "V"] = "V"

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations."""
        return jnp.dtype(self.compute)

    def round(self, x: jax.Array) -> jax.Array:
        """One rounding of an f32 value to the compute dtype.

        `reduce_precision` is what makes it happen: XLA may drop a plain f32 -> bf16 -> f32
        round trip as excess precision (seen on the CPU with JAX 0.10.2).
        """
        if self.compute == "float32":
            return x.astype(jnp.float32)
        return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(jnp.bfloat16)

    def einsum(self, spec: str, *operands: jax.Array) -> jax.Array:
        """Products of compute-dtype operands, accumulated in f32; f32 result, not rounded."""
        cast = [x.astype(self.dtype) for x in operands]
        if self.compute == "float32":
            return _exact_einsum(spec, *cast)
        # products of bf16 numbers are exact in f32, so both forms differ in summation order only;
        # XLA's CPU backend lacks bf16 x bf16 -> f32 for some batched shapes
        return lax.platform_dependent(
            *cast,
            cpu=partial(_exact_einsum, spec),
            default=partial(jnp.einsum, spec, preferred_element_type=jnp.float32),
        )

    def project(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`W x` for rows x [..., I] and W [O, I], in f32, not rounded."""
        return self.einsum("...i,oi->...o", x, weight)

    def linear(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`W x` with the one rounding of a bf16 GEMM."""
        return self.round(self.project(x, weight))


def _exact_einsum(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *(f32(x) for x in operands), precision=lax.Precision.HIGHEST)


def f32(x: jax.Array) -> jax.Array:
    """Upcast, exact."""
    return x.astype(jnp.float32)

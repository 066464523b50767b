"""The number format and the rounding profile of a run, passed explicitly to every formula.

Two dtypes occur. The *compute* dtype holds weights, activations and GEMM results. The *wide* dtype
holds what the specification computes in f32: the wider of f32 and the compute dtype. Only in
bfloat16 do the two differ, so only there do the rounding points of a profile have an effect.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Largest finite e4m3 value; the format has no infinity, so a value above it must be clamped, not
# cast.
FP8_MAX = 448.0


@dataclass(frozen=True)
class Numerics:
    """How to compute: dtype, rounding profile and the switches that go with them.

    Attributes:
        dtype: compute dtype: `torch.float64`, `torch.float32` or `torch.bfloat16`.
        profile: "H", the published code in decode mode with its eager attention, or "V", the
            serving path of vLLM on NVIDIA. Both are the same real-number function apart from
            `mla_norm_eps`.
        mla_norm_eps: epsilon of the two MLA latent norms; None means 1e-6 for H and 1e-5 for V.
        mla_form: "explicit" (keys and values per head, rounding points of eager attention) or
            "absorbed" (scores against latent rows in f32); None means explicit for H and absorbed
            for V.
        kda_fused: profile V only. False: convolution output and recurrence output are rounded to
            the compute dtype (as on 16 ranks); True: both stay wide (as the fused decode kernel).
        kv_dtype: "compute" or "fp8": how latent rows are cached.
        kv_scale: FP8 only and required there: a row is stored as e4m3(row / kv_scale), read times
            kv_scale.
        query_scale: optional, absorbed form over an FP8 cache only: the absorbed query is rounded
            to e4m3(query / query_scale) as well. None leaves the query in the compute dtype.
    """

    dtype: torch.dtype = torch.float64
    profile: str = "H"
    mla_norm_eps: float | None = None
    mla_form: str | None = None
    kda_fused: bool = False
    kv_dtype: str = "compute"
    kv_scale: float | None = None
    query_scale: float | None = None

    def __post_init__(self) -> None:
        """Fills the defaults that depend on the profile and refuses contradictions.

        Raises:
            ValueError: a field has an unknown value or contradicts another; all are named at once.
        """
        is_h = self.profile == "H"
        if self.mla_norm_eps is None:
            object.__setattr__(self, "mla_norm_eps", 1e-6 if is_h else 1e-5)
        if self.mla_form is None:
            object.__setattr__(self, "mla_form", "explicit" if is_h else "absorbed")
        fp8 = self.kv_dtype == "fp8"
        checks = {
            f"dtype {self.dtype} is not one of {_DTYPES}": self.dtype in _DTYPES,
            f"profile {self.profile!r} is not 'H' or 'V'": self.profile in ("H", "V"),
            f"mla_form {self.mla_form!r} is not 'explicit' or 'absorbed'": self.mla_form
            in ("explicit", "absorbed"),
            f"kv_dtype {self.kv_dtype!r} is not 'compute' or 'fp8'": self.kv_dtype
            in ("compute", "fp8"),
            "kda_fused belongs to profile 'V'": self.profile == "V" or not self.kda_fused,
            "kv_scale is required, and positive, with kv_dtype 'fp8' and not accepted otherwise": (
                self.kv_scale is not None and self.kv_scale > 0 if fp8 else self.kv_scale is None
            ),
            "query_scale needs kv_dtype 'fp8' and mla_form 'absorbed', and must be positive": (
                self.query_scale is None
                or (fp8 and self.mla_form == "absorbed" and self.query_scale > 0)
            ),
        }
        problems = [text for text, fine in checks.items() if not fine]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of the quantities that the specification keeps in f32, and of the KDA state."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def wide(self, x: Tensor) -> Tensor:
        """`x` in the wide dtype."""
        return x.to(self.wide_dtype)

    def round(self, x: Tensor) -> Tensor:
        """`x` in the compute dtype: a rounding point in bfloat16, else the identity."""
        return x.to(self.dtype)


def linear(x: Tensor, weight: Tensor, nm: Numerics) -> Tensor:
    """GEMM without bias: wide accumulation, one rounding of the result.

    The operands are widened first, because a native bf16 product may accumulate in another way.

    Args:
        x: [..., in], compute dtype.
        weight: [out, in], compute dtype.
        nm: numerics.

    Returns:
        [..., out], compute dtype.
    """
    return nm.round(nm.wide(x) @ nm.wide(weight).T)


def fp8_encode(x: Tensor, scale: float, nm: Numerics) -> Tensor:
    """e4m3(x / scale), saturating at +-448; any shape, result `torch.float8_e4m3fn`."""
    return (nm.wide(x) / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_decode(code: Tensor, scale: float, nm: Numerics) -> Tensor:
    """Wide code * scale: the product is not rounded to a bf16 row."""
    return nm.wide(code) * scale

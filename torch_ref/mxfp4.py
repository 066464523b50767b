"""Exact decoding of packed MXFP4 matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ref.numerics import Numerics

MXFP4_GROUP = 32  # columns that share one scale byte
_LAST_SAFE_SCALE = 252  # 6 * 2^125 is the largest value that f32 and bf16 still hold
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def mxfp4_decode(packed: Tensor, scale: Tensor, nm: Numerics) -> Tensor:
    """Exact values of a packed MXFP4 matrix.

    Byte j of a row holds column 2j in its low and column 2j + 1 in its high nibble (E2M1); each 32
    columns share one scale byte s, worth 2^(s - 127).

    Args:
        packed: [out, in / 2] uint8.
        scale: [out, in / 32] uint8.
        nm: numerics.

    Returns:
        [out, in], compute.

    Raises:
        ValueError: the shapes do not fit, a scale byte is 255 (NaN), or a value overflows the
            dtype.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if tuple(scale.shape) != (rows, columns // MXFP4_GROUP) or columns % MXFP4_GROUP:
        raise ValueError(
            f"MXFP4 codes {tuple(packed.shape)} do not fit scales {tuple(scale.shape)}"
        )
    if bool((scale == 255).any()):
        raise ValueError("MXFP4 scale byte 255 is NaN; the checkpoint is damaged")
    # Tables instead of exponent arithmetic: 2^-127 is a subnormal f32, which shifts and exp2 can
    # lose. The two columns of a byte travel as one complex number: one lookup moves both.
    pairs = [complex(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)]
    wide_pair = torch.complex128 if nm.wide_dtype == torch.float64 else torch.complex64
    table = torch.tensor(pairs, dtype=wide_pair, device=packed.device)
    codes = torch.view_as_real(table.index_select(0, packed.flatten().int()))
    power = torch.tensor([2.0 ** (s - 127) for s in range(255)], dtype=torch.float64)
    power = power.to(packed.device, nm.wide_dtype)[scale.long()]
    values = nm.round((codes.view(rows, -1, MXFP4_GROUP) * power[..., None]).view(rows, columns))
    if int(scale.max()) > _LAST_SAFE_SCALE and not bool(torch.isfinite(values).all()):
        raise ValueError(f"MXFP4 value overflows {nm.dtype}: scale byte {int(scale.max())}")
    return values

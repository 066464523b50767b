"""What every kernel needs of the installation and the device."""

from __future__ import annotations

import jax

MINIMUM_JAX = (0, 11, 2)  # warpgroup lowering by default, written Refs aliased under jit
KERNELS: tuple[str, ...] = ()  # stages that have a kernel


def unmet_conditions() -> list[str]:
    """Why no specialised step can run here; empty if one can. Each entry: found and expected."""
    reasons = []
    if jax.__version_info__ < MINIMUM_JAX:
        wanted = ".".join(map(str, MINIMUM_JAX))
        reasons.append(f"JAX {jax.__version__} found, kernels need {wanted} (Python 3.12) or newer")
    kinds = sorted({d.platform for d in jax.devices()})
    if kinds != ["gpu"]:
        reasons.append(f"devices found: {', '.join(kinds)}; kernels need an NVIDIA GPU")
    if not KERNELS:
        reasons.append("this version has no specialised kernels")
    return reasons

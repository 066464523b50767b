"""What a figure was measured on: device, driver, versions and clocks, as conditions of a result."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "torch")
QUERY = (
    "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
    "temperature.gpu", "clocks_event_reasons.active",
)  # fmt: skip
# what XLA reads; JAX's default share of 0.75 would leave no room for 98 GB of weights
FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def set_memory_fraction(fraction: float) -> None:
    """Share of a GPU's memory that JAX takes; before JAX's first use of a device.

    Raises:
        ValueError: out of range.
    """
    if not 0 < fraction <= 1:
        raise ValueError(
            f"--memory-fraction {fraction}: expected more than 0, at most 1; change it"
        )
    os.environ[FRACTION_VARIABLE] = f"{fraction:g}"


def versions() -> dict[str, str]:
    """Of Python and of the packages that count, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpu_state() -> dict[str, str]:
    """Driver, clocks, power and temperature of the first GPU; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    values = [v.strip() for v in done.stdout.strip().split(",")]
    if done.returncode or len(values) != len(QUERY):
        return {}
    return dict(zip(QUERY, values, strict=True))


def describe_machine() -> dict[str, Any]:
    """Device, driver, versions and clocks; the clocks are those of this moment."""
    import jax

    devices = jax.devices()
    state = gpu_state() if devices[0].platform == "gpu" else {}
    return {
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "devices": len(devices),
        "driver": state.pop("driver_version", "none"),
        "versions": versions(),
        "clocks": state or "not read",
    }


def command_line(argv: list[str] | None = None) -> str:
    """The command as typed; of this process where `argv` is None."""
    return " ".join(["python -m bench", *(sys.argv[1:] if argv is None else argv)])

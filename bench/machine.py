"""What a figure was measured on: device, driver, versions and clocks, as conditions of a result."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = "kimi-k3-jax"
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


def code_version() -> str:
    """The commit that runs, `+` behind it with changes; without git the package's version."""
    root = Path(__file__).parents[1]
    said = []
    for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno")):
        command = ["git", "-C", str(root), *words]
        if not (root / ".git").exists() or shutil.which("git") is None:
            break
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            break
        said.append(done.stdout.strip())
    if len(said) == 2:
        return f"commit {said[0]}{'+' if said[1] else ''}"
    try:
        return f"{PACKAGE} {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        return "unknown: neither a git checkout nor an installed package"


def first_gpu() -> str:
    """What nvidia-smi calls the first GPU that this process sees: a number or a UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return visible or "0"


def gpu_state() -> dict[str, str]:
    """Driver, clocks, power and temperature of the first visible GPU; empty without nvidia-smi.

    Numbers are those of nvidia-smi where CUDA_DEVICE_ORDER is PCI_BUS_ID or all GPUs are alike.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = f"--query-gpu={','.join(QUERY)}"
    command = ["nvidia-smi", fields, "--format=csv,noheader", f"--id={first_gpu()}"]
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
        "code": code_version(),
        "clocks": state or "not read",
    }


def with_clocks_now(machine: dict[str, Any]) -> dict[str, Any]:
    """`describe_machine` of before the timing, with the clocks right behind it beside them."""
    now = gpu_state() if machine["platform"] == "gpu" else {}
    now.pop("driver_version", None)
    return machine | {"clocks_before": machine["clocks"], "clocks": now or "not read"}


def command_line(argv: list[str] | None = None) -> str:
    """The command as typed; of this process where `argv` is None."""
    return " ".join(["python -m bench", *(sys.argv[1:] if argv is None else argv)])

"""Compile every kernel at real shapes for a GPU that is absent: `python -m parity.kernel_aot`.

    python -m parity.kernel_aot --target h200|gb300 [--match PART ...]
    python -m parity.kernel_aot --target gb300 --hosts 4 --gpus 4

The second form compiles the exchanges between ranks for a mesh of that many hosts (a process each)
and GPUs per host. One target per process. Needs the CUDA plugin of JAX, ptxas and libdevice (extra
`aot`). Prints registers and spilled bytes as ptxas reports them; exit status 1 if a kernel that
must not spill does. It proves that kernels lower and assemble, not what they compute.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from parity.kernel_cases import cases, exchange_cases, mla_cases

TARGETS = {  # cores, compute capability, L2 and memory bytes, name
    "h200": (132, (9, 0), 62914560, 150 << 30, "NVIDIA H200"),
    "gb300": (152, (10, 3), 135528448, 276 << 30, "NVIDIA GB300"),
}
SYMMETRIC = ":S(7)"  # how a compiled program marks arrays in symmetric memory
_OF_CLUSTERS = r"\bmapa\.|\bst\.async\.|\bbarrier\.cluster\."
MAY_SPILL: set[str] = set()  # kernels that keep more than the registers hold, by design


def plugin_folder() -> Path | None:
    """Folder of the CUDA wheels (ptxas, libdevice), or None where they are not installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return None
    found = importlib.util.find_spec("nvidia")
    for place in (found.submodule_search_locations or []) if found else []:
        if (Path(place) / "cu13" / "bin" / "ptxas").exists():
            return Path(place) / "cu13"
    return None


def description(target: str) -> str:
    """XLA's target configuration in text form."""
    cores, (major, minor), l2, memory, name = TARGETS[target]
    version = 'driver_version: "13.0.0" runtime_version: "12.8.0"'
    return (
        "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32"
        " shared_memory_per_block: 49152 shared_memory_per_core: 233472"
        f" threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128"
        " block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535"
        f" memory_bandwidth: 4800000000000 l2_cache_size: {l2} clock_rate_ghz: 1.98"
        f" device_memory_size: {memory} shared_memory_per_block_optin: 232448"
        f" cuda_compute_capability {{ major: {major} minor: {minor}"
        " feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536"
        " registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024"
        f' thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" name: "{name}" {version}'
        ' compile_time_toolkit_version: "12.8.0" dnn_version: "9.15.0" } platform_name: "CUDA"'
        f' dnn_version_info {{ major: 9 minor: 15 }} device_description_str: "{name}"'
    )


@contextlib.contextmanager
def _reports(folder: Path) -> Iterator[None]:
    names = {
        "MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }  # fmt: skip
    os.environ |= names
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def alone_in_a_cluster(ptx: str) -> bool:
    """Whether a kernel without clusters has instructions of one: ptxas takes them, the GPU not."""
    return "explicitcluster" not in ptx and re.search(_OF_CLUSTERS, ptx) is not None


def compile_case(
    target: str, call: Callable[..., Any], avals: tuple[Any, ...], hosts: int = 1, gpus: int = 1
) -> list[str]:
    """Compile; ptxas' lines `kernel registers spilled` for every kernel in it.

    On several GPUs the call is one rank's, and so are its arguments: vectors, of which a rank holds
    a part.
    """
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description(target), topology=f"1x{hosts}x{gpus}"
    )
    ranks = hosts * gpus
    mesh = topologies.make_mesh(topology, (ranks,), ("x",))
    cut = jax.sharding.PartitionSpec(*["x"] * (ranks > 1))
    here = jax.sharding.NamedSharding(mesh, cut)

    def place(a: Any) -> Any:
        shape = tuple(n * ranks for n in a.shape) if ranks > 1 else a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=here)

    placed = jax.tree.map(place, avals)
    if ranks > 1:
        call = jax.shard_map(call, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    with tempfile.TemporaryDirectory() as name:
        with _reports(Path(name)), jax.default_device(topology.devices[0]):
            text = jax.jit(call).lower(*placed).compile().as_text() or ""
        if hosts > 1 and SYMMETRIC not in text:
            raise RuntimeError("what other processes write to does not lie in symmetric memory")
        for file in sorted(Path(name).glob("*.ptx")):
            if alone_in_a_cluster(file.read_text()):
                raise RuntimeError(f"{file.stem} has no clusters, but instructions of one")
        lines = []
        for file in sorted(Path(name).glob("*.ptxas")):
            text = file.read_text()
            registers = re.findall(r"Used (\d+) registers", text)[-1]
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill", text.split("Function")[-1])))
            kernel = re.sub(r"_\d+$", "", file.stem)
            lines.append(f"{kernel} {registers} {spilled}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Compile the cases of one target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", choices=tuple(TARGETS), default="h200")
    parser.add_argument("--match", nargs="+", default=[""], help="parts of names of cases")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1, help="of a host")
    args = parser.parse_args(argv)
    folder = plugin_folder()
    if folder is None:
        print("NOT RUN: no CUDA plugin with ptxas; install the extra `aot`", file=sys.stderr)
        return 2
    # no driver and no cuDNN here; nothing to tune on
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    os.environ["PATH"] += os.pathsep + str(folder / "bin")
    bad = 0
    ranks = args.hosts * args.gpus
    every = exchange_cases(ranks, args.hosts) if ranks > 1 else cases() | mla_cases()
    if args.target != "h200":  # wgmma in it
        every = {name: case for name, case in every.items() if not name.startswith("mix_")}
    chosen = [name for name in every if any(part in name for part in args.match)]
    if not chosen:
        known = ", ".join(every)
        print(f"no case has {args.match} in its name; there are {known}", file=sys.stderr)
        return 2
    for name in chosen:
        call, avals = every[name]
        for line in compile_case(args.target, call, avals, args.hosts, args.gpus):
            kernel, registers, spilled = line.split()
            print(f"{name}: {kernel} {registers} registers, {spilled} bytes spilled", flush=True)
            bad += int(spilled) > 0 and kernel not in MAY_SPILL
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

"""What each process of a load over 16 ranks reads, and a conversion in half the memory.

    python -m bench.loader_ranks [CKPT] [--json PATH] [--scratch DIR]

Method. Without CKPT the preset `big` of `jax_impl.make_tiny` with 15 layers (more than 4 GB) is
written to a temporary directory. Every measurement runs in fresh processes on emulated CPU devices,
after the files' pages were dropped from the page cache (posix_fadvise):

1. all 16 ranks in one process, then in four processes of four ranks each (`jax.distributed`);
2. `convert` in a process that set RLIMIT_DATA to half of the checkpoint's bytes before its imports
   (to 1 GiB for checkpoints under 2 GiB, which say nothing about the limit). That limit counts
   heap, stacks and private writable mappings, and no mapped files; afterwards an allocation of
   the limit's size has to fail, which shows that the limit was in force;
3. the loads of 1. from the prepared checkpoint.

For every tensor the bytes that the reader counted have to equal the bytes of what the process's
ranks hold of it: less would be an incomplete load, more a byte read twice or needlessly. Released
and prepared form have to give the same bits on every device (CRC-32 per array and device).
Resident memory before a conversion counts its imports without orbax's (about 60 MB).
`device_read_bytes` is what the kernel fetched from the disk for the process (/proc/self/io); it
counts whole pages and read-ahead. Exit status 0 only if all of this holds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.loader_memory import SAMPLE_SECONDS, PeakSampler, require_inputs, status_bytes

if TYPE_CHECKING:
    from jax_impl.checkpoint import Checkpoint
    from jax_impl.sharding import Placement

SCHEMA = "bench.loader_ranks/1"
RANKS = 16
LAYERS = 15  # of the preset `big`, for more than 4e9 bytes
LEAST = 1 << 30  # bytes of private memory that imports and threads take by themselves, rounded up
ROOT = Path(__file__).resolve().parent.parent


# ---- in a fresh process ----


def needed_bytes(checkpoint: Checkpoint, placement: Placement) -> dict[str, int]:
    """Bytes of every tensor that the ranks of this process hold, each counted once."""
    from jax_impl.weights import BYTES, checkpoint_tensors, rank_entries

    ranks, found = placement.ranks.size, {}
    for name, part, dtype in checkpoint_tensors(checkpoint.config, checkpoint.table):
        size = math.prod(part.shape) * BYTES[dtype]
        if part.cut is not None:
            entries = {i for rank in placement.here for i in rank_entries(part, ranks, rank)}
            size = size // part.shape[part.cut] * len(entries)
        found[name] = size
    return found


def disk_bytes() -> int:
    """Bytes that the kernel has fetched from the disk for this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes; this benchmark needs Linux")


def load_here(path: Path, processes: int, index: int, port: int) -> dict[str, Any]:
    """Load this process's ranks and compare what was read with what they need."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, index)

    from jax_impl.checkpoint import Checkpoint
    from jax_impl.loader import load_arrays
    from jax_impl.sharding import place_ranks

    placement = place_ranks(RANKS)
    jax.jit(lambda x: x + 1)(jnp.zeros(8)).block_until_ready()
    before, disk, busy = status_bytes("VmRSS"), disk_bytes(), time.process_time()
    begin = time.perf_counter()
    read: dict[str, int] = {}
    with PeakSampler() as sampler:
        checkpoint = Checkpoint.open(path)
        opened = time.perf_counter()
        arrays = jax.block_until_ready(load_arrays(checkpoint, None, placement, read))
        end = time.perf_counter()
    disk, busy = disk_bytes() - disk, time.process_time() - busy
    needed = needed_bytes(checkpoint, placement)
    shards = [(key, s) for key, a in sorted(arrays.items()) for s in a.addressable_shards]
    total = sum(read.values())
    placed = sum(s.data.nbytes for _, s in shards)
    digests = {}
    for (kind, name), shard in shards:
        data = np.asarray(shard.data).reshape(-1).view(np.uint8).data
        digests[f"{kind}.{name} on {shard.device.id}"] = zlib.crc32(data)
    return {
        "ranks": list(placement.here),
        "read_bytes": total,
        "needed_bytes": sum(needed.values()),
        "tensors_read_otherwise": sum(read.get(n, 0) != size for n, size in needed.items()),
        "tensors": len(needed),
        "placed_bytes": placed,
        "device_read_bytes": disk,
        "open_seconds": opened - begin,
        "load_seconds": end - opened,
        "cpu_seconds": busy,
        "read_bytes_per_second": total / (end - opened),
        "rss_before_bytes": before,
        "rss_peak_bytes": sampler.peak,
        "digests": digests,
    }


def convert_here(path: Path, out: Path, limit: int) -> dict[str, Any]:
    """Convert within `limit` bytes of private memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with PeakSampler() as sampler:
        import numpy as np

        from jax_impl.checkpoint import Checkpoint
        from jax_impl.convert import convert
        from jax_impl.prepared import plan_items

        checkpoint = Checkpoint.open(path)
        before, busy = status_bytes("VmRSS"), time.process_time()
        figures = convert(checkpoint, out)
        busy = time.process_time() - busy
    try:
        np.ones(limit, np.uint8)
        enforced = False
    except MemoryError:
        enforced = True
    items = plan_items(checkpoint.config, checkpoint.table)
    sizes = {item: sum(a.stored.nbytes for a in arrays) for item, arrays in items.items()}
    layer = max(size for item, size in sizes.items() if item != "root")
    for key in ("source", "out"):
        del figures[key]
    return figures | {
        "cpu_seconds": busy,
        "limit": "RLIMIT_DATA",
        "limit_bytes": limit,
        "limit_enforced": enforced,
        "largest_layer_bytes": layer,
        "largest_item_bytes": max(sizes.values()),
        "rss_before_bytes": before,
        "rss_peak_bytes": sampler.peak,
        "hwm_bytes": status_bytes("VmHWM"),
        "beyond_start_largest_items": (sampler.peak - before) / max(sizes.values()),
    }


# ---- starting them ----


def start(devices: int, *args: object) -> subprocess.Popen[str]:
    """This module in a new interpreter with so many emulated devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "bench.loader_ranks", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(started: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """The results of the processes.

    Raises:
        RuntimeError: one of them failed; its errors are on standard error.
    """
    outputs = [process.communicate()[0] for process in started]
    failed = [p.returncode for p in started if p.returncode]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(started)} process(es) failed: {failed}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def drop_pages(path: Path) -> None:
    """Drop all files' pages below `path` from the page cache, so that reads reach the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure_load(path: Path, processes: int) -> dict[str, Any]:
    """All ranks over so many processes; the digests are in rank order of the devices."""
    drop_pages(path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    begin = time.perf_counter()
    shared = ("--load", path, "--processes", processes, "--port", port)
    started = [start(RANKS // processes, *shared, "--index", i) for i in range(processes)]
    found = finish(started)
    seconds = max(f["open_seconds"] + f["load_seconds"] for f in found)
    digests = [list(f.pop("digests").values()) for f in found]
    total = sum(f["read_bytes"] for f in found)
    return {
        "processes": found,
        "read_bytes": total,
        "placed_bytes": sum(f["placed_bytes"] for f in found),
        "each_byte_at_most_once_and_none_needlessly": all(
            f["tensors_read_otherwise"] == 0 and f["read_bytes"] == f["needed_bytes"] for f in found
        ),
        "seconds": seconds,
        "seconds_with_start": time.perf_counter() - begin,
        "read_bytes_per_second": total / seconds,
        "digest": zlib.crc32(repr(digests).encode()),
    }


def measure(path: Path, scratch: Path) -> dict[str, Any]:
    """All figures."""
    from jax_impl.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path)
    size = sum(s.nbytes for s in checkpoint.consumed.values())
    figures: dict[str, Any] = {
        "checkpoint_bytes": size,
        "tensors": len(checkpoint.consumed),
        "files": len({s.file for s in checkpoint.consumed.values()}),
    }
    out = scratch / "prepared"
    for form, place in (("released", path), ("prepared", out)):
        if form == "prepared":
            print("converting ...", file=sys.stderr)
            drop_pages(path)
            args = ("--convert", path, "--out", out, "--limit", max(LEAST, size // 2))
            (figures["convert"],) = finish([start(1, *args)])
        for processes in (1, 4):
            print(f"loading the {form} form in {processes} process(es) ...", file=sys.stderr)
            figures[f"{form}_{processes}"] = measure_load(place, processes)
    return figures


def failures(figures: dict[str, Any]) -> list[str]:
    """What does not hold."""
    found = []
    for processes in (1, 4):
        pair = [figures[f"{form}_{processes}"] for form in ("released", "prepared")]
        if not all(f["each_byte_at_most_once_and_none_needlessly"] for f in pair):
            found.append(f"{processes} process(es): bytes read differ from the bytes needed")
        if pair[0]["digest"] != pair[1]["digest"]:
            found.append(f"{processes} process(es): released and prepared form load differently")
    if not figures["convert"]["limit_enforced"]:
        found.append("convert: the memory limit was not in force")
    return found


def result(
    figures: dict[str, Any], command: str, source: str, busy: tuple[float, ...]
) -> dict[str, Any]:
    """The result file's content: conditions apart from figures."""
    names = ("jax", "jaxlib", "numpy", "safetensors", "orbax-checkpoint", "tensorstore")
    conditions = {
        "host": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "cpus": os.cpu_count(),
            "load_average_before": busy,
            "load_average_after": os.getloadavg(),
        },
        "device": f"emulated CPU devices, {RANKS} in all",
        "ranks": RANKS,
        "experts": "tp",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "page_cache": "the files' pages dropped before every measurement",
        "sample_seconds": SAMPLE_SECONDS,
        "checkpoint": source,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return {
        "schema": SCHEMA,
        "command": command,
        "conditions": conditions,
        "figures": figures,
        "failures": failures(figures),
        "parity": None,
    }


def print_figures(report: dict[str, Any]) -> None:
    """The figures for people."""
    f = report["figures"]
    print(f"checkpoint {f['checkpoint_bytes'] / 1e9:.3f} GB, {f['tensors']} tensors")
    for form in ("released", "prepared"):
        for processes in (1, 4):
            run = f[f"{form}_{processes}"]
            each = ", ".join(f"{p['read_bytes'] / 1e9:.3f}" for p in run["processes"])
            disk = ", ".join(f"{p['device_read_bytes'] / 1e9:.3f}" for p in run["processes"])
            once = run["each_byte_at_most_once_and_none_needlessly"]
            print(f"{form}, {processes} process(es): read {each} GB each (from disk {disk}), ")
            cpu = sum(p["cpu_seconds"] for p in run["processes"])
            rate = run["read_bytes_per_second"] / 1e9
            print(f"  {run['seconds']:.1f} s ({cpu:.1f} s of CPU), {rate:.2f} GB/s")
            print(f"  each byte at most once and none needlessly: {once}")
    c = f["convert"]
    limit = f"{c['limit']} {c['limit_bytes'] / 1e9:.3f} GB (enforced: {c['limit_enforced']})"
    rate = c["written_bytes_per_second"] / 1e9
    print(f"convert: {c['bytes'] / 1e9:.3f} GB in {c['seconds']:.1f} s ({rate:.2f} GB/s), {limit}")
    print(f"  {c['cpu_seconds']:.1f} s of CPU")
    peak, before = c["rss_peak_bytes"] / 1e9, c["rss_before_bytes"] / 1e9
    print(f"  resident {before:.3f} GB before, {peak:.3f} GB at its peak; ", end="")
    print(f"largest layer {c['largest_layer_bytes'] / 1e9:.3f} GB")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: a temporary one")
    parser.add_argument("--json", help="write the result file here ('-' for standard output)")
    parser.add_argument("--scratch", type=Path, help="where temporary files go (twice the size)")
    for name, kind in (("--load", Path), ("--convert", Path), ("--out", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    for name in ("--processes", "--index", "--port", "--limit"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; the exit status says whether everything holds."""
    args = parse(argv)
    if args.load:
        print(json.dumps(load_here(args.load, args.processes, args.index, args.port)))
        return 0
    if args.convert:
        print(json.dumps(convert_here(args.convert, args.out, args.limit)))
        return 0
    require_inputs(args.checkpoint, args.json)
    if args.scratch is not None and not args.scratch.is_dir():
        raise ValueError(f"--scratch {args.scratch}: expected a directory; create it")
    busy = os.getloadavg()  # of others: elapsed times mean little on a busy machine
    with tempfile.TemporaryDirectory(prefix="k3-loader-ranks-", dir=args.scratch) as scratch:
        path, source = args.checkpoint, "given checkpoint"
        if path is None:
            from jax_impl.make_tiny import make_checkpoint

            source = f"make_tiny preset big, num_hidden_layers {LAYERS}, seed 0"
            print(f"writing a temporary checkpoint ({source}) ...", file=sys.stderr)
            made = Path(scratch) / "big"
            make_checkpoint(made, "big", overrides={"num_hidden_layers": LAYERS})
            path = made / "target"
        figures = measure(path.resolve(), Path(scratch))
    command = shlex.join(["python", "-m", "bench.loader_ranks", *(argv or sys.argv[1:])])
    report = result(figures, command, source, busy)
    if args.json != "-":
        print_figures(report)
    if args.json:
        from jax_impl.output import write_json

        write_json(args.json, report)
    for failure in report["failures"]:
        print(failure, file=sys.stderr)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    from jax_impl.output import run_command

    raise SystemExit(run_command("python -m bench.loader_ranks", main))

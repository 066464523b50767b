"""How much host memory the loader takes beyond the weights themselves.

    python -m bench.loader_memory [CKPT] [--json PATH] [--limit 1.3]

Method: a fresh process imports everything, starts the CPU client and compiles one program, then
notes its resident memory; a thread samples resident memory every 2 ms while the checkpoint is
opened and loaded. The figure is

    ratio = (peak resident - resident before - bytes of the placed arrays) / largest shard file

Mapped file pages count as resident. The kernel's own high-water mark (VmHWM) is recorded beside the
sampled peak; it also contains peaks from before the load. Without CKPT the preset `big` of
`jax_impl.make_tiny` (more than 2 GB, 12 shards) is written to a temporary directory first.
Exit status 0 only if the ratio is within the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

SCHEMA = "bench.loader_memory/1"
LIMIT = 1.3  # largest shards beyond the placed arrays
SAMPLE_SECONDS = 0.002


def status_bytes(key: str) -> int:
    """A memory figure of this process from /proc/self/status, e.g. VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}; this benchmark needs Linux")


class PeakSampler:
    """Context manager: the largest resident memory seen while it is open, in `peak` (bytes)."""

    def __enter__(self) -> PeakSampler:
        """Start sampling."""
        self.peak = status_bytes("VmRSS")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, status_bytes("VmRSS"))

    def _run(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            while not self._stop.wait(SAMPLE_SECONDS):
                statm.seek(0)
                self.peak = max(self.peak, int(statm.read().split()[1]) * page)


def measure(path: Path) -> dict[str, Any]:
    """Load the checkpoint in this process; meant for a fresh one."""
    import jax
    import jax.numpy as jnp
    import numpy
    import safetensors

    from jax_impl.checkpoint import Checkpoint
    from jax_impl.loader import load_weights

    jax.jit(lambda x: x + 1)(jnp.zeros(8)).block_until_ready()
    before = status_bytes("VmRSS")
    begin = time.perf_counter()
    with PeakSampler() as sampler:
        checkpoint = Checkpoint.open(path)
        opened = time.perf_counter()
        weights = jax.block_until_ready(load_weights(checkpoint))
        end = time.perf_counter()
    after = status_bytes("VmRSS")
    placed = sum(a.nbytes for a in jax.tree.leaves(weights))
    files = sorted({s.file for s in checkpoint.consumed.values()})
    shards = [(path / f).stat().st_size for f in files]
    beyond = sampler.peak - before - placed
    return {
        "shards": len(shards),
        "shard_bytes": shards,
        "largest_shard_bytes": max(shards),
        "checkpoint_bytes": sum(shards),
        "tensors": len(checkpoint.consumed),
        "placed_bytes": placed,
        "rss_before_bytes": before,
        "rss_after_bytes": after,
        "rss_peak_bytes": sampler.peak,
        "hwm_bytes": status_bytes("VmHWM"),
        "beyond_placed_bytes": beyond,
        "ratio": beyond / max(shards),
        "open_seconds": opened - begin,
        "load_seconds": end - opened,
        "placed_bytes_per_second": placed / (end - opened),
        "device": str(jax.devices()[0]),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "numpy": numpy.__version__,
            "safetensors": safetensors.__version__,
        },
    }


def require_inputs(checkpoint: Path | None, target: str | None) -> None:
    """Before the work: the result can be written, the checkpoint be read.

    Raises:
        ValueError: one of the two cannot, and why.
    """
    from jax_impl.checkpoint import Checkpoint
    from jax_impl.output import Output

    Output(target).prepare()
    if checkpoint is not None:
        Checkpoint.open(checkpoint)


def in_fresh_process(path: Path) -> dict[str, Any]:
    """`measure` in a new interpreter on the CPU."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "bench.loader_memory", str(path), "--measure-here"],
        cwd=root,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def result(figures: dict[str, Any], command: str, limit: float) -> dict[str, Any]:
    """The result file's content: conditions apart from figures."""
    figures = dict(figures)
    conditions = {
        "host": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "cpus": os.cpu_count(),
        },
        "device": figures.pop("device"),
        "versions": figures.pop("versions"),
        "sample_seconds": SAMPLE_SECONDS,
        "limit_ratio": limit,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return {
        "schema": SCHEMA,
        "command": command,
        "conditions": conditions,
        "figures": figures,
        "parity": None,
    }


def print_table(report: dict[str, Any]) -> None:
    """The figures for people."""
    f, c = report["figures"], report["conditions"]
    mb = 1e6
    print(f"shards          {f['shards']}: " + ", ".join(f"{s / mb:.0f}" for s in f["shard_bytes"]))
    print(f"                (MB; together {f['checkpoint_bytes'] / mb:,.1f})")
    for label, key in (
        ("largest shard", "largest_shard_bytes"),
        ("placed arrays", "placed_bytes"),
        ("resident before", "rss_before_bytes"),
        ("resident peak", "rss_peak_bytes"),
        ("resident after", "rss_after_bytes"),
        ("beyond placed", "beyond_placed_bytes"),
    ):
        print(f"{label:15} {f[key] / mb:,.1f} MB")
    print(f"{'ratio':15} {f['ratio']:.3f} largest shards (limit {c['limit_ratio']})")
    rate = f["placed_bytes_per_second"] / 1e9
    seconds = f"{f['open_seconds']:.2f} s, {f['load_seconds']:.2f} s"
    print(f"{'open, load':15} {seconds} ({rate:.2f} GB/s)")
    versions = ", ".join(f"{k} {v}" for k, v in c["versions"].items())
    print(f"{'conditions':15} {c['device']}; {c['host']['cpus']} CPUs; {versions}")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; the exit status says whether the ratio is within the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: a temporary `big` one")
    parser.add_argument("--json", help="write the result file here ('-' for standard output)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="largest allowed ratio")
    parser.add_argument("--measure-here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure_here:
        print(json.dumps(measure(args.checkpoint)))
        return 0
    require_inputs(args.checkpoint, args.json)
    with tempfile.TemporaryDirectory(prefix="k3-loader-memory-") as scratch:
        path, source = args.checkpoint, "given checkpoint"
        if path is None:
            from jax_impl.make_tiny import make_checkpoint

            print("writing a temporary checkpoint (preset big) ...", file=sys.stderr)
            make_checkpoint(Path(scratch) / "big", "big")
            path, source = Path(scratch) / "big" / "target", "make_tiny preset big, seed 0"
        figures = in_fresh_process(path.resolve())
    parts = ["python -m bench.loader_memory", *(sys.argv[1:] if argv is None else argv)]
    report = result(figures, " ".join(parts), args.limit)
    report["conditions"]["checkpoint"] = source
    if args.json != "-":
        print_table(report)
    if args.json:
        from jax_impl.output import write_json

        write_json(args.json, report)
    within = figures["ratio"] <= args.limit
    if not within:
        print(f"ratio {figures['ratio']:.3f} exceeds {args.limit}", file=sys.stderr)
    return 0 if within else 1


if __name__ == "__main__":
    from jax_impl.output import run_command

    raise SystemExit(run_command("python -m bench.loader_memory", main))

"""What the processes of `test_processes` run: DIRECTORY PORT NUMBER INDEX MODE START STALL.

Modes: `sums` and `sums-on` join JAX and add over 16 devices, four times or without end; `load`
joins and loads DIRECTORY/target. All others do without JAX: they step until DIRECTORY/stop exists;
`error`, `stall` and `verdict` say what happens in between.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from jax_impl import processes
from jax_impl.processes import COMPILING, ProcessOptions, is_first, launch, report


def main() -> int:
    """As a command of the project would: errors for the user are printed and give status 2."""
    directory, port, number, index, mode, start, stall = sys.argv[1:]
    where, me = Path(directory), int(index)
    options = ProcessOptions(f"127.0.0.1:{port}", int(number), me, 4, float(start), float(stall))
    with_jax = {"sums": add, "sums-on": add, "load": load}
    if mode not in with_jax:
        processes.join = lambda *_: None  # type: ignore[assignment]

    def work() -> int:
        (where / f"pid{me}").write_text(str(os.getpid()))
        return with_jax.get(mode, step_on)(where, me, mode)

    try:
        return launch(options, work)
    except ValueError as error:
        print(f"program: {error}", file=sys.stderr)
        return 2


def note(where: Path, me: int, step: int) -> None:
    """Let the test see how far this process is."""
    partial = where / f".step{me}"
    partial.write_text(str(step))
    partial.replace(where / f"step{me}")


def step_on(where: Path, me: int, mode: str) -> int:
    """Steps that wait for nothing."""
    step = 0
    while not (where / "stop").exists():
        if mode == "error" and me == 1 and step == 3:
            raise ValueError("config.json: found 3, expected 4; correct it")
        if mode == "stall" and me == 2 and step == 3:
            time.sleep(1000)
        if not (mode == "stall" and step > 3):
            step += 1
            report(step, "waiting for tokens")
            note(where, me, step)
        time.sleep(0.05)
    print(f"stopped by request, first: {is_first()}")
    return 1 if mode == "verdict" else 0


def add(where: Path, me: int, mode: str) -> int:
    """A sum and a gather over all devices of all processes, step by step."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x, "tp"), jax.lax.all_gather(x, "tp", tiled=True, to="invarying")

    mesh = Mesh(np.array(jax.devices()), ("tp",))
    both = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P()))
    values = np.arange(mesh.size, dtype=np.float32)
    x = jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, P("tp")), lambda at: values[at]
    )
    step = 0
    while step < 4 or mode == "sums-on":
        step += 1
        report(step, "waiting for sums", allow=COMPILING if step == 1 else 0.0)
        total, gathered = (np.asarray(a) for a in both(x))
        note(where, me, step)
        time.sleep(0.02)
    found = f"{jax.process_count()} {jax.device_count()} {total.tolist()} {gathered.tolist()}"
    (where / f"result{me}").write_text(found)
    print(found)
    return 0


def load(where: Path, me: int, mode: str) -> int:
    """Weights of this process's ranks; notes the bytes read of each tensor."""
    from jax_impl.checkpoint import Checkpoint
    from jax_impl.loader import load_arrays
    from jax_impl.sharding import place_ranks

    read: dict[str, int] = {}
    placement = place_ranks(16)
    report(None, "loading weights")
    arrays = load_arrays(Checkpoint.open(where / "target"), None, placement, read)
    devices = {d.id for a in arrays.values() for d in a.sharding.device_set}
    found = {"here": placement.here, "devices": len(devices), "read": read}
    (where / f"result{me}").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the two forms of commit cost: replay of records, or a snapshot per token.

    python -m bench.commit_forms [--json PATH] [--layers 69 --heads 6 --width 128 --rows 8]
        [--batches 1 8] [--layout layers|together] [--samples 30] [--slots 0]

One sample is the KDA part of a verification of T rows in all layers, and the commit of as many of
them as the sample says (0 to T in turn). Sample by sample other slots are used, so many that the
state of a slot has left the caches before it is read again; in a real step the weights see to that.

`layers` runs layer after layer, as a step does, and is bound by kernel launches at small batches.
`together` takes all layers in one batch: what the memory traffic alone costs. Times are from
submission to completion, several samples submitted at a time; compilation is excluded.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from jax_impl.output import Output, run_command, write_json

SCHEMA = "bench.commit_forms/1"
FORMS = ("replay", "snapshots")
CACHE_BYTES = 256 << 20  # more than the last-level cache of any device so far


@dataclass(frozen=True)
class Shapes:
    """Sizes of one measurement.

    Attributes:
        layers: KDA layers.
        heads: heads on the rank.
        width: value and key width of a head.
        rows: rows of a verification, T.
        batch: sequences, B.
        slots: slots to go through.
        layout: `layers` or `together`.
    """

    layers: int
    heads: int
    width: int
    rows: int
    batch: int
    slots: int
    layout: str

    @property
    def state_bytes(self) -> int:
        """The state of all layers and sequences of a step, f32."""
        return self.layers * self.batch * self.heads * self.width**2 * 4

    @property
    def record_bytes(self) -> int:
        """What replay records: update vector, key and log decay, f32."""
        return self.layers * self.batch * self.rows * self.heads * 3 * self.width * 4

    def traffic_bytes(self, form: str) -> int:
        """Bytes moved by verification and commit if nothing is read twice."""
        if form == "snapshots":
            return (self.rows + 3) * self.state_bytes
        return 3 * self.state_bytes + 2 * self.record_bytes


def make_step(shapes: Shapes, form: str):
    """The jitted step: (state, q, k, v, g, beta, slot, count) -> (state, outputs); state donated.

    State f32 [L, S, H, V, K]; q, k, v, g [L, B, T, H, K]; beta [L, B, T, H]; slot, count i32 [B].
    """
    import jax
    import jax.numpy as jnp

    from jax_impl.ops.kda import kept_state, recurrence

    all_rows = jnp.full(shapes.batch, shapes.rows, jnp.int32)

    def verify(old, rows, count):
        q, k, v, g, beta = rows
        _, o, kept = recurrence(old, q, k, v, g, beta, count, snapshots=form == "snapshots")
        return o, kept

    def by_layer(state, rows, slot, count):
        kept, outputs, before = [], 0.0, 0.0
        for layer in range(shapes.layers):
            q, *others = (r[layer] for r in rows)
            # the next layer needs this one's output, as in a model
            o, pending = verify(state[layer, slot], [q + before, *others], all_rows)
            before = 0 * jnp.sum(o)
            kept.append(pending)
            outputs += o
        for layer, pending in enumerate(kept):
            new = kept_state(state[layer, slot], pending, count)
            state = state.at[layer, slot].set(new)
        return state, outputs

    def together(state, rows, slot, count):
        flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
        old = flat(state[:, slot])
        o, kept = verify(old, [flat(r) for r in rows], jnp.tile(all_rows, shapes.layers))
        # the state is read anew once the rows are judged
        kept, again = jax.lax.optimization_barrier((kept, flat(state[:, slot])))
        new = kept_state(again, kept, jnp.tile(count, shapes.layers))
        return state.at[:, slot].set(new.reshape(shapes.layers, shapes.batch, *new.shape[1:])), o

    run = by_layer if shapes.layout == "layers" else together
    return jax.jit(
        lambda state, q, k, v, g, beta, slot, count: run(state, [q, k, v, g, beta], slot, count),
        donate_argnums=0,
    )


def make_rows(shapes: Shapes) -> list[Any]:
    """Random rows of realistic size: keys of length 1, decays of 1e-3 to 1, strengths in 0..1."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    size = (shapes.layers, shapes.batch, shapes.rows, shapes.heads, shapes.width)
    q, k, v = (rng.normal(size=size) for _ in range(3))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    g = -np.exp(rng.uniform(np.log(1e-3), 0.0, size))
    beta = rng.uniform(size=size[:-1])
    return [jnp.asarray(a, jnp.float32) for a in (q * shapes.width**-0.5, k, v, g, beta)]


def measure(shapes: Shapes, form: str, samples: int, together: int) -> tuple[dict[str, Any], Any]:
    """Times of one form in seconds per step, and the state at the end."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    step, rows = make_step(shapes, form), make_rows(shapes)
    size = (shapes.layers, shapes.slots, shapes.heads, shapes.width, shapes.width)
    state = 0.1 * jax.random.normal(jax.random.key(1), size, jnp.float32)
    turns = shapes.slots // shapes.batch
    slots = [jnp.arange(shapes.batch) + shapes.batch * i for i in range(turns)]
    counts = [
        jnp.asarray((np.arange(shapes.batch) + i) % (shapes.rows + 1), jnp.int32)
        for i in range(shapes.rows + 1)
    ]
    arguments = lambda i: (slots[i % turns], counts[i % len(counts)])  # noqa: E731
    begin = time.perf_counter()
    state, out = jax.block_until_ready(step(state, *rows, *arguments(0)))
    compiled = time.perf_counter() - begin
    for i in range(1, 4):
        state, out = step(state, *rows, *arguments(i))
    jax.block_until_ready(out)
    times = []
    for sample in range(samples):
        begin = time.perf_counter()
        for i in range(together):
            state, out = step(state, *rows, *arguments(sample * together + i))
        jax.block_until_ready((state, out))
        times.append((time.perf_counter() - begin) / together)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    moved = shapes.traffic_bytes(form)
    return {
        "median_s": median, "quartiles_s": [low, high], "min_s": min(times), "samples": len(times),
        "steps_per_sample": together, "first_call_s": compiled, "traffic_bytes": moved,
        "bytes_per_s": moved / median,
        "kept_bytes": shapes.rows * shapes.state_bytes if form == "snapshots"
        else shapes.record_bytes,
    }, state  # fmt: skip


def compare(shapes: Shapes, samples: int, together: int) -> dict[str, Any]:
    """Both forms at one batch, and how far the states are apart in the end."""
    import jax.numpy as jnp

    found, states = {}, []
    for form in FORMS:
        found[form], state = measure(shapes, form, samples, together)
        states.append(state)
    gap = jnp.sqrt(jnp.sum((states[0] - states[1]) ** 2) / jnp.sum(states[1] ** 2))
    return {
        "shapes": asdict(shapes), "state_bytes": shapes.state_bytes,
        "state_array_bytes": shapes.state_bytes // shapes.batch * shapes.slots,
        "forms": found, "states_relative_l2": float(gap),
        "snapshots_over_replay": found["snapshots"]["median_s"] / found["replay"]["median_s"],
    }  # fmt: skip


def conditions() -> dict[str, Any]:
    """Device and versions."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform, "device": device.device_kind, "machine": platform.machine(),
        "python": platform.python_version(), "jax": jax.__version__, "jaxlib": version("jaxlib"),
    }  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; refuses sizes below 1."""
    parser = argparse.ArgumentParser("python -m bench.commit_forms", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, value in (("layers", 69), ("heads", 6), ("width", 128), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layout", choices=["layers", "together"], default="together")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--steps-per-sample", type=int, default=10)
    parser.add_argument(
        "--slots", type=int, default=0, help="0: as many as exceed a cache of 256 MiB"
    )
    parser.add_argument("--json", help="file for the result; - for standard output")
    args = parser.parse_args(argv)
    names = ("layers", "heads", "width", "rows", "steps_per_sample")
    wrong = [f"{n} {getattr(args, n)}: expected at least 1" for n in names if getattr(args, n) < 1]
    wrong += [f"batch {b}: expected at least 1" for b in args.batches if b < 1]
    wrong += [f"samples {args.samples}: expected at least 2"] if args.samples < 2 else []
    wrong += [f"slots {args.slots}: expected at least 0"] if args.slots < 0 else []
    if wrong:
        parser.error("; ".join(wrong))
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit status."""
    args = parse(argv)
    Output(args.json).prepare()
    one = args.layers * args.heads * args.width**2 * 4
    results = []
    for batch in args.batches:
        turns = max(2, -(-CACHE_BYTES // (one * batch)))
        slots = max(args.slots // batch, 1) * batch if args.slots else turns * batch
        shapes = Shapes(args.layers, args.heads, args.width, args.rows, batch, slots, args.layout)
        results.append(compare(shapes, args.samples, args.steps_per_sample))
        if args.json != "-":
            print_result(results[-1])
    command = ["python -m bench.commit_forms", *(sys.argv[1:] if argv is None else argv)]
    report = {
        "schema": SCHEMA, "command": " ".join(command), "conditions": conditions(),
        "excluded": "compilation and three further steps", "results": results,
    }  # fmt: skip
    if args.json:
        write_json(args.json, report)
    return 0


def print_result(result: dict[str, Any]) -> None:
    """A few lines for people."""
    shapes = result["shapes"]
    print(f"batch {shapes['batch']}, {shapes['rows']} rows, {shapes['layers']} layers:")
    for form, found in result["forms"].items():
        print(
            f"  {form:10} {found['median_s'] * 1e6:10,.1f} us per step, "
            f"{found['bytes_per_s'] / 1e9:8,.1f} GB/s of {found['traffic_bytes'] / 1e6:,.1f} MB, "
            f"{found['kept_bytes'] / 1e6:,.1f} MB kept"
        )
    print(f"  states apart by {result['states_relative_l2']:.1e} relative")


if __name__ == "__main__":
    raise SystemExit(run_command("python -m bench.commit_forms", main))

"""Device time and error of every kernel over named cases: `python -m bench.ops`.

Time is the kernels' own, from CUPTI; launch gaps and the call's host time are not in it. Every case
holds a stack of layers several times larger than the L2 cache and walks through it, so that weights
come from memory. `floor` is the bytes that must move over 4.55 TB/s (H200) and is printed beside
the time, never substituted. `other` is what XLA runs around the kernels of the same call.

The error is against float64 on the host, beside the standard path's own error on the same inputs,
before and after timing; a case fails if the kernel's exceeds 4e-3, or both twice the standard
path's and 1e-6 (f32 results differ in the order of summation only).
`replays` repetitions must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

READ_TB_S = 4.55  # H200, read-only streams of several GB
L2_TIMES = 3
L2_BYTES = 60 << 20
REL_L2 = 4e-3
SITU = (4.0, 25.0)


@dataclass
class Problem:
    """One case, built on the device.

    Attributes:
        call: layer -> result.
        bytes: that must move per call.
        layers: how many distinct layers `call` takes.
        exact: (layer, rows) -> float64 result for these rows.
        standard: layer -> what the standard path gives.
        rows: rows compared with float64.
        notes: further figures, name -> (value, unit).
    """

    call: Callable[[jax.Array], jax.Array]
    bytes: int
    layers: int
    exact: Callable[[int, np.ndarray], np.ndarray]
    standard: Callable[[int], jax.Array]
    rows: np.ndarray
    notes: dict[str, tuple[float, str]] = field(default_factory=dict)


def stack_depth(nbytes: int) -> int:
    """Layers so that a buffer returns after three times the L2."""
    return max(2, -(-L2_TIMES * L2_BYTES // nbytes) + 1)


def normal(key: jax.Array, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Random bf16 on the device."""
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)


def f64(x: Any) -> np.ndarray:
    """On the host, in float64."""
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def bf16_round(x: np.ndarray) -> np.ndarray:
    """One rounding of float64 values to bf16."""
    return np.asarray(np.asarray(x, np.float32).astype(jnp.bfloat16), np.float64)


def situ64(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiTU in float64."""
    b, c = SITU
    return b * np.tanh(gate / b) / (1 + np.exp(-gate)) * (c * np.tanh(up / c))


def skinny_case(m: int, n: int, k: int, seed: int, **kw: Any) -> Problem:
    """A projection; keywords go to the kernel."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.situ import situ
    from pallas_kernels.skinny import skinny

    nx = Numerics()
    layers = stack_depth(2 * n * k)
    kx, kw_ = jax.random.split(jax.random.key(seed))
    x = normal(kx, (m, k))
    w = jnp.stack([normal(jax.random.fold_in(kw_, i), (n, k), k**-0.5) for i in range(layers)])
    fused = kw.get("situ") is not None
    rounded = kw.get("out_dtype") == jnp.bfloat16

    def total(y: jax.Array) -> jax.Array:
        return jnp.sum(y, 0) if y.ndim == 3 else y

    fast = jax.jit(lambda x, w, layer: total(skinny(x, w, layer, **kw)))

    def plain(x: jax.Array, w: jax.Array, layer: jax.Array) -> jax.Array:
        if fused:
            gate, up = jnp.split(nx.linear(x, w[layer]), 2, axis=-1)
            return situ(nx, gate, up, *SITU)
        return nx.linear(x, w[layer]) if rounded else nx.project(x, w[layer])

    standard = jax.jit(plain)

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        y = f64(x)[rows] @ f64(w[layer]).T
        return situ64(*np.split(y, 2, axis=-1)) if fused else y

    return Problem(
        lambda layer: fast(x, w, layer),
        2 * n * k + 2 * m * k,
        layers,
        exact,
        lambda layer: standard(x, w, layer),
        np.arange(m),
    )


def route_case(m: int, ranks: int, seed: int) -> Problem:
    """Router share, latent-down share and the shared experts' first product over one x."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.situ import situ
    from pallas_kernels.route import route

    nx, k = Numerics(), 7168
    rows = 896 // ranks, 3584 // ranks, 12288 // ranks
    layers = stack_depth(2 * sum(rows) * k)
    key = jax.random.key(seed)
    x = normal(key, (m, k))
    ws = [
        jnp.stack(
            [normal(jax.random.fold_in(key, 10 * i + n), (n, k), k**-0.5) for i in range(layers)]
        )
        for n in rows
    ]
    fast = jax.jit(
        lambda x, layer, *ws: jnp.concatenate(
            [y.astype(jnp.float32) for y in route(x, *ws[:3], layer=layer, betas=SITU)], axis=-1
        )
    )

    def plain(x: jax.Array, layer: jax.Array, *ws: jax.Array) -> jax.Array:
        gate, up = jnp.split(nx.linear(x, ws[2][layer]), 2, axis=-1)
        parts = nx.project(x, ws[0][layer]), nx.linear(x, ws[1][layer]), situ(nx, gate, up, *SITU)
        return jnp.concatenate([p.astype(jnp.float32) for p in parts], axis=-1)

    standard = jax.jit(plain)

    def exact(layer: int, chosen: np.ndarray) -> np.ndarray:
        ys = [f64(x)[chosen] @ f64(w[layer]).T for w in ws]
        return np.concatenate([ys[0], ys[1], situ64(*np.split(ys[2], 2, axis=-1))], axis=-1)

    return Problem(
        lambda layer: fast(x, layer, *ws),
        2 * sum(rows) * k + 2 * m * k,
        layers,
        exact,
        lambda layer: standard(x, layer, *ws),
        np.arange(m),
    )


def latent_up_case(m: int, ranks: int, seed: int) -> Problem:
    """Latent norm and up projection."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.norm import rmsnorm
    from pallas_kernels.latent_up import latent_up

    nx, k, n = Numerics(), 3584, 7168 // ranks
    layers = stack_depth(2 * n * k)
    key = jax.random.key(seed)
    x, norm = normal(key, (m, k)), normal(jax.random.fold_in(key, 1), (k,))
    w = jnp.stack([normal(jax.random.fold_in(key, i), (n, k), k**-0.5) for i in range(layers)])
    fast = jax.jit(lambda x, norm, w, layer: latent_up(x, norm, w, layer, eps=1e-5))
    standard = jax.jit(lambda x, norm, w, layer: nx.linear(rmsnorm(nx, x, norm, 1e-5), w[layer]))

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        v = f64(x)[rows]
        v = v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * f64(norm)
        return v @ f64(w[layer]).T

    return Problem(
        lambda layer: fast(x, norm, w, layer),
        2 * n * k + 2 * m * k,
        layers,
        exact,
        lambda layer: standard(x, norm, w, layer),
        np.arange(m),
    )


def attn_res_case(m: int, count: int, seed: int) -> Problem:
    """The depth mixture with 8 places in the bank; weights are small, the rows come from L2."""
    from jax_impl.numerics import Numerics, f32
    from jax_impl.ops.attn_res import attn_res as mix
    from jax_impl.ops.norm import rmsnorm
    from pallas_kernels.attn_res import attn_res

    nx, d, bank = Numerics(), 7168, 8
    key = jax.random.key(seed)
    prefix, delta, res_norm, res_proj, norm = (
        normal(jax.random.fold_in(key, i), shape)
        for i, shape in enumerate([(m, d), (m, d), (d,), (1, d), (d,)])
    )
    res_proj = res_proj * 0.02
    snapshots = normal(jax.random.fold_in(key, 9), (m, bank, d))
    args = prefix, snapshots, jnp.int32(count), delta, res_norm, res_proj, norm
    fast = jax.jit(lambda *args: attn_res(*args, eps=1e-5)[0])

    def plain(prefix, snapshots, count, delta, res_norm, res_proj, norm):
        new = nx.round(f32(prefix) + f32(delta))
        return rmsnorm(nx, mix(nx, new, snapshots, count, res_norm, res_proj, 1e-5), norm, 1e-5)

    standard = jax.jit(plain)

    def exact(_: int, rows: np.ndarray) -> np.ndarray:
        new = bf16_round(f64(prefix) + f64(delta))
        s = np.concatenate([f64(snapshots)[:, :count], new[:, None]], axis=1)
        c = f64(res_norm) * f64(res_proj)[0]
        score = (s @ c) / np.sqrt((s * s).mean(-1) + 1e-5)
        share = np.exp(score - score.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixed = (share[..., None] * s).sum(1)
        return (mixed / np.sqrt((mixed**2).mean(-1, keepdims=True) + 1e-5) * f64(norm))[rows]

    return Problem(
        lambda _: fast(*args),
        2 * m * d * (count + 4),
        2,
        exact,
        lambda _: standard(*args),
        np.arange(m),
    )


def experts_case(n: int, ranks: int, seed: int, tuning: Any = None, wide: bool = True) -> Problem:
    """Routed experts of one rank at full spread: 16 distinct random experts per row."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.experts import ExpertWeights, routed_experts
    from pallas_kernels import experts

    e, k, z, m = 896, 16, 3584, 3072 // ranks
    per_expert = 3 * m * z // 2 + 3 * m * z // 32
    rng = np.random.default_rng(seed)
    layers = 2 if n > 8 else 4
    key = jax.random.key(seed)

    def layer_arrays(key: jax.Array) -> tuple[jax.Array, ...]:
        a, b, c, d = jax.random.split(key, 4)
        return (
            jax.random.bits(a, (e, 2 * m, z // 2), jnp.uint8),
            jax.random.randint(b, (e, 2 * m, z // 32), 114, 122).astype(jnp.uint8),
            jax.random.bits(c, (e, z, m // 2), jnp.uint8),
            jax.random.randint(d, (e, z, m // 32), 114, 122).astype(jnp.uint8),
        )

    make = jax.jit(lambda key: experts.pack(*layer_arrays(key)))
    w13, w2 = (
        jnp.stack(parts)
        for parts in zip(*(make(jax.random.fold_in(key, i)) for i in range(layers)), strict=True)
    )
    latent = normal(jax.random.fold_in(key, 99), (n, z))
    # another draw per call: experts of one layer are few of 896, so weights do not repeat early
    draws = 24
    ids = np.stack([[rng.permutation(e)[:k] for _ in range(n)] for _ in range(draws)]).astype(
        np.int32
    )
    weights = rng.random((n, k)).astype(np.float32)
    weights = jnp.asarray(weights / weights.sum(1, keepdims=True))
    all_ids = [jnp.asarray(i) for i in ids]
    distinct = float(np.mean([len(np.unique(i)) for i in ids]))
    fast = jax.jit(
        lambda x, i, g, a, b, layer: experts.experts(
            x, i, g, a, b, layer, width=m, betas=SITU, wide=wide, tuning=tuning
        )
    )
    each = [jnp.int32(i % layers) for i in range(draws)]

    def standard(draw: int) -> jax.Array:
        raw = layer_arrays(jax.random.fold_in(key, draw % layers))
        call = jax.jit(
            lambda x, i, g, *raw: routed_experts(Numerics(), x, i, g, ExpertWeights(*raw), SITU)
        )
        return call(latent, all_ids[draw], weights, *raw)

    def exact(draw: int, rows: np.ndarray) -> np.ndarray:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = np.concatenate([table, -table])
        layer = draw % layers
        raw = jax.jit(lambda a, b: experts.unpack(a, b, width=m, latent=z))

        def dense(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
            both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
            return table[both] * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=-1)

        x, out = f64(latent), np.zeros((len(rows), z))
        g = np.asarray(weights, np.float64)
        for r, row in enumerate(rows):
            for j, expert in enumerate(ids[draw][row]):
                a = w13[layer, expert * m // 32 : (expert + 1) * m // 32]
                b = w2[layer, expert * z // 64 : (expert + 1) * z // 64]
                c1, s1, c2, s2 = (np.asarray(v)[0] for v in raw(a, b))
                gate, up = np.split(dense(c1, s1) @ x[row], 2)
                out[r] += g[row, j] * (dense(c2, s2) @ situ64(gate, up))
        return out

    def call(layer: jax.Array) -> jax.Array:
        draw = int(layer)
        return fast(latent, all_ids[draw], weights, w13, w2, each[draw])

    problem = Problem(
        call,
        int(distinct * per_expert),
        draws,
        exact,
        standard,
        np.arange(n) if n <= 2 else np.array([0, n // 2, n - 1]),
        {"distinct_experts": (distinct, "count")},
    )
    return problem


def cases() -> dict[str, Callable[[], Problem]]:
    """Every case by name; building one allocates its weights."""
    out: dict[str, Callable[[], Problem]] = {}
    shapes = {  # name: rows and columns of one rank's matrix, keywords
        "kda_in.tp16": (3208, 7168, {"out_dtype": jnp.bfloat16}),
        "o_proj.tp16": (7168, 768, {}),
        "o_proj.tp8": (7168, 1536, {}),
        "kda_in.tp8": (6288, 7168, {"out_dtype": jnp.bfloat16}),
        "mla_a.tp16": (2112, 7168, {"out_dtype": jnp.bfloat16}),
        "q_b.tp16": (1152, 1536, {"out_dtype": jnp.bfloat16}),
        "shared_up.tp16": (768, 7168, {"situ": SITU}),
        "shared_down.tp16": (7168, 384, {}),
        "lm_head.tp16": (10240, 7168, {"out_dtype": jnp.bfloat16}),
    }
    for name, (n, k, kw) in shapes.items():
        for m in (1, 8, 64):
            out[f"skinny.{name}.rows{m}"] = lambda m=m, n=n, k=k, kw=kw: skinny_case(
                m, n, k, 7, **kw
            )
    for ranks in (16, 8):
        for m in (1, 8, 64):
            out[f"route.tp{ranks}.rows{m}"] = lambda m=m, r=ranks: route_case(m, r, 13)
            out[f"latent_up.tp{ranks}.rows{m}"] = lambda m=m, r=ranks: latent_up_case(m, r, 17)
    for m in (1, 8, 64):
        for count in (1, 8):
            name = f"attn_res.sources{count}.rows{m}"
            out[name] = lambda m=m, count=count: attn_res_case(m, count, 19)
    for ranks in (16, 8):
        for n in (1, 2, 8, 64):
            for name, wide in (("experts", True), ("experts_narrow", False)):
                if n != 2 or wide:
                    out[f"{name}.tp{ranks}.rows{n}"] = lambda n=n, r=ranks, wide=wide: experts_case(
                        n, r, 11, wide=wide
                    )
    from bench import ops_small

    return out | ops_small.cases()


class Walk:
    """Calls in a row that the profiler takes as they are; it would trace a plain function as one.

    In one program equal calls would become one, and independent ones might overlap.
    """

    def __init__(self, problem: Problem, repeats: int):
        self.problem, self.repeats = problem, repeats
        self.layers = [jnp.int32(i) for i in range(problem.layers)]

    def __call__(self) -> list[jax.Array]:
        """All layers, `repeats` times over."""
        return [self.problem.call(layer) for _ in range(self.repeats) for layer in self.layers]

    def lower(self) -> None:
        """Part of the protocol of a jitted function; not used."""
        raise NotImplementedError

    trace = eval_shape = clear_cache = lower


def device_times(problem: Problem, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Every kernel's times in us by name, and the number of calls they belong to."""
    from jax.experimental.mosaic.gpu import profiler

    walk = Walk(problem, repeats)
    _, timings = profiler.measure(walk, aggregate=False)()
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    times: dict[str, list[float]] = {}
    for name, t in timings:
        times.setdefault(name, []).append(t * 1e3)
    calls = problem.layers * repeats
    for name, samples in times.items():
        if "k3_" in name and len(samples) % calls:
            raise RuntimeError(
                f"{name}: {len(samples)} launches in {calls} calls; of {len(times)}"
                f" kernels { ({k: len(v) for k, v in times.items()}) }"
            )
    return times, calls


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def errors(problem: Problem, layer: int, want: np.ndarray | None = None) -> dict[str, Any]:
    """Relative L2 of the kernel, and without `want` of the standard path, against float64."""
    out: dict[str, Any] = {}
    if want is None:
        want = problem.exact(layer, problem.rows)
        out["standard"] = relative(f64(problem.standard(layer))[problem.rows], want)
    got = f64(problem.call(jnp.int32(layer)))
    out |= {"kernel": relative(got[problem.rows], want), "want": want}
    return out | {"finite": bool(np.isfinite(got).all())}


def replays_equal(problem: Problem, times: int) -> int:
    """How many of `times` repetitions of one call differ from the first in any bit."""
    layer = jnp.int32(1)
    first = problem.call(layer)
    same = jax.jit(lambda a, b, n: n + jnp.any(a != b).astype(jnp.int32))
    wrong = jnp.int32(0)
    for _ in range(times):
        wrong = same(first, problem.call(layer), wrong)
    return int(wrong)


def run_case(name: str, build: Callable[[], Problem], args: Any) -> tuple[dict, dict]:
    """Figures and parity of one case."""
    problem = build()
    before = errors(problem, 1)
    kernels, calls = device_times(problem, args.repeats)
    after = errors(problem, 1, before["want"])
    different = replays_equal(problem, args.replays)
    ours = {k: v for k, v in kernels.items() if "k3_" in k}
    # a call may launch one name several times: sum them per call
    own = [0.0] * calls
    for samples in ours.values():
        each = len(samples) // calls
        for i in range(calls):
            own[i] += sum(samples[i * each : (i + 1) * each])
    floor = problem.bytes / READ_TB_S * 1e-6
    median = statistics.median(own)
    figures = {
        f"{name}.kernel_us": {"value": median, "unit": "us", "samples": own},
        f"{name}.other_us": {
            "value": sum(sum(v) for k, v in kernels.items() if k not in ours) / calls,
            "unit": "us",
            "samples": [],
        },
        f"{name}.floor_us": {"value": floor, "unit": "us", "samples": []},
        f"{name}.gb_s": {"value": problem.bytes / median * 1e-3, "unit": "GB/s", "samples": []},
    }
    for kernel, samples in kernels.items():
        short = "".join(c if c.isalnum() or c == "_" else "_" for c in kernel)[:60]
        figures[f"{name}.device.{short}"] = {
            "value": statistics.median(samples) * len(samples) / calls,
            "unit": "us",
            "samples": [],
        }
    for note, (value, unit) in problem.notes.items():
        figures[f"{name}.{note}"] = {"value": value, "unit": unit, "samples": []}
    worst = max(before["kernel"], after["kernel"])
    allowed = max(2 * before["standard"], 1e-6)
    passed = (
        before["finite"]
        and after["finite"]
        and worst <= min(allowed, REL_L2)
        and before["kernel"] == after["kernel"]
        and different == 0
    )
    parity = {
        "passed": bool(passed),
        "rel_l2_before": before["kernel"],
        "rel_l2_after": after["kernel"],
        "rel_l2_standard": before["standard"],
        "replays": args.replays,
        "replays_different": different,
    }
    print(
        f"{name:32s} {median:8.2f} us  floor {floor:7.2f}"
        f"  {problem.bytes / median * 1e-3:6.0f} GB/s"
        f"  other {figures[f'{name}.other_us']['value']:6.2f}  err {worst:.2e}"
        f" (standard {before['standard']:.2e})  {'ok' if passed else 'FAILED'}",
        flush=True,
    )
    return figures, parity


def conditions(args: Any) -> dict[str, Any]:
    """What the figures hold for."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform_version": getattr(device.client, "platform_version", ""),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "driver": _driver(),
        "seed": "7 skinny, 11 experts, 13 route, 17 latent_up, 19 attn_res",
        "weights": f"rotated beyond {L2_TIMES} x {L2_BYTES >> 20} MiB",
        "timing": "CUPTI kernel times; L2 cold",
        "read_tb_s": READ_TB_S,
        "repeats": args.repeats,
    }


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().split("\n")[0] if path.exists() else "unknown"


def main(argv: list[str] | None = None) -> int:
    """Run the cases that match; 0 only if all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("match", nargs="*", help="parts of case names; none runs all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    chosen = {k: v for k, v in cases().items() if not args.match or any(m in k for m in args.match)}
    if args.list:
        print("\n".join(chosen))
        return 0
    if jax.devices()[0].platform != "gpu":
        print("bench.ops needs an NVIDIA GPU; found " + jax.devices()[0].platform, file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "schema": "k3-bench-1",
        "command": "python -m bench.ops " + " ".join(sys.argv[1:] if argv is None else argv),
        "conditions": conditions(args),
        "figures": {},
        "parity": {},
    }
    for name, build in chosen.items():
        start = time.time()
        figures, parity = run_case(name, build, args)
        result["figures"] |= figures
        result["parity"][name] = parity
        print(f"  {time.time() - start:.1f} s", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(p["passed"] for p in result["parity"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

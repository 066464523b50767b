"""Device time and error of every kernel over named cases: `python -m bench ops`.

Time is the kernels' own, from CUPTI; launch gaps and the call's host time are not in it. Every case
holds a stack of layers several times larger than the L2 cache and walks through it, so that weights
come from memory. `floor` is the bytes that must move over the device's fixed bandwidth
(`bench/devices.py`; none on a device that is not there) and is printed beside the time, never
substituted. `other` is what XLA runs around the kernels of the same call.

The error is against float64 on the host, beside the standard path's own error on the same inputs,
before and after timing; a case fails if the kernel's exceeds 4e-3, or both twice the standard
path's and 1e-6 (f32 results differ in the order of summation only).
`replays` repetitions must be equal bit by bit, and nothing may be written outside of the outputs
(`bench.guards`). `--preset tiny` is `bench.ops_standard`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.devices import Device, find
from bench.guards import guarded
from bench.machine import command_line, describe_machine, with_clocks_now
from bench.ops_cases import cases
from bench.ops_options import OpsOptions
from bench.ops_problem import L2_BYTES, L2_TIMES, REL_L2, Problem, f64, relative
from bench.ops_standard import run_standard, tiny_cases
from bench.options import see_help
from bench.result import SCHEMA, figure, noisy_names, write
from jax_impl import progress
from jax_impl.output import json_number
from jax_impl.problems import listed

SEEDS = "7 skinny, 11 experts, 13 route, 17 latent_up, 19 attn_res, 23 and above others"
STANDARD = {
    "what": "standard formulas of small cases; no kernel ran",
    "seed": SEEDS,
    "shapes": "small, in `bench/ops_standard.py`",
    "acceptance": "none",
    "backend": "standard formulas",
    "excluded": "kernels; compilation",
    "timing": "host clock around calls that are waited for; nothing is said about caches",
}
AGAINST_ITSELF = {"against": "float64 on the host: the standard formulas themselves, no kernel"}
Times = Callable[[Problem, int], tuple[dict[str, list[float]], int]]


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


def run_case(
    name: str,
    problem: Problem,
    o: OpsOptions,
    device: Device | None,
    times: Times = device_times,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and parity of one case; without a known device no floor."""
    before = errors(problem, 1)
    kernels, calls = times(problem, o.repeats)
    after = errors(problem, 1, before["want"])
    different = replays_equal(problem, o.replays)
    layer = jnp.int32(1)  # made here: traced in `guarded` it would be no number to the call
    outside = guarded(lambda: problem.call(layer))
    passed, worst = judge(before, after, different + outside["bytes_changed_outside"])
    parity = {
        "what": name,
        "passed": passed,
        "rel_l2_before": json_number(before["kernel"]),
        "rel_l2_after": json_number(after["kernel"]),
        "rel_l2_standard": json_number(before["standard"]),
        "replays": o.replays,
        "replays_different": different,
        **outside,
    }
    figures = case_figures(name, problem, kernels, calls, device)
    shown = {n: figures[f"{name}.{n}"]["value"] for n in ("kernel_us", "other_us", "gb_s")}
    floor = figures.get(f"{name}.floor_us", {"value": math.nan})["value"]
    progress.note(
        f"{name:32s} {shown['kernel_us']:8.2f} us  floor {floor:7.2f}"
        f"  {shown['gb_s']:6.0f} GB/s  other {shown['other_us']:6.2f}"
        f"  err {worst:.2e} (standard {before['standard']:.2e})  {'ok' if passed else 'FAILED'}"
    )
    return figures, parity


def judge(before: dict[str, Any], after: dict[str, Any], different: int) -> tuple[bool, float]:
    """Whether a case passed, and the kernel's larger error; `different`: what is not as it was."""
    worst = max(before["kernel"], after["kernel"])
    allowed = max(2 * before["standard"], 1e-6)
    passed = (
        before["finite"]
        and after["finite"]
        and worst <= min(allowed, REL_L2)
        and before["kernel"] == after["kernel"]
        and different == 0
    )
    return bool(passed), worst


def case_figures(
    name: str,
    problem: Problem,
    kernels: dict[str, list[float]],
    calls: int,
    device: Device | None,
) -> dict[str, Any]:
    """Figures from the times of all device activities by name, `calls` calls together."""
    ours = {k: v for k, v in kernels.items() if "k3_" in k}
    # a call may launch one name several times: sum them per call
    own = [0.0] * calls
    for samples in ours.values():
        each = len(samples) // calls
        for i in range(calls):
            own[i] += sum(samples[i * each : (i + 1) * each])
    other = sum(sum(v) for k, v in kernels.items() if k not in ours) / calls
    middle = statistics.median(own)
    figures = {
        f"{name}.kernel_us": figure(middle, "us", own),
        f"{name}.other_us": figure(other, "us"),
        f"{name}.gb_s": figure(problem.bytes / middle / 1e3, "GB/s"),
    }
    if device is not None:
        floor = problem.bytes / device.read_tb_s / 1e6
        figures[f"{name}.floor_us"] = figure(floor, "us")
        figures[f"{name}.floor_share"] = figure(floor / middle, "share")
    for kernel, samples in kernels.items():
        short = "".join(c if c.isalnum() or c == "_" else "_" for c in kernel)[:60]
        each = statistics.median(samples) * len(samples) / calls
        figures[f"{name}.device.{short}"] = figure(each, "us")
    for note, (value, unit) in problem.notes.items():
        figures[f"{name}.{note}"] = figure(value, unit)
    return figures


def chosen(match: Sequence[str], preset: str = "k3") -> dict[str, Callable[[], Problem]]:
    """Cases of the preset whose names hold one of the parts; all of them without any.

    Raises:
        ValueError: there is none.
    """
    known = cases() if preset == "k3" else tiny_cases()
    found = {k: v for k, v in known.items() if not match or any(m in k for m in match)}
    if not found:
        raise ValueError(
            f"ops: found no case for {list(match)}, expected parts of case names; --list prints all"
        )
    return found


def run_ops(
    o: OpsOptions, out: str | None = None, argv: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run the cases that match; with `out` the result is written after every case.

    Raises:
        ValueError: no GPU, or no case matches.
    """
    problems = [
        f"--{name} {getattr(o, name)}: expected at least 1"
        for name in ("repeats", "replays")
        if getattr(o, name) < 1
    ]
    if problems:
        raise ValueError(listed("ops", problems, see_help("ops")))
    found, tiny = chosen(o.match, o.preset), o.preset == "tiny"
    platform, device = jax.devices()[0].platform, find(jax.devices()[0].device_kind)
    if platform != "gpu" and not tiny:
        raise ValueError(
            f"ops: found {platform}, expected an NVIDIA GPU, which kernels need; run it there, or "
            "the standard formulas of small cases here with --preset tiny "
            "(parity/test_kernels_*.py interprets the same kernels on a CPU)"
        )
    machine = describe_machine()
    figures: dict[str, Any] = {}
    comparisons: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for done, (name, build) in enumerate(found.items(), start=1):
        progress.note(f"ops: {done} of {len(found)}, {name}")
        more, parity = (
            run_standard(name, build(), o) if tiny else run_case(name, build(), o, device)
        )
        figures |= more
        comparisons.append(parity)
        result = {
            "schema": SCHEMA,
            "command": command_line(list(argv) if argv is not None else None),
            "conditions": with_clocks_now(machine)
            | (STANDARD if tiny else conditions(o, device))
            | {
                "cases": {"measured": done, "asked_for": len(found)},
                "noisy": noisy_names(figures),
            },
            "figures": figures,
            "parity": parity_of(comparisons, len(found)) | (AGAINST_ITSELF if tiny else {}),
        }
        if out is not None and out != "-":
            write(out, result)
    return result


def parity_of(comparisons: list[dict[str, Any]], asked_for: int) -> dict[str, Any]:
    """The verdict of the cases so far; `none` while some of those asked for are not there."""
    found = {
        "verdict": "passed",
        "against": "float64 on the host, beside the standard path's own error",
        "comparisons": list(comparisons),
    }
    if not all(p["passed"] for p in comparisons):
        return found | {"verdict": "failed"}
    if (done := len(comparisons)) < asked_for:
        return found | {"verdict": "none", "why": f"incomplete: {done} of {asked_for} cases"}
    return found


def conditions(o: OpsOptions, device: Device | None) -> dict[str, Any]:
    """What the figures hold for, but for the machine."""
    return {
        "what": "kernels alone",
        "seed": SEEDS,
        "shapes": "in the names: one rank of tpR, rows N",
        "acceptance": "none",
        "backend": "kernels",
        "excluded": "launch gaps and the host's time; other_us is what XLA runs around the kernels",
        "weights": f"rotated beyond {L2_TIMES} x {L2_BYTES >> 20} MiB",
        "timing": "CUPTI kernel times; L2 cold",
        "read_tb_s": None if device is None else device.read_tb_s,
        "repeats": o.repeats,
    }

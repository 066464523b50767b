"""`python -m bench ops --preset tiny`: the standard formulas of small cases, on any device.

No kernel runs: kernels need an NVIDIA GPU. What runs is everything around them, the cases, float64
beside the standard formulas, samples and the result, with times of the host's clock under a name of
their own, `standard_us`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops_options import OpsOptions
from bench.ops_problem import REL_L2, SITU, Problem, f64, json_number, relative
from bench.ops_products import attn_res_case, skinny_case
from bench.ops_small import attn_res_case as two_deltas_case
from bench.ops_small import topk_case
from bench.result import median_figure
from bench.timing import Clock, sample_us
from jax_impl import progress

WARMUPS = 2
LEAST_SAMPLES = 4  # halves of which can be compared


def tiny_cases() -> dict[str, Callable[[], Problem]]:
    """Every small case by name."""
    bf16 = jnp.bfloat16
    return {
        "skinny.small.rows2": lambda: skinny_case(2, 128, 256, 7, layers=2, out_dtype=bf16),
        "skinny.small_situ.rows2": lambda: skinny_case(2, 128, 256, 7, layers=2, situ=SITU),
        "attn_res.sources1.rows2": lambda: attn_res_case(2, 1, 19),
        "attn_res.two_deltas.rows2": lambda: two_deltas_case(2, 8, 19),
        "topk.rows2": lambda: topk_case(2, 23),
    }


def run_standard(
    name: str, problem: Problem, o: OpsOptions, clock: Clock = time.perf_counter
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and parity of one case's standard formulas.

    A sample is the time of one call, waited for, over all layers of the case.
    """
    want = problem.exact(0, problem.rows)
    first = f64(problem.standard(0))

    def walk() -> list[jax.Array]:
        return [problem.standard(layer) for layer in range(problem.layers)]

    samples = [
        sample_us(walk, jax.block_until_ready, problem.layers, clock)[0]
        for _ in range(WARMUPS + max(LEAST_SAMPLES, o.repeats))
    ][WARMUPS:]
    different = sum(
        not np.array_equal(f64(problem.standard(0)), first, equal_nan=True)
        for _ in range(o.replays)
    )
    error = relative(first[problem.rows], want)
    passed = bool(np.isfinite(first).all()) and error <= REL_L2 and different == 0
    progress.note(
        f"{name:32s} {median(samples):8.2f} us by the host's clock, standard formulas, no kernel"
        f"  err {error:.2e}  {'ok' if passed else 'FAILED'}"
    )
    parity = {
        "what": name, "passed": passed, "rel_l2_standard": json_number(error),
        "replays": o.replays, "replays_different": different,
    }  # fmt: skip
    return {f"{name}.standard_us": median_figure(samples, "us")}, parity

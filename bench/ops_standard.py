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

from bench.ops_experts import Sizes, experts_case
from bench.ops_fused import experts_row_case, mix_case
from bench.ops_kda import kda_case, kda_out_case
from bench.ops_mla import attend_case, out_case, query_case
from bench.ops_options import OpsOptions
from bench.ops_problem import REL_L2, SITU, Problem, f64, relative
from bench.ops_products import attn_res_case, latent_up_case, route_case, skinny_case
from bench.ops_small import attn_res_case as two_deltas_case
from bench.ops_small import topk_case, vocab_case
from bench.result import median_figure
from bench.timing import Clock, sample_us
from jax_impl import progress
from jax_impl.output import json_number

WARMUPS = 2
LEAST_SAMPLES = 4  # halves of which can be compared


def tiny_cases() -> dict[str, Callable[[], Problem]]:
    """Every small case by name; one at least of every family in `bench.ops_cases`."""
    bf16, few = jnp.bfloat16, Sizes(experts=8, chosen=2, latent=256, width=128, draws=2)
    return {
        "skinny.small.rows2": lambda: skinny_case(2, 128, 256, 7, layers=2, out_dtype=bf16),
        "skinny.small_situ.rows2": lambda: skinny_case(2, 128, 256, 7, layers=2, situ=SITU),
        "attn_res.sources1.rows2": lambda: attn_res_case(2, 1, 19),
        "attn_res.two_deltas.rows2": lambda: two_deltas_case(2, 8, 19),
        "topk.rows2": lambda: topk_case(2, 23),
        "route.rows2": lambda: route_case(2, 64, 13, layers=2),
        "latent_up.rows2": lambda: latent_up_case(2, 64, 17, layers=2),
        "experts.rows2": lambda: experts_case(2, 1, 11, sizes=few),
        "vocab.head.rows2": lambda: vocab_case(2, 256, False, 29, 2, 8, 2048),
        "vocab.markov.rows2": lambda: vocab_case(2, 64, True, 31, 2, 8, 2048),
        "mix.kda.rows2": lambda: mix_case(2, "kda", 47, layers=2, d=256),
        "mix.route.rows1": lambda: mix_case(1, "route", 47, layers=2, d=256),
        "experts_row.rows1": lambda: experts_row_case(1, 53, few, d=256, hidden=64),
        "kda_out.rows2.tokens1": lambda: kda_out_case(2, 1, 1, 41, layers=2, d=256),
        "mla_out.fp8.rows3": lambda: out_case(1, 3, 70, 2, True, layers=2, out=256),
        "kda.rows2.tokens1": lambda: kda_case(2, 1, 1, 37, layers=2),
        "kda.rows3.tokens3": lambda: kda_case(1, 3, 1, 37, layers=2),
        "mla_query.bf16.rows2": lambda: query_case(1, 2, 2, False, layers=2),
        "mla_attend.bf16.rows3": lambda: attend_case(1, 3, 70, 2, False, layers=2),
        "mla_attend.fp8.rows3": lambda: attend_case(1, 3, 70, 2, True, layers=2),
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

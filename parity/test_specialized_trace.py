"""The specialised step as it is traced: which kernels run, and how often. Nothing is compiled.

At the released sizes of one TP16 rank, five layers: a dense one and four with experts, 3 KDA : 1
MLA. What a kernel computes is tested elsewhere; here it is that no stage has lost its kernel.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO, LATENCY_SPECIALIZED, Backend
from jax_impl.binding import bind
from jax_impl.cache import StepInputs, cache_shapes
from jax_impl.collectives import Ranks
from jax_impl.config import RELEASED_CONFIG, ModelConfig, RunConfig
from jax_impl.params import abstract_weights
from jax_impl.selftest import kernels_of
from jax_impl.speculate import verify
from jax_impl.stages import limits
from jax_impl.static import Static
from jax_impl.step import step
from parity.kernel_env import needs_interpreter

GOLDEN = Path(__file__).parent / "golden"
RANKS = 16
# per step, 1 row: twice a layer the mixture with the products that read it (but for the dense
# layer, which is KDA, in front of its own two products)
ONE = {
    "k3_mix_products": 5 * 2 - 1,
    "k3_attn_res": 1,
    "k3_kda_out": 4,
    "k3_mla_query": 1,
    "k3_mla_attend": 1,
    "k3_mla_value_out": 1,
    "k3_experts_row": 4,  # the router's choice in it
    # the dense pair; latent up; a projection of MLA; the head
    "k3_skinny": 2 + 4 + 1 + 1,
}
# 8 rows: in_proj and MLA's first projections are kernels of their own, and so is the choice
FEW = ONE | {"k3_mix_products": 4, "k3_attn_res": 6, "k3_skinny": ONE["k3_skinny"] + 5}
FEW |= {"k3_topk": 4, "k3_experts": 4}
del FEW["k3_experts_row"]
# more: so are the router's part, o_proj, and the two products of the experts
MANY = FEW | {"k3_attn_res": 5 * 2, "k3_skinny": FEW["k3_skinny"] + 4 + 5}
MANY |= {"k3_experts_gate_up": 4, "k3_experts_down": 4}
MANY |= {"k3_kda": 4, "k3_mla_value": 1}
for name in ("k3_mix_products", "k3_experts", "k3_kda_out", "k3_mla_value_out"):
    del MANY[name]


def traced(
    batch: int,
    tokens: int,
    backend: Backend,
    config: ModelConfig | None = None,
    tp: int = RANKS,
    **settings,
) -> Counter:
    """Kernels by name in the traced step: a decode, or with several tokens a verification."""
    if config is None:
        config = replace(ModelConfig.load(RELEASED_CONFIG), num_hidden_layers=5, mla_layers=(3,))
    run = RunConfig(slots=batch, pages=64, page_size=16, **settings)
    static, ranks = Static(config, run, Ranks(tp)), Ranks(tp)
    weights = abstract_weights(config, tp)
    if run.decode_backend != "auto":
        weights = jax.eval_shape(bind, weights)
    s, i32, b = jax.ShapeDtypeStruct, jnp.int32, batch
    inputs = StepInputs(
        s((b, tokens), i32), s((b,), i32), s((b,), i32), s((b,), i32), s((b, 4), i32),
        s((b,), jnp.float32), s((b,), jnp.uint32),
    )  # fmt: skip
    method = Acceptance(rule="synthetic", length=6)
    built = (
        partial(step, static, backend, "last")
        if tokens == 1
        else partial(verify, static, backend, method)
    )
    closed = jax.jit(built).trace(weights, cache_shapes(config, run, ranks), inputs).jaxpr
    return Counter(kernels_of(closed.jaxpr))


@needs_interpreter
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_decode_runs_every_kernel(rows):
    got = traced(rows, 1, LATENCY_SPECIALIZED, decode_backend="latency_specialized")
    assert got == {1: ONE, 8: FEW, 64: MANY}[rows]


@needs_interpreter
@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("rows", [1, 64])
def test_other_numbers_of_ranks(tp, rows):
    """Wider shares: of the experts at 4 ranks too wide for one kernel."""
    got = traced(rows, 1, LATENCY_SPECIALIZED, tp=tp, decode_backend="latency_specialized")
    assert got["k3_experts" if tp == 8 and rows == 1 else "k3_experts_down"] == 4
    assert got["k3_kda"] + got["k3_kda_out"] == 4 and got["k3_topk"] == 4


@needs_interpreter
def test_verification_commits_by_a_kernel():
    got = traced(1, 8, LATENCY_SPECIALIZED, decode_backend="latency_specialized")
    assert got == FEW | {"k3_kda_commit": 1}


@needs_interpreter
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_recorded_model_with_real_head_sizes_fits(tokens):
    """128 columns, latents of 64, queries of 96: below what the released model has in all three."""
    config = ModelConfig.load(GOLDEN / "model_realdims" / "config.json")
    run = RunConfig(decode_backend="latency_specialized", page_size=16)
    assert limits.unmet(config, run, 1) == []
    got = traced(2, tokens, LATENCY_SPECIALIZED, config, 1, decode_backend="latency_specialized")
    assert {"k3_mla_attend", "k3_attn_res", "k3_topk"} <= set(got)
    assert ("k3_kda_out" if tokens == 1 else "k3_kda") in got
    assert got["k3_experts_down"] == 4


def test_auto_has_no_kernel():
    assert not traced(1, 1, AUTO)

# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write a kernel
#
# From a formula to a Pallas kernel that serves a stage: reference, limits, body, a test that can
# fail, and the swap. It runs in the Mosaic GPU interpreter on a CPU, which needs JAX 0.11.2 or
# newer (Python 3.12: `make venv312`). The interpreter shows values and races; it does not show
# that a kernel compiles, is quick, or is right on a GPU. What remains for that is at the end.
#
# The kernel is SiTU, the gated activation of the feed-forward parts (`jax_impl.ops.situ.situ`):
#
#     y = b tanh(g / b) sigmoid(g) * c tanh(u / c)
#
# On the kernel path it is fused into the product before it (`pallas_kernels/skinny.py`). Alone
# it is the smallest kernel that has everything: operands, limits, rounding, rows.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax

from jax_impl.collectives import all_reduce
from jax_impl.numerics import Numerics
from jax_impl.ops.situ import situ as standard_situ
from pallas_kernels import common
from parity import metrics
from parity import notebook as k3
from parity.tolerances import tolerance

assert jax.__version_info__ >= common.MINIMUM_JAX, (
    f"JAX {jax.__version__} found; the interpreter needs {common.MINIMUM_JAX}: use .venv312"
)

# %% [markdown]
# ## 1. Reference
#
# The standard stage's formula is the reference: f32 inside, one rounding at the end. In a kernel
# file it is written out once more in plain jnp, because `pallas_kernels` imports nothing of this
# project.


# %%
def situ_f32(gate, up, beta, linear_beta):
    """The formula in f32, not rounded."""
    soft = beta * jnp.tanh(gate * (1 / beta)) / (1 + jnp.exp(-gate))
    return soft * (linear_beta * jnp.tanh(up * (1 / linear_beta)))


def reference(gate_up, beta, linear_beta):
    """Bf16 [N, 2M], gate columns, then up columns -> bf16 [N, M]."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return situ_f32(gate, up, beta, linear_beta).astype(jnp.bfloat16)


# %% [markdown]
# ## 2. Limits
#
# Every condition that a kernel has, in words, all at once. The wrapper raises with them; the
# configuration gate of a backend collects them before anything runs.

# %%
COLUMNS = 128  # of a block: one for each thread of a warpgroup


def limits(gate_up):
    """Unmet conditions, each with what was found and what is expected."""
    out = []
    rows, width = gate_up.shape
    common.expect(out, "rows", rows, f"1..{common.MAX_ROWS}", 1 <= rows <= common.MAX_ROWS)
    wanted = f"a multiple of {2 * COLUMNS}"
    common.expect(out, "columns", width, wanted, width > 0 and width % (2 * COLUMNS) == 0)
    common.expect(out, "dtype", gate_up.dtype, "bfloat16", gate_up.dtype == jnp.bfloat16)
    return out


print(limits(jnp.zeros((65, 352), jnp.float32)))

# %% [markdown]
# ## 3. Body and wrapper
#
# One block of threads for each row and 128 columns: the copy engine brings gate and up to shared
# memory and announces both on a barrier, the warpgroup computes, and the result goes back the
# same way. `num_arrivals` of the barrier is the number of copies that name it.


# %%
def situ(gate_up, beta, linear_beta, *, interpret=False):
    """SiTU of bf16 [N, 2M] -> bf16 [N, M].

    Raises:
        ValueError: `limits` are not met.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    common.require(limits(gate_up), "situ")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2

    def body(
        gate_up,  # bf16 [N, 2M], global
        y,  # bf16 [N, M], global
        *,
        operands,  # bf16 [2, 128], shared: gate and up
        result,  # bf16 [128], shared
        loaded,
    ):
        row, block = lax.axis_index("row"), lax.axis_index("block")
        for part in range(2):
            columns = pl.ds(part * width + block * COLUMNS, COLUMNS)
            plgpu.copy_gmem_to_smem(gate_up.at[row, columns], operands.at[part], loaded)
        plgpu.barrier_wait(loaded)
        gate, up = (operands[part].astype(jnp.float32) for part in range(2))
        result[...] = situ_f32(gate, up, beta, linear_beta).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, y.at[row, pl.ds(block * COLUMNS, COLUMNS)])
        plgpu.wait_smem_to_gmem(0)

    call = common.kernel(
        body,
        "notebook_situ",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        grid=(rows, width // COLUMNS),
        grid_names=("row", "block"),
        scratch_types=dict(
            operands=plgpu.SMEM((2, COLUMNS), jnp.bfloat16),
            result=plgpu.SMEM((COLUMNS,), jnp.bfloat16),
            loaded=plgpu.Barrier(num_arrivals=2),
        ),
    )
    return call(gate_up)


# %% [markdown]
# ## 4. A test that can fail
#
# Against the standard formula, with the limit of the parity suite for one operation in bf16.
# Three things make the inputs sharp: magnitudes at which both caps show (with small numbers
# tanh(x) = x and a forgotten cap passes), a row of NaN that must stay in its row, and wrong
# variants that must be caught.

# %%
BETA, LINEAR_BETA = 4.0, 25.0
nx = Numerics("bfloat16", "V")
limit = tolerance("op", "bfloat16")


def inputs(scale, rows=3, width=256):
    values = np.random.default_rng(0).standard_normal((rows, 2 * width)) * scale
    return jnp.asarray(values, jnp.bfloat16)


def error(function, gate_up):
    """The judged metric against the standard formula."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    want = standard_situ(nx, gate, up, BETA, LINEAR_BETA)
    got, want = (np.asarray(x, np.float64) for x in (function(gate_up), want))
    return metrics.distance(got, want)[limit.metric]


def interpreted(gate_up):
    return situ(gate_up, BETA, LINEAR_BETA, interpret=True)


SCALE = 20.0
found = error(interpreted, inputs(SCALE))
print(f"{limit.metric} {found:.1e}, limit {limit.limit:.0e}: {limit.reason}")
assert found <= limit.limit and not common.races_found()

poisoned = inputs(SCALE).at[1].set(jnp.nan)
y = np.asarray(interpreted(poisoned), np.float32)
assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()

WRONG = {
    "no cap on up": lambda x: reference(x, BETA, 1e6),
    "no cap on gate": lambda x: reference(x, 1e6, LINEAR_BETA),
    "up and gate swapped": lambda x: reference(jnp.roll(x, x.shape[1] // 2, 1), BETA, LINEAR_BETA),
}
caught = {name: error(wrong, inputs(SCALE)) for name, wrong in WRONG.items()}
print({name: f"{value:.1e}" for name, value in caught.items()})
assert all(value > limit.limit for value in caught.values())

# %% [markdown]
# How sharp an input is depends on its scale. Small inputs let a forgotten cap pass:

# %%
scales = np.array([0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0])
figure, axes = plt.subplots(figsize=(6.5, 4))
for name, wrong in (
    ("this kernel's formula", lambda x: reference(x, BETA, LINEAR_BETA)),
    *WRONG.items(),
):
    axes.loglog(scales, [max(error(wrong, inputs(s)), 1e-5) for s in scales], "o-", label=name)
axes.axhline(limit.limit, color="grey", linewidth=0.8)
axes.set(xlabel="scale of the inputs", ylabel=limit.metric, title="below the line a test passes")
axes.legend(fontsize=8)
figure.tight_layout()
assert error(WRONG["no cap on up"], inputs(0.1)) < limit.limit

# %% [markdown]
# ## 5. Into a stage
#
# A stage is swapped whole: `dense` with the kernel in place of the formula. The model is a small
# one whose width meets the limits; the sessions differ in this one function.


# %%
def dense(static, w, y):
    """`jax_impl.stages.standard.dense`, its activation by the kernel."""
    gate_up = static.nx.linear(y, w.gate_up_proj)
    hidden = situ(gate_up, *static.betas, interpret=True)
    partial = static.nx.project(hidden, w.down_proj)
    return static.nx.round(all_reduce(partial, static.ranks))


sizes = {"num_hidden_layers": 2, "intermediate_size": 256}
session = k3.make_tiny("build/notebooks", overrides=sizes, compute="bfloat16")
ours = k3.replace_stages(session, dense=dense)
prompt = [5, 17, 101, 4]
plain, swapped = (k3.prefill(s, prompt, record=True) for s in (session, ours))
delta = metrics.distance(swapped.stages["layer00.delta"], plain.stages["layer00.delta"])
bound = tolerance("pair_sublayer", "bfloat16")
print(f"delta of layer 0: {bound.metric} {delta[bound.metric]:.1e}, limit {bound.limit:.0e}")
print(f"next token: standard {plain.new[0]}, with the kernel {swapped.new[0]}")
assert delta[bound.metric] <= bound.limit and not common.races_found()

# %% [markdown]
# Equal results do not prove that the kernel ran. The traced stage does: it calls the kernel, and
# the standard stage does not.

# %%
from jax_impl.stages import standard
from jax_impl.static import Static

static = Static(session.config, session.run)
w = jax.tree.map(lambda x: x[0], session.weights.dense)
row = jnp.zeros((4, session.config.hidden_size), jnp.bfloat16)
calls = {
    name: "notebook_situ" in str(jax.make_jaxpr(lambda y, f=f: f(static, w, y))(row))
    for name, f in (("with the kernel", dense), ("standard", standard.dense))
}
print(calls)
assert calls == {"with the kernel": True, "standard": False}

# %% [markdown]
# ## 6. Registration, and what the interpreter does not show
#
# In the repository the same steps are files:
#
# | step | place |
# | --- | --- |
# | reference, limits, wrapper, body | `pallas_kernels/NAME.py` |
# | test in the interpreter | `parity/test_kernels_*.py`, in the Makefile's `JAX_ONLY_TESTS` |
# | real shapes on a GPU | `parity/test_kernels_gpu.py`, marker `gpu` |
# | compiles for H200 and GB300, no spills, without a GPU | a case in `parity/kernel_cases.py` |
# | time, floor, error against float64 | a case in `bench/ops_cases.py` |
# | the stage, and its conditions | `jax_impl/stages/specialized.py`, `jax_impl/stages/limits.py` |
#
# The stage in `specialized.py` under the name of the standard one **is** the registration: a
# step on `latency_specialized` runs it from then on, and `limits.py` keeps models out that it
# cannot serve. `CONTRIBUTING.md` has the list, `docs/kernels.md` what the interpreter replaces
# by plain code.

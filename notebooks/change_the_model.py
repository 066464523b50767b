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
# # Change the model
#
# A session is a model with a table of stage functions. `replace_stages` and `replace_config`
# return a session in which one thing differs; the first session stays as it was. Each change
# below is held against the PyTorch implementation, which reads the unchanged folder: which
# comparisons break, which hold, and in which layers.

# %%
from functools import partial

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jax_impl.stages import standard
from parity import notebook as k3

sizes = {"num_hidden_layers": 4, "attn_res_block_size": 2}
session = k3.make_tiny("build/notebooks", preset="tiny", seed=0, overrides=sizes)
c = session.config
ids = tuple(np.random.default_rng(0).integers(0, c.vocab_size, 24).tolist())
reference = k3.torch_prefill(session, ids)

# %% [markdown]
# Two views of an error:
#
# - `compare` feeds each layer with the reference's own input of that layer. An error does not
#   travel, so a failure names its layer.
# - `drift` runs the whole model and measures the running sum behind each layer: what a change
#   does to everything after it.


# %%
def judge(changed: k3.Session) -> tuple[k3.Comparison, dict[str, float]]:
    recorded = k3.prefill(changed, ids, record=True)
    return k3.compare(changed, ids), k3.drift(recorded, reference)


def failures(comparison: k3.Comparison) -> dict[str, set[int]]:
    """Layers in which a quantity does not hold."""
    found: dict[str, set[int]] = {}
    for v in comparison.failed:
        if v.where.case.startswith("injected layer"):
            found.setdefault(v.quantity, set()).add(int(v.where.case[-2:]))
    return found


same, noise = judge(session)
assert same.passed
print(f"unchanged: {len(same.verdicts)} comparisons hold, logits differ by {noise['logits']:.1e}")

# %% [markdown]
# ## A change that must hold: the state after each token
#
# `kda` returns what `kda_commit` needs. `commit="snapshots"` keeps the state after every token
# of a verification and copies the chosen one; `replay` (the default) does the updates again. The
# result may differ in the last bits of float32, no more.

# %%
snapshots = k3.replace_run(session, commit="snapshots")
state, drafts = k3.prefill(session, ids, record=True).state, (17, 101, 4)
kept = [k3.kda_state(s, k3.verify(s, state, drafts).state, 0) for s in (session, snapshots)]
gap = np.abs(kept[0] - kept[1]).max() / np.abs(kept[0]).max()
print(f"states after 4 tokens by replay and by snapshots: {gap:.1e} apart")
assert gap < 1e-5

# %% [markdown]
# ## The decay gate
#
# `jax_impl.ops.kda.log_decay` bounds how fast a KDA head forgets:
#
#     g = lower_bound sigmoid(exp(A_log) (z + dt_bias))
#
# An unbounded gate, as earlier gated delta rules have it, would be g = -exp(A_log) softplus(z +
# dt_bias). `standard.kda_with` is the stage `kda` with any such formula; projections,
# convolution, recurrence and norm stay the standard ones.


# %%
def softplus_gate(z, dt_bias, a_log, lower_bound):
    """The unbounded gate; `lower_bound` is not used."""
    return -jnp.exp(a_log)[:, None] * jnp.logaddexp(z.astype(jnp.float32) + dt_bias, 0.0)


unbounded = k3.replace_stages(session, kda=partial(standard.kda_with, softplus_gate))
gate_check, gate_drift = judge(unbounded)
for quantity, layers in failures(gate_check).items():
    print(f"{quantity:24} breaks in layers {sorted(layers)}")

# %% [markdown]
# The comparison names the KDA layers and no MLA layer, and of a KDA layer the attention half
# only: fed with the reference's own `y`, the experts give what they should. The logits are
# another model's.

# %%
broken = failures(gate_check)
assert broken["prefix after attention"] == broken["kda_state_vk"] == set(c.kda_layers)
assert "mlp_out" not in broken and "x" not in broken
print(f"logits of the whole model: {gate_drift['logits']:.2f} from the reference")

# %% [markdown]
# ## The AttnRes block size
#
# Snapshots are taken, and the running sum restarts, every `attn_res_block_size` layers. No
# weight has a shape that depends on it, so the same weights run with any block size.

# %%
wider = k3.replace_config(session, attn_res_block_size=c.attn_res_block_size + 1)
block_check, block_drift = judge(wider)
for quantity, layers in failures(block_check).items():
    print(f"{quantity:24} breaks in layers {sorted(layers)}")

# %% [markdown]
# A layer breaks where its set of snapshots differs (then already `x`, the mixture, is wrong) or
# where it should have started a block and did not, or the reverse. Other layers hold on injected
# inputs, though the model as a whole is another one.

# %%
taken = {
    layer: [
        [i for i in range(layer) if config.starts_block(i)]
        for config in (session.config, wider.config)
    ]
    for layer in range(c.num_hidden_layers)
}
other_sources = {layer for layer, (ours, theirs) in taken.items() if ours != theirs}
other_start = {
    layer
    for layer in range(c.num_hidden_layers)
    if session.config.starts_block(layer) != wider.config.starts_block(layer)
}
print(
    f"other snapshots before layers {sorted(other_sources)}, other start at {sorted(other_start)}"
)
found = failures(block_check)
assert found["x"] == other_sources
assert found["prefix after attention"] == other_start | other_sources

# %% [markdown]
# ## Side by side
#
# Left: relative L2 of the attention half of each layer on the reference's own input; the line is
# the limit. Right: the same models run as a whole.

# %%
runs = {
    "unchanged": (same, noise),
    "unbounded gate": (gate_check, gate_drift),
    f"blocks of {wider.config.attn_res_block_size}": (block_check, block_drift),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
for name, (comparison, drift) in runs.items():
    injected = comparison.by_layer("prefix after attention")
    left.semilogy(list(injected), [v.value for v in injected.values()], "o", label=name)
    right.semilogy(range(len(drift)), list(drift.values()), "o-", label=name)
left.axhline(next(iter(injected.values())).limit, color="grey", linewidth=0.8)
left.set(xlabel="layer", ylabel="relative L2 to torch_ref", title="each layer alone")
right.set_xticks(range(len(noise)), [n.removeprefix("layer") for n in noise])
right.set(xlabel="layer", title="the whole model")
right.legend()
figure.tight_layout()

# %% [markdown]
# Try another stage: any function of `jax_impl/stages/standard.py` can be replaced, `route` by
# one that ignores the bias, `moe_out` by one that norms before the sum, and the comparison says
# where it shows.

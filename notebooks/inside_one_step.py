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
# # Inside one decode step
#
# One token goes through every stage of a small random model with the released model's structure.
# Each stage below is a function in `jax_impl/stages/standard.py`; the names are those of
# `docs/explain_stages.md`. Nothing here is trained, so pictures show what the mechanism does,
# not what Kimi K3 has learned.

# %%
import matplotlib.pyplot as plt
import numpy as np

from parity import notebook as k3

session = k3.make_tiny("build/notebooks", preset="tiny", seed=0)
c = session.config
kinds = ["MLA" if c.is_mla(i) else "KDA" for i in range(c.num_hidden_layers)]
print(f"{c.num_hidden_layers} layers: {' '.join(kinds)}")
print(f"hidden {c.hidden_size}, AttnRes blocks of {c.attn_res_block_size} layers")
print(f"{c.num_experts} experts, {c.num_experts_per_token} for each token")

# %% [markdown]
# ## A prompt, then one step
#
# `prefill` takes the whole prompt in one pass. The state after it holds `position` tokens in its
# caches and knows one token more, the anchor: it is what the next step reads. States are never
# changed, so `first.state` can be used again below.

# %%
prompt = [5, 17, 101, 4, 9, 250, 33, 7]
first = k3.prefill(session, prompt)
found = k3.step(session, first.state, record=True)
print(f"anchor {first.new[0]} at position {first.state.position} -> next token {found.new[0]}")

# %% [markdown]
# ## Every stage with its shapes
#
# T = 1 row: one token of one sequence. The feed-forward output is not added at once; it travels
# as `delta` to the next `attn_in`, which adds, mixes and norms in one stage.

# %%
STAGE_OF = {
    "prefix_in": "attn_in",
    "x": "attn_in",
    "heads": "kda | mla",
    "prefix": "attn_out",
    "y": "attn_out",
    "delta": "dense | moe_out",
    "latent": "route",
    "ids": "route",
    "weights": "route",
    "routed": "experts",
    "shared": "route",
}


def row(name: str, stage: str) -> str:
    value = found.stages[name]
    size = (
        f"rms {np.sqrt((value.astype(float) ** 2).mean()):8.4f}" if value.dtype.kind == "f" else ""
    )
    return f"{stage:16} {name:20} {value.shape!s:12} {size}"


print(row("embed", "embed"))
for layer in (0, 1, 3):  # KDA and dense; KDA and experts; MLA and experts
    for part, stage in STAGE_OF.items():
        if f"layer{layer:02d}.{part}" in found.stages:
            print(row(f"layer{layer:02d}.{part}", stage))
print(row("hidden", "head_in"))
print(f"{'logits':16} {'logits':20} {found.logits.shape}")

# %% [markdown]
# ## The recurrent state over time
#
# A KDA head keeps a matrix S [V, K] instead of a cache of keys and values.
# `jax_impl.ops.kda.delta_step` is one token of it:
#
#     S <- S exp(g)                   forget, each key column at its own rate
#     u  = beta (v - S k)             what S does not yet say about k
#     S <- S + u k^T                  write it
#     o  = S q                        read
#
# `log_decay` gives g = lower_bound sigmoid(exp(A_log) (z + dt_bias)), so a column never forgets
# faster than exp(lower_bound) per token. Below: the norm of each key column of one head, token
# by token, and S at the end.

# %%
layer, head = c.kda_layers[1], 0
state, norms = first.state, []
for _ in range(32):
    norms.append(np.linalg.norm(k3.kda_state(session, state, layer)[head], axis=0))
    state = k3.step(session, state, record=True).state
last = k3.kda_state(session, state, layer)[head]

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
image = left.imshow(np.array(norms).T, aspect="auto", cmap="viridis", interpolation="nearest")
left.set(
    xlabel="decode step",
    ylabel="key column",
    title=f"layer {layer}, head {head}: column norms of S",
)
figure.colorbar(image, ax=left)
peak = np.abs(last).max()
image = right.imshow(last, cmap="RdBu", vmin=-peak, vmax=peak, interpolation="nearest")
right.set(xlabel="key", ylabel="value", title=f"S after {state.position} tokens")
figure.colorbar(image, ax=right)
figure.tight_layout()

# %% [markdown]
# Writing is visible as bright columns that fade at different rates. The MLA layers have no such
# state: they keep one latent row for each token.

# %%
rows = k3.latent_rows(session, state, c.mla_layers[0])
print(f"layer {c.mla_layers[0]}: {rows.shape[0]} latent rows of {rows.shape[1]} numbers")
print(f"KDA state of a layer: {np.prod(k3.kda_state(session, state, layer).shape)} numbers, always")
assert rows.shape == (state.position, c.kv_row)

# %% [markdown]
# ## Mixtures over depth
#
# Attention residuals replace the plain residual stream: what a sublayer reads is a softmax
# mixture of the snapshots of finished blocks and of the running sum of the present block
# (`prefix`), with weights that depend on the token (`jax_impl.ops.attn_res.attn_res`):
#
#     score_j = <s_j / rms(s_j), norm * proj>,   mix = sum_j softmax(score)_j s_j
#
# Each row is one place where this happens, from the first layer to the head. A snapshot that has
# not been taken yet has weight 0.

# %%
mixtures = k3.depth_mixtures(session, found)
table = np.array([weights[0] for weights in mixtures.values()])
assert np.allclose(table.sum(1), 1, atol=1e-5)

figure, axes = plt.subplots(figsize=(6.5, 5.5))
image = axes.imshow(table, aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest")
axes.set_yticks(range(len(mixtures)), list(mixtures), fontsize=7)
sources = [f"snapshot {j}" for j in range(c.num_snapshots)] + ["prefix"]
axes.set_xticks(range(len(sources)), sources, fontsize=8)
axes.set_title("AttnRes: weight of each source, one token")
figure.colorbar(image, ax=axes)
figure.tight_layout()

# %% [markdown]
# ## Which experts
#
# `route` scores all experts with a sigmoid, adds a bias that decides the choice only, takes the
# best `num_experts_per_token`, and weights them by their unbiased scores
# (`jax_impl.ops.router.choose_experts`). The prompt and the text so far, one column for each
# token:

# %%
whole = k3.prefill(session, state.ids[: state.position], record=True)
layers = [i for i in range(c.num_hidden_layers) if not c.is_dense(i)]
figure, axes = plt.subplots(2, 1, figsize=(10, 5), sharex=True)
for panel, layer in zip(axes, (layers[0], layers[-1]), strict=True):
    ids = whole.stages[f"layer{layer:02d}.ids"]
    weights = whole.stages[f"layer{layer:02d}.weights"]
    chosen = np.zeros((c.num_experts, len(ids)))
    np.put_along_axis(chosen.T, ids, weights, axis=1)
    assert (np.count_nonzero(chosen, axis=0) == c.num_experts_per_token).all()
    panel.imshow(chosen, aspect="auto", cmap="Greens", vmin=0, interpolation="nearest")
    panel.axvline(len(prompt) - 0.5, color="grey", linewidth=0.8)
    panel.set(ylabel="expert", title=f"layer {layer}: expert weights")
axes[-1].set_xlabel("token (the line ends the prompt)")
figure.tight_layout()

distinct = [len(np.unique(whole.stages[f"layer{i:02d}.ids"])) for i in layers]
print(f"distinct experts over {len(whole.state.ids) - 1} tokens, by layer: {distinct}")

# %% [markdown]
# In a decode step the experts' weights are most of what is read, so the number of distinct
# experts of a batch sets its time: `where_the_time_goes.py` goes on from here.
#
# ## Is it right?
#
# The same tokens through the PyTorch implementation, which shares no code with this one. Every
# layer is fed with the reference's own input of that layer, so errors do not chain; limits and
# their reasons are in `parity/tolerances.py`.

# %%
checked = k3.compare(session, state.ids[: state.position], prompt=len(prompt))
print(f"{len(checked.verdicts)} comparisons, {len(checked.failed)} failed")
for layer, v in checked.by_layer("prefix_sum_out").items():
    print(f"layer {layer} ({kinds[layer]}): relative L2 {v.value:.1e}, limit {v.limit:.0e}")
assert checked.passed

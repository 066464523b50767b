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
# # Speculation
#
# A speculative step verifies the anchor and K drafts in one pass and keeps those that stand,
# plus one token of the target's own: between 1 and K + 1 tokens. This notebook measures how
# many, for several K and methods, and says when that pays.
#
# Models here are random. The drafter was made to agree with the target now and then, so **real
# acceptance below is real for these two models and says nothing about Kimi K3 with its DSpark
# drafter**. Where acceptance is forced, it says "synthetic acceptance".

# %%
import matplotlib.pyplot as plt
import numpy as np

from jax_impl.acceptance_config import SYNTHETIC_LABEL
from parity import notebook as k3

sizes = {"num_hidden_layers": 4}
session = k3.make_tiny("build/notebooks", preset="tiny", seed=2, overrides=sizes, tokens=512)
prompt = list(range(40, 56))
start = k3.prefill(session, prompt).state


def text(drafts, method, *, temperature=0.0, seed=0, steps=24):
    """Tokens of each step of a speculative continuation, and its ids."""
    state, counts = start, []
    drawn = method.drafting == "probabilistic"
    for _ in range(steps):
        settings = {"temperature": temperature, "seed": seed}
        proposed = k3.draft(session, state, drafts, sample=drawn, **settings)
        found = k3.verify(session, state, proposed, method, **settings)
        counts.append(len(found.new))
        state = found.state
    return np.array(counts), state.ids


# %% [markdown]
# ## Nothing is lost
#
# At temperature 0 the rule keeps a draft if it is the target's own choice, so the text is the
# plain one, whatever the drafter says.

# %%
greedy = k3.Acceptance("standard", "greedy")
counts, ids = text(7, greedy)
equal = ids[len(prompt) :] == k3.greedy(session, prompt, len(ids) - len(prompt))
print(f"{counts.sum()} tokens in {len(counts)} steps; the same as plain decoding: {equal}")
assert equal

# %% [markdown]
# ## Real acceptance against K
#
# - `standard`: each draft alone, stop at the first rejection (`jax_impl.acceptance`).
# - `block`: drafts are verified together; what one draft has in excess another may use, so at
#   least as many are accepted on average.
# - drafting `greedy` takes the drafter's largest logit, `probabilistic` draws; the rules stay
#   lossless for either.

# %%
METHODS = {
    "temperature 0": (greedy, 0.0),
    "temperature 1, standard": (k3.Acceptance("standard", "probabilistic"), 1.0),
    "temperature 1, block": (k3.Acceptance("block", "probabilistic"), 1.0),
}
KS = (1, 3, 7)
STEPS = 24
lengths = {
    name: [text(k, method, temperature=t, seed=1, steps=STEPS)[0] for k in KS]
    for name, (method, t) in METHODS.items()
}
for name, found in lengths.items():
    means = "  ".join(f"K={k}: {n.mean():.2f}" for k, n in zip(KS, found, strict=True))
    print(f"{name:26} {means}   (real acceptance, {STEPS} steps each)")
for found in lengths.values():
    assert all(n.min() >= 1 and n.max() <= k + 1 for k, n in zip(KS, found, strict=True))

# %% [markdown]
# A mean of 24 steps is uncertain by about its standard deviation over the root of 24;
# differences between rules of that size are no result.
#
# ## Synthetic acceptance
#
# To time a step at a given acceptance one can force it: `Acceptance("synthetic", length=L)`
# accepts so many drafts that the mean is L tokens per step, whatever they are. The text is then
# meaningless and is not looked at. `schedule` has the probability that all drafts up to the i-th
# are accepted.

# %%
LENGTH = 2.5
forced = k3.Acceptance("synthetic", length=LENGTH)
print(f"{SYNTHETIC_LABEL}, length {LENGTH}: schedule {forced.schedule(3)}")
synthetic, _ = text(3, forced, steps=STEPS)
print(f"{SYNTHETIC_LABEL}: {synthetic.mean():.2f} tokens per step over {STEPS} steps")
assert set(synthetic) <= {2, 3}  # the schedule of least variance: 2 or 3, half of the time each

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
for name, found in lengths.items():
    mean, error = [n.mean() for n in found], [n.std() / np.sqrt(STEPS) for n in found]
    left.errorbar(KS, mean, error, marker="o", capsize=3, label=f"real: {name}")
left.plot([3], [synthetic.mean()], "x", color="grey", label=f"{SYNTHETIC_LABEL}, {LENGTH}")
left.set(xlabel="drafts K", ylabel="tokens per step", title="random tiny pair, 24 steps")
left.legend(fontsize=7)
positions = np.arange(1, 8)
for name, found in lengths.items():
    right.plot(positions, [(found[-1] > i).mean() for i in positions], "o-", label=f"real: {name}")
right.set(
    xlabel="draft", ylabel="share accepted up to here", title="K = 7, by position", ylim=(0, 1)
)
right.legend(fontsize=7)
figure.tight_layout()

# %% [markdown]
# ## When it pays: a cost model
#
# Decode is bound by the bytes read. A verification of one sequence reads the same dense weights
# as a plain step, but its 1 + K rows choose more distinct experts. With t(n) the time of a step
# of n rows and d that of drafting, speculation gains
#
#     speedup(K) = length(K) t(1) / (t(1 + K) + d)
#
# Here t is the floor of `python -m bench roofline`: bytes of the released model on one of 16
# ranks over the read bandwidth of an H200. **A floor is arithmetic, not a measurement**: it
# leaves out exchanges, launches and the drafter (d = 0), so the curve bounds the gain from
# memory traffic alone.

# %%
from bench.devices import DEVICES
from bench.floor import Work, mean_distinct, step_bytes
from jax_impl.config import RELEASED_CONFIG, ModelConfig
from jax_impl.memory import MemorySettings

config, device = ModelConfig.load(RELEASED_CONFIG), DEVICES["H200"]
settings = MemorySettings(ranks=16, kv_dtype="float8_e4m3fn")


def floor_ms(rows: int) -> float:
    """Floor of a step of one sequence with so many rows, context 1024, on one rank of 16."""
    size = sum(step_bytes(config, settings, Work(1, rows, 1024)).values())
    return size / device.read_tb_s / 1e9


drafts = np.arange(0, 8)
times = np.array([floor_ms(1 + k) for k in drafts])
for k, t in zip(drafts, times, strict=True):
    experts = mean_distinct(config, 1 + int(k))
    print(f"K={k}: floor {t:.2f} ms, {experts:5.1f} distinct experts in a layer")

figure, axes = plt.subplots(figsize=(6.5, 4))
for rate in (0.5, 0.7, 0.9):
    length = np.array([sum(rate**i for i in range(k + 1)) for k in drafts])
    axes.plot(drafts, length * times[0] / times, "o-", label=f"each draft right with {rate}")
axes.axhline(1, color="grey", linewidth=0.8)
axes.set(
    xlabel="drafts K", ylabel="speedup at the floor",
    title="one sequence, TP16, H200 bandwidth: assumed acceptance, no drafter",
)  # fmt: skip
axes.legend(fontsize=8)
figure.tight_layout()
assert (np.diff(times) > 0).all()

# %% [markdown]
# The rows of a verification share no experts by themselves, so K drafts that are rarely right
# cost more than they give. `docs/speculation.md` has what is committed and taken back, `python
# -m bench decode --accept-length` times whole runs.

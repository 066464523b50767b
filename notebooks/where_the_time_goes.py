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
# # Where the time goes
#
# A decode step reads a few gigabytes and computes little with them. This notebook goes from
# bytes to a floor, from the floor to what was measured on one GPU, and from there to a
# projection for 16. The four kinds of numbers are kept apart:
#
# | kind | from |
# | --- | --- |
# | floor | arithmetic: bytes over a fixed bandwidth (`bench/roofline.py`) |
# | measured | files in `bench/results`, with device and parity verdict; nothing is timed here |
# | projected | one rank's measured compute and a model of exchanges (`bench/projection.py`) |
# | published | figures of others, with their conditions; not reproduced |

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import bench
from bench.devices import DEVICES
from bench.floor import Work, layer_bytes, mean_distinct, step_bytes
from bench.projection import project, projection_rows
from bench.published import PUBLISHED
from bench.result import headline, read
from jax_impl.config import RELEASED_CONFIG, ModelConfig
from jax_impl.memory import MemorySettings

config, device = ModelConfig.load(RELEASED_CONFIG), DEVICES["H200"]
settings = MemorySettings(ranks=16, kv_dtype="float8_e4m3fn")
CONTEXT = 1024
CASES = {
    "1 row": Work(1, 1, CONTEXT),
    "8 rows": Work(8, 1, CONTEXT),
    "64 rows": Work(64, 1, CONTEXT),
    "verify 1 + 7": Work(1, 8, CONTEXT),
}
print(
    f"{config.num_hidden_layers} layers, {config.num_experts} experts, 16 ranks, context {CONTEXT}"
)
print(f"{device.name}: {device.read_tb_s} TB/s ({device.basis})")

# %% [markdown]
# ## Bytes of a layer on one rank
#
# `bench.floor.layer_bytes` counts each byte once: weights (of the routed experts those that some
# row chooses), recurrent state read and written, latent rows. A mean layer with experts is three
# KDA to one MLA.

# %%
parts = {}
for name, work in CASES.items():
    layers = layer_bytes(config, settings, work)
    for kind, share in (("kda", 0.75), ("mla", 0.25)):
        for purpose, size in layers[kind].items():
            parts.setdefault(purpose, dict.fromkeys(CASES, 0.0))[name] += share * size / 1e6

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
bottom = np.zeros(len(CASES))
for purpose, sizes in parts.items():
    left.bar(list(CASES), list(sizes.values()), bottom=bottom, label=purpose)
    bottom += list(sizes.values())
left.set(ylabel="MB", title="bytes of a mean layer with experts, one rank of 16")
left.legend(fontsize=8)

rows = np.arange(1, 65)
right.plot(rows, [mean_distinct(config, int(n)) for n in rows])
right.set(
    xlabel="rows", ylabel="distinct experts of a layer",
    title=f"random routing: {config.num_experts_per_token} of {config.num_experts} for each row",
)  # fmt: skip
figure.tight_layout()

# %% [markdown]
# Rows add experts almost one for one at first: 8 rows read nearly eight times the experts of
# one. That is why a verification is not free, and why batching pays only when rows begin to
# share experts.
#
# ## The floor of a step

# %%
floors = {}
for name, work in CASES.items():
    size = sum(step_bytes(config, settings, work).values())
    floors[name] = size / device.read_tb_s / 1e9
    print(f"{name:14} {size / 1e9:6.2f} GB  floor {floors[name]:6.2f} ms  (one rank, no exchanges)")

# %% [markdown]
# ## Kernels alone
#
# Measured, one H200, L2 cold (`python -m bench ops`; conditions below). The floor of a kernel is
# its bytes over the same bandwidth. Only cases whose comparison passed are shown. Small kernels
# are far from their floor: a launch and a ramp cost some microseconds whatever is read, which is
# what fusing stages saves.

# %%
RESULTS = Path(bench.__file__).parent / "results"
ops = read(RESULTS / "ops_h200.json")
judged = {c["what"]: c["passed"] for c in ops["parity"]["comparisons"]}
names = [n for n, passed in judged.items() if passed and n.endswith("tp16.rows8")]
assert names
measured = [ops["figures"][f"{n}.kernel_us"]["value"] for n in names]
least = [ops["figures"][f"{n}.floor_us"]["value"] for n in names]

figure, axes = plt.subplots(figsize=(8, 3.8))
where = np.arange(len(names))
axes.bar(where, measured, label="measured")
axes.bar(where, least, width=0.45, label="floor")
axes.set_xticks(where, [n.removesuffix(".tp16.rows8") for n in names], rotation=45, ha="right")
axes.set(ylabel="us", title=f"kernels alone, 8 rows, TP16 shapes, {ops['conditions']['device']}")
axes.legend()
figure.tight_layout()
print({k: ops["conditions"][k] for k in ("device", "driver", "versions", "timing", "weights")})

# %% [markdown]
# ## One rank's step
#
# `python -m bench rank-slice` runs one rank's share of the step, with exchanges looped back:
# compute only. Some files have two depths and so the time per layer, others the whole step of all
# layers. Each carries the verdict of a comparison in the same run. **A run whose comparison
# failed has no headline, is not drawn, and nothing is projected from it**; it is listed with what
# failed.

# %%
slices = {file.stem: read(file) for file in sorted(RESULTS.glob("rank_slice*.json"))}
passed = {n: r for n, r in slices.items() if r["parity"]["verdict"] == "passed"}
for name, result in slices.items():
    print(f"\n{name}: parity {result['parity']['verdict']}")
    if name in passed:
        shown = [n for n in result["figures"] if n.startswith(("us_per_layer.", "ms_per_step."))]
        assert shown
        print("  " + "\n  ".join(headline(result, shown)))
        continue
    for one in result["parity"].get("comparisons", []):
        if not one["passed"]:
            print(f"  not shown: {one['what']} found {one['found']:g}, limit {one['limit']:g}")

# %%
if passed:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
    for name, result in passed.items():
        figures, cases = result["figures"], result["conditions"]["shapes"]["cases"]
        label = name.removeprefix("rank_slice_")
        if layers := [c for c in cases if f"us_per_layer.{c}" in figures]:
            times = [figures[f"us_per_layer.{c}"]["value"] for c in layers]
            left.semilogy(layers, times, "o", label=label)
            lowest = [figures[f"floor_us_per_layer.{c}"]["value"] for c in layers]
            left.semilogy(layers, lowest, "_", markersize=20, color="grey")
        if whole := figures.get("ms_per_step.rows1"):
            right.barh(label, whole["value"])
    left.set(ylabel="us per layer", title="two depths, parity passed; grey: floor")
    left.legend(fontsize=8)
    right.axvline(floors["1 row"], color="grey")
    right.set(xlabel="ms", title="whole step, 1 row, parity passed; grey: floor")
    figure.suptitle("one rank of 16, COMPUTE ONLY")
    figure.tight_layout()
else:
    print("No committed rank slice has passed its comparison, so none is drawn or projected.")

# %% [markdown]
# ## 16 GB300: a projection
#
# `bench.projection.project` scales one rank's measured compute by memory bandwidth alone and
# adds a model of the exchanges, once as if made inside kernels and once as NCCL calls. Nothing
# overlaps in it and nobody waits. **It is no measurement**: no step has run on 16 GPUs or on a
# GB300.

# %%
asked = {"tp": settings.ranks, "context": CONTEXT, "kv_dtype": settings.kv_dtype}
for name, result in passed.items():
    figures, assumptions = project(config, result, DEVICES["GB300"], None, asked)
    print(
        f"\nPROJECTION from {name} ({assumptions['backend']}); left out: {assumptions['left_out']}"
    )
    print(f"  {'case.exchanges.device':32} {'exchanges ms':>12} {'step ms':>8} {'tokens/s':>9}")
    for label, wire, step, rate, remark in projection_rows(figures, assumptions):
        print(f"  {label:32} {wire:>12} {step:>8} {rate:>9}  {remark}".rstrip())
if not passed:
    print("Nothing to project from.")

# %% [markdown]
# ## What others published
#
# For orientation, with their conditions. Not reproduced here, and not comparable with the
# projection above row by row.

# %%
for p in PUBLISHED:
    print(f"{p.what:24} specialised {p.specialised:6g}, stock {p.stock:6g} {p.unit}")
    print(f"{'':24} {p.conditions}")

"""The operations of `jax_impl` behind one interface: NumPy in, NumPy out, names as recorded.

Every function takes the recorded tensors, the sidecar and the rounding rules, and returns its
results under the recorded names without suffix. Wherever the production code has a stage for what
was recorded, the stage is called, so that the glue inside it is compared too. Formulas are looked
up on their modules at call time; `parity.mutants` replaces them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.cache import StepInputs
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.numerics import Numerics
from jax_impl.ops import attn_res as attn_res_ops
from jax_impl.ops import kda as kda_ops
from jax_impl.ops import mla as mla_ops
from jax_impl.ops import mxfp4 as mxfp4_ops
from jax_impl.ops import norm as norm_ops
from jax_impl.ops import router as router_ops
from jax_impl.ops import situ as situ_ops
from jax_impl.params import Mla, Moe
from jax_impl.stages import standard
from jax_impl.static import Static

Tensors = dict[str, np.ndarray]
Meta = dict[str, Any]
NO_CAP = 1e30  # a soft cap so large that it does nothing


def rmsnorm(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """Rows x [T, H] -> one output for every epsilon that was recorded."""
    found = {}
    for key in {k.rsplit("_", 1)[0] for k in t if k.startswith("y_eps")}:
        eps = float(key.removeprefix("y_eps").replace("e", "e-"))
        found[key] = norm_ops.rmsnorm(nx, _act(nx, t["x"]), _act(nx, t["weight"]), eps)
    return _numpy(found)


def gated_rmsnorm(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """x, gate [T, heads, d], weight [d] F32 -> y."""
    x, gate = _act(nx, t["x"]), _act(nx, t["gate"])
    weight = jnp.asarray(t["weight"])
    return _numpy({"y": norm_ops.gated_rmsnorm(nx, x, gate, weight, meta.get("eps", 1e-5))})


def short_conv(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """Cold start, two tokens only, then token by token; states are the columns that are read."""
    weight = jnp.asarray(t["weight"][:, 0])
    x = _act(nx, t["x"])
    empty = jnp.zeros((x.shape[0], weight.shape[1] - 1, x.shape[2]), nx.dtype)

    def run(raw, window):
        count = jnp.full(raw.shape[0], raw.shape[1])
        return kda_ops.short_conv(nx, raw, window, weight), kda_ops.next_window(raw, window, count)

    cold, window = run(x, empty)
    short, short_window = run(x[:, :2], empty)
    found = {"y_cold": cold, "state_cold": window, "y_short": short, "state_short": short_window}
    if "x_step" in t:
        further, steps = _act(nx, t["x_step"]), []
        for i in range(further.shape[1]):
            y, window = run(further[:, i : i + 1], window)
            steps.append((y[:, 0], window))
        found["y_step"] = jnp.stack([y for y, _ in steps], 1)
        found["state_after_step"] = jnp.stack([w for _, w in steps], 1)
    return _numpy({k: jnp.swapaxes(v, -1, -2) if "state" in k else v for k, v in found.items()})


def kda_gate(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """g_raw [T, h, d] -> log decay, f32."""
    heads, width = t["g_raw"].shape[-2:]
    bias = jnp.asarray(t["dt_bias"]).reshape(heads, width)
    z, a_log = _act(nx, t["g_raw"]), jnp.asarray(t["A_log"])
    return _numpy({"log_decay": kda_ops.log_decay(z, bias, a_log, meta["lower_bound"])})


def kda_recurrent(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """Raw q, k, v, gate and strength [B, T, h, ...] from two states -> outputs and states."""
    q, k, v = (_act(nx, t[n]) for n in "qkv")
    tokens, heads, width = q.shape[1:]
    count = jnp.full(q.shape[0], tokens)
    bias = jnp.asarray(t["dt_bias"]).reshape(heads, width)
    g = kda_ops.log_decay(_act(nx, t["g_raw"]), bias, jnp.asarray(t["A_log"]), meta["lower_bound"])
    beta = jax.nn.sigmoid(jnp.asarray(t["beta_raw"], jnp.float32))
    q_norm, k_norm = norm_ops.l2norm(q), norm_ops.l2norm(k)
    start = jnp.asarray(t["state_in_vk"], jnp.float32)
    found = {"q_norm": q_norm, "k_norm": k_norm, "log_decay": g, "beta": beta}
    # both starting states as one batch: the scans compile once
    state = jnp.concatenate([start, jnp.zeros_like(start)])
    operands = (q_norm * width**-0.5, k_norm, v.astype(jnp.float32), g, beta, count)
    operands = tuple(jnp.concatenate([x, x]) for x in operands)
    after, o, records = kda_ops.recurrence(state, *operands)
    replayed = kda_ops.replay(state, records, operands[-1])
    results = {"o": nx.round(o), "state_out_vk": after, "replayed_vk": replayed}
    for name, value in results.items():
        found[name], found[f"{name}_zero_state"] = jnp.split(value, 2)
    return _numpy(found)


def situ(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """gate, up -> y, and y without the cap of the up half."""
    gate, up = _act(nx, t["gate"]), _act(nx, t["up"])
    return _numpy(
        {
            "y": situ_ops.situ(nx, gate, up, meta["beta"], meta["linear_beta"]),
            "y_nolinear": situ_ops.situ(nx, gate, up, meta["beta"], NO_CAP),
        }
    )


def router(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """Rows x [T, H] -> ids ascending, weights in that order."""
    logits = nx.project(_act(nx, t["x"]), _act(nx, t["weight"]))
    ids, weights = router_ops.choose_experts(
        logits, jnp.asarray(t["bias"]), meta["top_k"], meta.get("num_expert_group", 1),
        meta.get("topk_group", 1), meta.get("routed_scaling_factor", 1.0),
    )  # fmt: skip
    return _sorted_choice(ids, weights)


def _sorted_choice(ids: jax.Array, weights: jax.Array) -> Tensors:
    ids, weights = np.asarray(ids), np.asarray(weights, np.float64)
    order = np.argsort(ids, -1)
    return {
        "idx": np.take_along_axis(ids, order, -1),
        "topk_weight": np.take_along_axis(weights, order, -1),
    }


def attn_res(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """Mixtures over the first j snapshots; the rest of the bank holds NaN."""
    norm, proj = _act(nx, t["norm_weight"]), _act(nx, t["proj_weight"])
    prefix, found = _act(nx, t["prefix_sum"]), {}
    for key in {k.rsplit("_", 1)[0] for k in t if k.startswith("y_")}:
        count = int(key.removeprefix("y_").removesuffix("blocks"))
        bank = np.array(t["blocks"])
        bank[:, count:] = np.nan
        mix = attn_res_ops.attn_res(nx, prefix, _act(nx, bank), count, norm, proj, meta["eps"])
        found[key] = nx.round(mix)
    return _numpy(found)


def mxfp4(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """Decoded values of every packed tensor, and the quantised input in units of its scale."""
    found = {}
    for name in (k.removesuffix("_packed") for k in t if k.endswith("_packed")):
        packed, scale = jnp.asarray(t[f"{name}_packed"]), jnp.asarray(t[f"{name}_scale"])
        found[f"{name}_value"] = mxfp4_ops.dequantise(packed, scale)
    return _numpy(found)


def latent_moe(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """Rows x [T, H] through the stages route, experts, moe_out."""
    count = meta["num_experts"]

    def stack(kind: str, *names: str) -> jax.Array:
        rows = [
            np.concatenate([t[f"experts.{e}.{n}.weight_{kind}"] for n in names])
            for e in range(count)
        ]
        return jnp.asarray(np.stack(rows))

    shared = [t[f"shared_experts.{n}_proj.weight"] for n in ("gate", "up")]
    w = Moe(
        jnp.asarray(t["gate.weight"]), jnp.asarray(t["gate.e_score_correction_bias"]),
        *(jnp.asarray(t[f"routed_expert_{n}.weight"]) for n in ("down_proj", "norm", "up_proj")),
        jnp.asarray(np.concatenate(shared)), jnp.asarray(t["shared_experts.down_proj.weight"]),
        stack("packed", "w1", "w3"), stack("scale", "w1", "w3"),
        stack("packed", "w2"), stack("scale", "w2"),
    )  # fmt: skip
    static = _static(
        nx, num_experts=count, num_experts_per_token=meta["top_k"],
        routed_scaling_factor=meta["routed_scaling_factor"], rms_norm_eps=meta["rms_norm_eps"],
        num_expert_group=meta.get("num_expert_group", 1), topk_group=meta.get("topk_group", 1),
        activation_situ_beta=meta.get("beta", 4.0),
        activation_situ_linear_beta=meta.get("linear_beta", 25.0),
    )  # fmt: skip

    @jax.jit  # traced anew with every call of `latent_moe`, so that replaced formulas are seen
    def block(y):
        shares = standard.experts(static, w, standard.route(static, w, y))
        return standard.moe_out(static, w, shares.routed, shares.shared), *shares

    out, routed, own, ids, weights = block(_act(nx, t["x"]))
    found = {"y": out, "routed_latent_sum": nx.round(routed), "shared_out": nx.round(own)}
    return _numpy(found) | _sorted_choice(ids, weights)


def mla(t: Tensors, meta: Meta, nx: Numerics) -> Tensors:
    """The whole sequence at once, then the last rows one at a time, over scattered NaN pages."""
    size, rank = len(t["hidden"]), meta["kv_lora_rank"]
    join = np.concatenate([t[f"w.{n}.weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa")])
    names = ("g_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")
    w = Mla(_bf(join), *(_bf(t[f"w.{n}.weight"]) for n in names))
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    static = _static(
        nx, latent_eps=meta["norm_eps"], num_attention_heads=meta["num_heads"],
        **{k: meta[k] for k in keys},
    )  # fmt: skip
    hidden, page = _act(nx, t["hidden"]), 4
    pages = -(-size // page)
    table = jnp.asarray(np.random.default_rng(0).permutation(pages)[None])
    cache = jnp.full((1, pages + 1, page, rank + meta["qk_rope_head_dim"]), jnp.nan, nx.dtype)

    @jax.jit  # traced anew with every call of `mla`, so that replaced formulas are seen
    def run(rows, position, kv):
        heads, kv = standard.mla(static, w, 0, rows, _inputs(rows, position, table), kv, None)
        return nx.linear(heads, w.o_proj), kv

    full, _ = run(hidden, 0, cache)
    _, kv = run(hidden[: meta["S"]], 0, cache)
    steps = []
    for i in range(meta["S"], meta["S"] + meta["Tq"]):
        out, kv = run(hidden[i : i + 1], i, kv)
        steps.append(out)
    rows = kv[0, table[0]].reshape(pages * page, -1)[:size]
    found = {"out_full": full, "out_decode": jnp.concatenate(steps)}
    found |= {"latent": rows[:, :rank], "k_pe": rows[:, rank:]}
    return _numpy(found | _mla_inner(static, w, hidden, rows))


def _mla_inner(static: Static, w: Mla, hidden: jax.Array, rows: jax.Array) -> dict[str, jax.Array]:
    """Queries and the attention output before the gate, in both forms."""
    nx, c, eps = static.nx, static.config, static.run.latent_eps
    q_a = nx.linear(hidden, w.a_proj)[:, : c.q_lora_rank]
    q = nx.linear(norm_ops.rmsnorm(nx, q_a, w.q_a_layernorm, eps), w.q_b_proj)
    q = q.reshape(1, len(hidden), -1, c.qk_head_dim)
    split = mla_ops.split_kv_b(w.kv_b_proj, c.qk_nope_head_dim, c.v_head_dim)
    visible = jnp.tril(jnp.ones((1, len(hidden), len(rows)), bool))
    forms = {"attn": mla_ops.explicit_attention, "attn (absorbed)": mla_ops.absorbed_attention}
    run_form = {k: jax.jit(lambda *a, f=f: f(nx, *a)) for k, f in forms.items()}
    return {"q": q[0]} | {k: f(q, rows[None], *split, visible)[0] for k, f in run_form.items()}


OPS: dict[str, Callable[[Tensors, Meta, Numerics], Tensors]] = {
    f.__name__: f
    for f in (
        rmsnorm, gated_rmsnorm, short_conv, kda_gate, kda_recurrent, situ, router, attn_res,
        mxfp4, latent_moe, mla,
    )
}  # fmt: skip


def run(op: str, t: Tensors, meta: Meta, dtype: str, profile: str) -> Tensors:
    """Results of operation `op` (a key of `OPS`) by recorded name, float64 NumPy."""
    nx = Numerics(dtype, profile if profile != "-" else "V")
    return OPS[op](t, meta, nx)


def _act(nx: Numerics, x: np.ndarray) -> jax.Array:
    return jnp.asarray(x).astype(nx.dtype)


def _bf(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x).astype(jnp.bfloat16)  # recorded weights are exact in bf16


def _numpy(found: dict[str, jax.Array]) -> Tensors:
    return {k: np.asarray(v.astype(jnp.float32), np.float64) for k, v in found.items()}


def _inputs(rows: jax.Array, position: int, table: jax.Array) -> StepInputs:
    one = jnp.zeros(1, jnp.int32)
    return StepInputs(
        tokens=jnp.zeros((1, len(rows)), jnp.int32), count=one + len(rows), position=one + position,
        slot=one, page_table=table, temperature=jnp.zeros(1), seed=jnp.zeros(1, jnp.uint32),
    )  # fmt: skip


def _static(nx: Numerics, *, latent_eps: float | None = None, **sizes: Any) -> Static:
    """Settings in which only `sizes` mean something; nothing else is read by the stages called."""
    blank: dict[str, Any] = {f.name: 1 for f in dataclasses.fields(ModelConfig)}
    blank |= {"mla_layers": (0,), "weights_prefix": "", "rms_norm_eps": 1e-5} | sizes
    run_config = RunConfig(profile=nx.profile, compute=nx.compute, mla_norm_eps=latent_eps)
    return Static(ModelConfig(**blank), run_config)

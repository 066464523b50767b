"""The operations of `torch_ref` behind the interface of `parity.op_jax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_ref import ops
from torch_ref.numerics import Numerics, linear

Tensors = dict[str, np.ndarray]
Meta = dict[str, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def rmsnorm(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.rmsnorm`."""
    found = {}
    for key in {k.rsplit("_", 1)[0] for k in t if k.startswith("y_eps")}:
        eps = float(key.removeprefix("y_eps").replace("e", "e-"))
        found[key] = ops.rms_norm(_act(nm, t["x"]), _act(nm, t["weight"]), eps, nm)
    return _numpy(found)


def gated_rmsnorm(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.gated_rmsnorm`."""
    x, gate, weight = _act(nm, t["x"]), _act(nm, t["gate"]), _wide(nm, t["weight"])
    return _numpy({"y": ops.gated_rms_norm(x, gate, weight, meta.get("eps", 1e-5), nm)})


def short_conv(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.short_conv`."""
    weight, rows = _wide(nm, t["weight"]), []
    for i, x in enumerate(_act(nm, t["x"])):
        empty = torch.zeros(weight.shape[-1] - 1, x.shape[-1], dtype=nm.dtype)
        cold, window = ops.short_conv(x, empty, weight, nm)
        short, short_window = ops.short_conv(x[:2], empty, weight, nm)
        found = {"y_cold": cold, "y_short": short}
        found |= {"state_cold": window.T, "state_short": short_window.T}
        if "x_step" in t:
            steps = []
            for one in _act(nm, t["x_step"][i]):
                y, window = ops.short_conv(one[None], window, weight, nm)
                steps.append((y[0], window.T))
            found["y_step"] = torch.stack([y for y, _ in steps])
            found["state_after_step"] = torch.stack([w for _, w in steps])
        rows.append(found)
    return _numpy({k: torch.stack([r[k] for r in rows]) for k in rows[0]})


def kda_gate(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.kda_gate`; takes the padded A_log where there is one."""
    a_log = _wide(nm, t.get("A_log_padded", t["A_log"]))
    z, bias = _act(nm, t["g_raw"]), _wide(nm, t["dt_bias"])
    return _numpy({"log_decay": ops.kda_log_decay(z, a_log, bias, meta["lower_bound"], nm)})


def kda_recurrent(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.kda_recurrent`."""
    q, k, v, z = (_act(nm, t[n]) for n in ("q", "k", "v", "g_raw"))
    a_log, bias = _wide(nm, t["A_log"]), _wide(nm, t["dt_bias"])
    g = ops.kda_log_decay(z, a_log, bias, meta["lower_bound"], nm)
    beta = torch.sigmoid(_wide(nm, t["beta_raw"]))
    q_norm, k_norm = ops.l2_norm(q, nm), ops.l2_norm(k, nm)
    start = _wide(nm, t["state_in_vk"])
    found = {"q_norm": q_norm, "k_norm": k_norm, "log_decay": g, "beta": beta}
    scaled = q_norm * q.shape[-1] ** -0.5
    for tag, state in (("", start), ("_zero_state", torch.zeros_like(start))):
        rows = [
            ops.kda_recurrence(scaled[b], k_norm[b], v[b], g[b], beta[b], state[b], nm)
            for b in range(len(q))
        ]
        found[f"o{tag}"] = torch.stack([o for o, _ in rows])
        found[f"state_out_vk{tag}"] = torch.stack([s for _, s in rows])
    return _numpy(found)


def situ(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.situ`."""
    gate, up = _act(nm, t["gate"]), _act(nm, t["up"])
    return _numpy(
        {
            "y": ops.situ(gate, up, meta["beta"], meta["linear_beta"], nm),
            "y_nolinear": ops.situ(gate, up, meta["beta"], None, nm),
        }
    )


def router(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.router`."""
    found = ops.router(
        _act(nm, t["x"]), _act(nm, t["weight"]), _wide(nm, t["bias"]), meta["top_k"], nm,
        scaling=meta.get("routed_scaling_factor", 1.0), groups=meta.get("num_expert_group", 1),
        kept_groups=meta.get("topk_group", 1),
    )  # fmt: skip
    return _numpy({"idx": found.idx, "topk_weight": found.weight, "scores": found.scores})


def attn_res(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.attn_res`."""
    norm, proj = _act(nm, t["norm_weight"]), _act(nm, t["proj_weight"])
    prefix, blocks, found = _act(nm, t["prefix_sum"]), _act(nm, t["blocks"]), {}
    for key in {k.rsplit("_", 1)[0] for k in t if k.startswith("y_")}:
        count = int(key.removeprefix("y_").removesuffix("blocks"))
        bank = [blocks[:, j] for j in range(count)]
        found[key] = nm.round(ops.attn_res(prefix, bank, norm, proj, meta["eps"], nm))
    return _numpy(found)


def mxfp4(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.mxfp4`."""
    found = {}
    for name in (k.removesuffix("_packed") for k in t if k.endswith("_packed")):
        packed, scale = (torch.from_numpy(t[f"{name}_{part}"]) for part in ("packed", "scale"))
        found[f"{name}_value"] = ops.mxfp4_decode(packed, scale, nm)
    return _numpy(found)


def latent_moe(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.latent_moe`."""
    y = _act(nm, t["x"])
    betas = (meta.get("beta", 4.0), meta.get("linear_beta", 25.0))

    def weight(name: str) -> Tensor:
        return _act(nm, t[f"{name}.weight"])

    def matrix(name: str) -> Tensor:
        packed, scale = (torch.from_numpy(t[f"{name}.weight_{p}"]) for p in ("packed", "scale"))
        return ops.mxfp4_decode(packed, scale, nm)

    routing = ops.router(
        y, weight("gate"), _wide(nm, t["gate.e_score_correction_bias"]), meta["top_k"], nm,
        scaling=meta["routed_scaling_factor"], groups=meta.get("num_expert_group", 1),
        kept_groups=meta.get("topk_group", 1),
    )  # fmt: skip
    routed, total = ops.latent_moe(
        y, routing, lambda e: tuple(matrix(f"experts.{e}.{n}") for n in ("w1", "w3", "w2")),
        *(weight(f"routed_expert_{n}") for n in ("down_proj", "norm", "up_proj")),
        betas, meta["rms_norm_eps"], nm,
    )  # fmt: skip
    own = ops.mlp(
        y, *(weight(f"shared_experts.{n}_proj") for n in ("gate", "up", "down")), betas, nm
    )
    found = {"y": nm.round(nm.wide(routed) + nm.wide(own)), "routed_latent_sum": total}
    found |= {"shared_out": own, "idx": routing.idx, "topk_weight": routing.weight}
    return _numpy(found)


def mla(t: Tensors, meta: Meta, nm: Numerics) -> Tensors:
    """See `op_jax.mla`; the rows fed one at a time go over the cached rows before them."""
    rank, nope, start = meta["kv_lora_rank"], meta["qk_nope_head_dim"], meta["S"]
    eps, x = meta["norm_eps"], _act(nm, t["hidden"])

    def w(name: str) -> Tensor:
        return _act(nm, t[f"w.{name}.weight"])

    q = linear(
        ops.rms_norm(linear(x, w("q_a_proj"), nm), w("q_a_layernorm"), eps, nm), w("q_b_proj"), nm
    )
    q = q.view(len(x), meta["num_heads"], -1)
    kv = linear(x, w("kv_a_proj_with_mqa"), nm)
    latent = ops.rms_norm(kv[:, :rank], w("kv_a_layernorm"), eps, nm)
    rows, gate = torch.cat([latent, kv[:, rank:]], -1), linear(x, w("g_proj"), nm)
    attend = ops.mla_explicit if nm.mla_form == "explicit" else ops.mla_absorbed

    def out(first: int, last: int) -> tuple[Tensor, Tensor]:
        o = attend(q[first:last], rows[:last], w("kv_b_proj"), nope, first, nm)
        return linear(ops.mla_gate(o.flatten(-2), gate[first:last], nm), w("o_proj"), nm), o

    steps = [out(i, i + 1)[0] for i in range(start, start + meta["Tq"])]
    full, attn = out(0, len(x))
    found = {
        "out_full": full,
        "out_decode": torch.cat(steps),
        "latent": latent,
        "k_pe": kv[:, rank:],
    }
    absorbed = ops.mla_absorbed_query(q, w("kv_b_proj"), nope, nm)[..., :rank]
    return _numpy(found | {"q": q, "attn": attn, "q_absorbed": absorbed})


OPS: dict[str, Callable[[Tensors, Meta, Numerics], Tensors]] = {
    f.__name__: f
    for f in (
        rmsnorm, gated_rmsnorm, short_conv, kda_gate, kda_recurrent, situ, router, attn_res,
        mxfp4, latent_moe, mla,
    )
}  # fmt: skip


def run(op: str, t: Tensors, meta: Meta, dtype: str, profile: str) -> Tensors:
    """Results of operation `op` (a key of `OPS`) by recorded name, float64 NumPy."""
    return OPS[op](t, meta, Numerics(DTYPES[dtype], profile if profile != "-" else "V"))


def tensor(x: np.ndarray) -> Tensor:
    """NumPy to torch; bf16 goes through f32, which is exact."""
    x = np.asarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def _act(nm: Numerics, x: np.ndarray) -> Tensor:
    return tensor(x).to(nm.dtype)


def _wide(nm: Numerics, x: np.ndarray) -> Tensor:
    return tensor(x).to(nm.wide_dtype)


def _numpy(found: dict[str, Tensor]) -> Tensors:
    return {k: v.double().numpy() for k, v in found.items()}

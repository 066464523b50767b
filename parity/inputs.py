"""Seeded inputs of cases as NumPy arrays, in the form of the recorded operation files.

Activations and weights are exact in bf16, so that every dtype starts from the same numbers. Outputs
that are to be produced are announced by empty `<name>_f64` entries where an operation has a choice.
Memory that nothing may read is filled with NaN by the code that runs the operations.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from parity.cases import Case

Tensors = dict[str, np.ndarray]
_ASKED = np.zeros(0)


def make_inputs(case: Case) -> tuple[Tensors, dict[str, Any]]:
    """(tensors, constants) of a case; the same case always gives the same numbers."""
    rng = np.random.default_rng(case.seed)
    return _MAKERS[case.op](case, rng)


def bf16_exact(x: np.ndarray) -> np.ndarray:
    """The nearest bf16 numbers, as float32."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return bf16_exact(rng.standard_normal(shape) * scale)


def _weight(rng: np.random.Generator, out: int, inner: int) -> np.ndarray:
    return _normal(rng, out, inner, scale=inner**-0.5)


def _gamma(rng: np.random.Generator, n: int) -> np.ndarray:
    return bf16_exact(1 + 0.2 * rng.standard_normal(n))


def _rmsnorm(case: Case, rng: np.random.Generator):
    width = int(case.size("width", 64))
    x = {"x": _normal(rng, case.rows, width, scale=case.scale), "weight": _gamma(rng, width)}
    return x | {"y_eps1e5_f64": _ASKED, "y_eps1e6_f64": _ASKED}, {}


def _gated_rmsnorm(case: Case, rng: np.random.Generator):
    heads, width = int(case.size("heads", 2)), int(case.size("width", 16))
    x = _normal(rng, case.rows, heads, width, scale=case.scale)
    gate = _normal(rng, case.rows, heads, width, scale=2.0)
    return {"x": x, "gate": gate, "weight": _gamma(rng, width)}, {"eps": 1e-5}


def _short_conv(case: Case, rng: np.random.Generator):
    width = int(case.size("width", 16))
    weight = rng.standard_normal((width, 1, 4)).astype(np.float32) * 0.5
    x = _normal(rng, case.batch, case.rows, width)
    return {"x": x, "x_step": _normal(rng, case.batch, 3, width), "weight": weight}, {}


def _gate_inputs(case: Case, rng: np.random.Generator, *lead: int):
    heads, width = int(case.size("heads", 2)), int(case.size("width", 16))
    a_log = rng.uniform(-1.0, 1.5, heads).astype(np.float32)
    padded = np.zeros(max(heads, width), np.float32)
    padded[:heads] = a_log
    bias = rng.uniform(-2.0, 2.0, heads * width).astype(np.float32)
    return {
        "g_raw": _normal(rng, *lead, case.rows, heads, width, scale=2.0),
        "A_log": a_log, "A_log_padded": padded, "dt_bias": bias,
    }  # fmt: skip


def _kda_gate(case: Case, rng: np.random.Generator):
    return _gate_inputs(case, rng), {"lower_bound": -5.0}


def _kda_recurrent(case: Case, rng: np.random.Generator):
    heads, width = int(case.size("heads", 2)), int(case.size("width", 16))
    shape = (case.batch, case.rows, heads, width)
    tensors = _gate_inputs(case, rng, case.batch)
    tensors |= {n: _normal(rng, *shape, scale=case.scale) for n in "qk"}
    tensors |= {"v": _normal(rng, *shape), "beta_raw": _normal(rng, *shape[:3])}
    state = rng.standard_normal((case.batch, heads, width, width)).astype(np.float32)
    return tensors | {"state_in_vk": state}, {"lower_bound": -5.0}


def _situ(case: Case, rng: np.random.Generator):
    width = int(case.size("width", 16))
    gate, up = (_normal(rng, case.rows, width, scale=case.scale) for _ in range(2))
    return {"gate": gate, "up": up}, {"beta": 4.0, "linear_beta": 25.0}


def _router_meta(case: Case) -> dict[str, Any]:
    return {
        "top_k": int(case.size("top_k", 2)),
        "num_expert_group": int(case.size("groups", 1)),
        "topk_group": int(case.size("kept", 1)),
        "routed_scaling_factor": case.size("scaling", 1.0),
    }


def _router(case: Case, rng: np.random.Generator):
    experts, width = int(case.size("experts", 8)), int(case.size("width", 48))
    bias = rng.uniform(-0.3, 0.3, experts).astype(np.float32)
    tensors = {"x": _normal(rng, case.rows, width), "weight": _weight(rng, experts, width)}
    return tensors | {"bias": bias}, _router_meta(case)


def _attn_res(case: Case, rng: np.random.Generator):
    width, count = int(case.size("width", 32)), int(case.size("snapshots", 3))
    tensors = {
        "prefix_sum": _normal(rng, case.rows, width, scale=2.0),
        "blocks": _normal(rng, case.rows, count, width, scale=2.0),
        "norm_weight": _gamma(rng, width),
        "proj_weight": _normal(rng, 1, width, scale=0.2),
    }
    asked = {f"y_{j}blocks_f64": _ASKED for j in (0, 1, count - 1, count)}
    return tensors | asked, {"eps": 1e-5}


def _mxfp4(case: Case, rng: np.random.Generator):
    width = int(case.size("width", 64))
    # scale bytes whose values stay finite in bf16 and in float64 references
    scale = rng.integers(0, 253, (case.rows, width // 32), dtype=np.uint8)
    packed = rng.integers(0, 256, (case.rows, width // 2), dtype=np.uint8)
    return {"case_packed": packed, "case_scale": scale}, {}


def _latent_moe(case: Case, rng: np.random.Generator):
    hidden, latent, width, shared = 40, 32, 64, 24
    experts = int(case.size("experts", 6))
    tensors = {"x": _normal(rng, case.rows, hidden), "gate.weight": _weight(rng, experts, hidden)}
    bias = rng.uniform(-0.3, 0.3, experts).astype(np.float32)
    tensors["gate.e_score_correction_bias"] = bias
    for e in range(experts):
        for name, (out, inner) in {
            "w1": (width, latent),
            "w3": (width, latent),
            "w2": (latent, width),
        }.items():
            key = f"experts.{e}.{name}.weight"
            tensors[f"{key}_packed"] = rng.integers(0, 256, (out, inner // 2), dtype=np.uint8)
            tensors[f"{key}_scale"] = rng.integers(122, 125, (out, inner // 32), dtype=np.uint8)
    tensors |= {
        "routed_expert_down_proj.weight": _weight(rng, latent, hidden),
        "routed_expert_norm.weight": _gamma(rng, latent),
        "routed_expert_up_proj.weight": _weight(rng, hidden, latent),
        "shared_experts.gate_proj.weight": _weight(rng, shared, hidden),
        "shared_experts.up_proj.weight": _weight(rng, shared, hidden),
        "shared_experts.down_proj.weight": _weight(rng, hidden, shared),
    }
    return tensors, _router_meta(case) | {"num_experts": experts, "rms_norm_eps": 1e-5}


def _mla(case: Case, rng: np.random.Generator):
    hidden, heads, q_rank, rank, nope, rope, value = 40, 3, 20, 28, 16, 8, 12
    meta = {
        "S": case.rows - 3, "Tq": 3, "num_heads": heads, "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope, "v_head_dim": value, "kv_lora_rank": rank, "q_lora_rank": q_rank,
        "norm_eps": 1e-6,
    }  # fmt: skip
    shapes = {
        "q_a_proj": (q_rank, hidden), "kv_a_proj_with_mqa": (rank + rope, hidden),
        "g_proj": (heads * value, hidden), "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_b_proj": (heads * (nope + value), rank), "o_proj": (hidden, heads * value),
    }  # fmt: skip
    tensors = {f"w.{n}.weight": _weight(rng, *shape) for n, shape in shapes.items()}
    tensors |= {"w.q_a_layernorm.weight": _gamma(rng, q_rank)}
    tensors |= {"w.kv_a_layernorm.weight": _gamma(rng, rank)}
    return tensors | {"hidden": _normal(rng, case.rows, hidden, scale=case.scale)}, meta


_MAKERS = {
    "rmsnorm": _rmsnorm, "gated_rmsnorm": _gated_rmsnorm, "short_conv": _short_conv,
    "kda_gate": _kda_gate, "kda_recurrent": _kda_recurrent, "situ": _situ, "router": _router,
    "attn_res": _attn_res, "mxfp4": _mxfp4, "latent_moe": _latent_moe, "mla": _mla,
}  # fmt: skip

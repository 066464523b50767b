"""Recorded folders of kind `ops`: every operation file against `jax_impl` and `torch_ref`.

An operation is recognised by its sidecar's `op`, whatever shapes, seeds and constants the file has.
What a file records and nobody here produces is reported as not run, unless it is one of the
intermediates listed in `_INTERNAL`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from parity import metrics
from parity.folders import Folder, operations, read_tensors
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, compare, judge, not_run

SIDES = ("jax", "torch")
LONG = 32  # recurrent steps beyond which the wider tolerance applies
TIE_GAP = 1e-6  # biased scores nearer than this are a tie in f32
_TWO_PROFILES = ("rmsnorm", "attn_res", "mla", "latent_moe")
_RUNS = (("float32", "H"), ("float32", "V"), ("bfloat16", "H"), ("bfloat16", "V"))
# Recorded to help finding a mistake; not every implementation has them as values of their own.
_INTERNAL = {"q_absorbed", "attn_latent", "scores", "gap"}
# Products of a few factors: every element is right by itself, however small. In sums it is not.
_ELEMENTWISE = {
    "situ": ("y", "y_nolinear"),
    "gated_rmsnorm": ("y",),
    "kda_gate": ("log_decay",),
    "kda_recurrent": ("q_norm", "k_norm", "log_decay", "beta"),
}
_F32_ONLY = ("kda_gate",)  # wide in every dtype: the recorded inputs are exact in bf16

_ORIGINS = (("_f64", "float64"), ("", "float64"), ("_f32", "float32"), ("_bf16", "bfloat16"))

Tensors = dict[str, np.ndarray]


def op_name(op: str) -> str:
    """The operation behind a recorded name: `kda_recurrent_T8` -> `kda_recurrent`."""
    for known in ("kda_recurrent", "router"):
        if op.startswith(known):
            return known
    return op


def check_ops(folder: Folder, sides: tuple[str, ...] = SIDES) -> Iterator[Verdict]:
    """Compares every operation file of the folder."""
    for stem, meta in operations(folder.path):
        where = Where("ops", folder.name, stem)
        known = import_module(f"parity.op_{sides[0]}").OPS
        op = op_name(meta.get("op", stem))
        if op not in known:
            yield not_run(
                where, "all", f"operation {op!r} is not implemented; known: {sorted(known)}"
            )
            continue
        tensors = read_tensors(folder.path / f"{stem}.safetensors")
        yield from check_operation(where, op, tensors, meta, sides)


def check_operation(
    where: Where, op: str, tensors: Tensors, meta: dict[str, Any],
    sides: tuple[str, ...] = SIDES, dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    profiles: tuple[str, ...] = ("H", "V", "-"),
) -> Iterator[Verdict]:  # fmt: skip
    """Compares one operation in all dtypes and profiles that it distinguishes."""
    for side in sides:
        produced, judged = set[str](), 0
        for dtype, profile in runs_of(op):
            if dtype not in dtypes or profile not in profiles:
                continue
            at = where.at(dtype=dtype, profile=profile, ours=side)
            try:
                found = import_module(f"parity.op_{side}").run(op, tensors, meta, dtype, profile)
            except (KeyError, ValueError, TypeError, IndexError) as error:
                yield not_run(at, "all", f"{type(error).__name__} while running it: {error}")
                produced |= set(_stems(tensors))
                judged += 1
                continue
            produced |= {_recorded_name(name) for name in found}
            for verdict in compare_outputs(at, op, found, tensors, meta):
                judged += 1
                yield verdict
        if not judged and not set(_stems(tensors)) - produced - _INTERNAL:
            cause = f"the file records no result of {op!r}, such as a tensor named y_f64"
            yield not_run(where.at(ours=side), "all", cause)
        for name in sorted(set(_stems(tensors)) - produced - _INTERNAL):
            yield not_run(where.at(ours=side), name, "recorded, but not produced by this side")


def runs_of(op: str) -> list[tuple[str, str]]:
    """(dtype, profile) pairs in which `op` differs; profile `-` where it has none."""
    if op in _TWO_PROFILES:
        return list(_RUNS)
    if op in _F32_ONLY:
        return [("float32", "-")]
    return [("float32", "-"), ("bfloat16", "-")]


def compare_outputs(
    where: Where, op: str, found: Tensors, tensors: Tensors, meta: dict[str, Any]
) -> Iterator[Verdict]:
    """Verdicts for all results that were recorded."""
    if "idx" in found:
        yield from _choice(where, found, tensors, meta)
    for name, got in sorted(found.items()):
        want, origin = _want(tensors, _recorded_name(name))
        if name in ("idx", "topk_weight", "scores"):
            continue
        if want is None:
            if op == "mxfp4" and name == "quant_value" and "quant_input" in tensors:
                yield _quantised(where, got, tensors)
            continue
        if name.startswith("state_") and op == "short_conv":
            want = want[..., want.shape[-1] - got.shape[-1] :]  # the oldest column is never read
        key = _tolerance_key(op, name, tensors)
        at, limit_of = where.at(against=f"recorded {origin}"), None
        if origin == "bfloat16":
            limit_of = origin  # such a recording carries bf16 roundings itself
        extra = _published(tensors, _recorded_name(name))
        yield compare(at, name, got, want, key, extra=extra, judged_as=limit_of)
        own = op == "rmsnorm" or name in _ELEMENTWISE.get(op, ())
        if own and where.dtype == "float32" and origin != "bfloat16":
            yield compare(at, f"{name}, each element", got, want, "op_element")


def _tolerance_key(op: str, name: str, tensors: Tensors) -> str:
    if op in ("mxfp4", "attn_res"):
        return op
    if op == "kda_recurrent":
        if name.startswith(("state_out", "replayed")):
            return "kda_state"
        return "op_long" if tensors["q"].shape[1] > LONG else "op"
    return "op_inner" if name.startswith("attn") else "op"


def _recorded_name(name: str) -> str:
    return name.split(" ")[0].replace("replayed_vk", "state_out_vk")


def _stems(tensors: Tensors) -> list[str]:
    """Names of recorded results; `_fla` ones are another published run of a result."""
    found = [k.rsplit("_", 1)[0] for k in tensors if k.endswith(("_f64", "_f32", "_bf16"))]
    return [k for k in dict.fromkeys(found) if not k.endswith("_fla")]


def _want(tensors: Tensors, name: str) -> tuple[np.ndarray | None, str]:
    """The best recording of a result, and the precision that it was computed in."""
    for suffix, origin in _ORIGINS:
        if (found := tensors.get(f"{name}{suffix}")) is not None:
            return np.asarray(found, np.float64), origin
    return None, "nothing"


def _published(tensors: Tensors, name: str) -> metrics.Metrics:
    """The published code's own float32 and bf16 error, to be read beside ours."""
    want = tensors.get(f"{name}_f64")
    pairs = {d: tensors.get(f"{name}_{d}") for d in ("f32", "bf16")}
    if want is None:
        return {}
    return {
        f"published_{d}_max_rel": metrics.distance(x, want)["max_rel"]
        for d, x in pairs.items()
        if x is not None and x.shape == want.shape
    }


def _choice(
    where: Where, found: Tensors, tensors: Tensors, meta: dict[str, Any]
) -> Iterator[Verdict]:
    """Router ids where there is no tie, weights everywhere.

    In a tied row either choice is right; the expected weights then follow from the recorded scores
    at the ids that we chose.
    """
    (want, at), (weight, of) = (_want(tensors, n) for n in ("idx", "topk_weight"))
    if want is None:
        if weight is not None:
            yield not_run(where, "topk_weight", "weights without idx, the experts that they are of")
        return
    idx, order = found["idx"].astype(np.int64), np.argsort(want, -1)
    want = np.take_along_axis(want.astype(np.int64), order, -1)
    at = where.at(against=f"recorded {at}")
    if idx.shape != want.shape:
        yield compare(at, "idx", idx, want, "equal")
        return
    gap = _gaps(tensors, meta)
    yield judge(at, "idx", metrics.set_flips(idx, want, gap), tolerance("router_ids"))
    if weight is None:
        return
    at = where.at(against=f"recorded {of}")
    if weight.shape != want.shape:
        yield compare(at, "topk_weight", found["topk_weight"], weight, "router_weight")
        return
    weight = np.take_along_axis(weight, order, -1)
    differ = (want != idx).any(-1) & (gap <= TIE_GAP)
    if differ.any():
        chosen = np.take_along_axis(_scores(tensors), idx, -1)
        scaling = meta.get("routed_scaling_factor", 1.0)
        fair = chosen / (chosen.sum(-1, keepdims=True) + 1e-20) * scaling
        weight[differ] = fair[differ]
    note = f"{int((gap <= TIE_GAP).sum())} tied rows" if (gap <= TIE_GAP).any() else ""
    yield compare(at, "topk_weight", found["topk_weight"], weight, "router_weight", note=note)


def _scores(tensors: Tensors) -> np.ndarray:
    """Recorded scores of all experts, else the same in float64 from the recorded inputs."""
    if (found := tensors.get("scores_f64")) is not None:
        return np.asarray(found, np.float64)
    weight = tensors["weight"] if "weight" in tensors else tensors["gate.weight"]
    logits = np.asarray(tensors["x"], np.float64) @ np.asarray(weight, np.float64).T
    return 1 / (1 + np.exp(-logits))


def _gaps(tensors: Tensors, meta: dict[str, Any]) -> np.ndarray:
    """Recorded distances from another choice of experts, else the same from the scores."""
    if (found := tensors.get("gap_f64")) is not None:
        return np.asarray(found, np.float64)
    bias = tensors["bias"] if "bias" in tensors else tensors["gate.e_score_correction_bias"]
    biased, k = _scores(tensors) + np.asarray(bias, np.float64), meta["top_k"]
    rows, experts = biased.shape
    gap = np.full(rows, np.inf)
    groups, kept = meta.get("num_expert_group", 1), meta.get("topk_group", 1)
    if groups > 1:
        grouped = biased.reshape(rows, groups, -1)
        best = np.sort(grouped, -1)[..., -2:].sum(-1)
        order = np.argsort(-best, -1)
        ranked = np.take_along_axis(best, order, -1)
        if kept < groups:
            gap = ranked[:, kept - 1] - ranked[:, kept]
        keep = np.zeros((rows, groups), bool)
        np.put_along_axis(keep, order[:, :kept], True, -1)
        biased = np.where(keep[..., None], grouped, -np.inf).reshape(rows, experts)
    ranked = -np.sort(-biased, -1)
    return np.minimum(gap, ranked[:, k - 1] - ranked[:, k]) if k < experts else gap


def _quantised(where: Where, got: np.ndarray, tensors: Tensors) -> Verdict:
    """Decoded values against what was quantised, in units of each group's scale."""
    source = np.asarray(tensors["quant_input"], np.float64)
    scale = 2.0 ** (tensors["quant_scale"].astype(np.float64) - 127)
    unit = np.repeat(scale, source.shape[-1] // scale.shape[-1], -1)
    return compare(where, "quant_value / scale", got / unit, source / unit, "mxfp4_quantised")

"""Figures, conditions and tables of `rank_slice` from its samples."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import jax

from bench import slice_model, timing
from bench.devices import find
from bench.floor import Work, layer_bytes, mean_distinct
from bench.result import figure, median_figure, noisy_names
from bench.roofline import MOE_PERIOD
from jax_impl.backend import Backend
from jax_impl.config import ModelConfig
from jax_impl.memory import MemorySettings
from jax_impl.model import loop_of
from jax_impl.random_step import Case

if TYPE_CHECKING:
    from bench.rank_slice import Setting

EXCLUDED = (
    "exchanges between ranks (looped back: compute only), prefill, compilation, the drafter; "
    "embedding and head are in the steps and cancel in the time per layer"
)
SPREAD = 0.96  # of the mean under independent random routing: 115.5 of 120.3 at 8 rows


def figures_of(
    setting: Setting, case: Case, samples: dict[str, list[float]], distinct: list[float]
) -> dict[str, dict[str, Any]]:
    """All figures of one case."""
    name, found = case.name, {}
    for mode in ("", "_dispatched")[: 1 + setting.options.dispatched]:
        for n in setting.depths:
            mine = median_figure(samples[f"moe{n}{mode}"], "us")
            found[f"us_per_step{mode}.moe{n}.{name}"] = mine
        for shallow, deep in list(pairwise(in_ratio(setting)))[:1]:
            each = timing.per_layer_us(
                samples[f"moe{deep}{mode}"], samples[f"moe{shallow}{mode}"], deep - shallow
            )
            found[f"us_per_layer{mode}.{name}"] = median_figure(each, "us")
        for whole in (n for n, s in setting.depths.items() if s.config == setting.config):
            each = [s / 1000 for s in samples[f"moe{whole}{mode}"]]
            found[f"ms_per_step{mode}.{name}"] = median_figure(each, "ms")
    found[f"distinct_experts.{name}"] = figure(fmean(distinct), "count", distinct)
    return found | _floors(setting, case, fmean(distinct), found)


def in_ratio(setting: Setting) -> list[int]:
    """Depths in which KDA and MLA layers with experts stand in the released pattern's ratio."""
    kinds = {n: slice_model.layer_kinds(s.config) for n, s in setting.depths.items()}
    return [n for n, k in kinds.items() if k["kda"] == (slice_model.MLA_EVERY - 1) * k["mla"]]


def _floors(
    setting: Setting, case: Case, distinct: float, found: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Bytes of a mean layer; where the device is known also its floor, and the measured rate."""
    o, name = setting.options, case.name
    memory = MemorySettings(ranks=o.tp, kv_dtype=o.kv_dtype)
    layers = layer_bytes(setting.config, memory, Work(case.batch, case.tokens, o.context, distinct))
    size = fmean(sum(layers[kind].values()) for kind in MOE_PERIOD)
    out = {f"bytes_per_layer.{name}": figure(round(size), "bytes")}
    each = found.get(f"us_per_layer.{name}", {}).get("samples", [])
    timed = bool(each) and min(each) > 0  # of noisy small runs a difference may be none
    if timed:
        out[f"gb_s.{name}"] = median_figure([size / us / 1e3 for us in each], "GB/s")
    device = find(jax.devices()[0].device_kind)
    if device is not None:
        floor = size / device.read_tb_s / 1e6
        out[f"floor_us_per_layer.{name}"] = figure(floor, "us")
        if timed:
            out[f"floor_share.{name}"] = median_figure([floor / us for us in each], "share")
    return out


def routing_words(config: ModelConfig, case: Case, distinct: float) -> str:
    """Whether `distinct` experts of a layer are those of independent random choices."""
    mean = mean_distinct(config, case.batch * case.tokens)
    word = "full spread" if distinct >= SPREAD * mean else "NOT full spread"
    return f"{word}: {distinct:.1f} distinct experts per layer, {mean:.1f} expected"


def how_layers_run(config: ModelConfig, backend: Backend) -> str:
    """Which layers of a timed program are one loop, as `jax_impl.model.forward` traces them."""
    again = loop_of(config, backend)
    if again is None:
        return "unrolled"
    first, period, turns = again
    return f"layers {first}..{first + period * turns - 1} as one loop of {turns} x {period}"


def conditions_of(
    setting: Setting, figures: dict[str, Any], took: dict[str, float]
) -> dict[str, Any]:
    """Conditions of the result, but for the machine; `took` is seconds by stage."""
    o = setting.options
    stats = jax.devices()[0].memory_stats() or {}
    spread = {}
    for case in setting.cases:
        value = figures[f"distinct_experts.{case.name}"]["value"]
        spread[case.name] = routing_words(setting.config, case, value)
    return {
        "what": "rank slice, compute only",
        "seed": o.seed,
        "shapes": {
            "preset": o.preset, "tp": o.tp, "context": o.context, "kv_dtype": o.kv_dtype,
            "page_size": o.page_size, "drafts": o.drafts,
            "layers": {
                str(n): slice_model.layer_kinds(s.config)
                for n, s in setting.depths.items()
            },
            "cases": {c.name: {"sequences": c.batch, "rows_each": c.tokens} for c in setting.cases},
        },
        "acceptance": setting.method.describe(o.drafts) if o.drafts else "none",
        "backend": o.backend,
        "excluded": EXCLUDED,
        "execution": f"{o.steps} steps per sample, up to {o.repeats} samples in turns over the "
        f"programs within {o.budget:g} s, after {o.warmups} rounds of warm-up",
        "layers": {
            str(n): how_layers_run(s.config, setting.backend) for n, s in setting.depths.items()
        },
        "distinct_counted_in": slice_model.layer_kinds(setting.routed.config),
        "weights": "random, distinct in every layer, larger than the caches",
        "routing": spread,
        "memory": {
            "fraction": o.memory_fraction,
            "bytes_limit": stats.get("bytes_limit"),
            "peak_bytes": stats.get("peak_bytes_in_use"),
        },
        "options": {k: str(v) if k == "compile_cache" else v for k, v in asdict(o).items()},
        "seconds": took,
        "noisy": noisy_names(figures),
    }  # fmt: skip


def rows_to_print(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(figure, value, spread of the samples, remark) of what was measured."""
    noisy, found = result["conditions"]["noisy"], []
    for name, f in result["figures"].items():
        samples = sorted(f["samples"] or [])
        apart = f"{samples[0]:,.2f} .. {samples[-1]:,.2f}" if samples else ""
        remark = "noisy: halves differ by more than 3 %, or too few" if name in noisy else ""
        found.append((name, f"{f['value']:,.2f} {f['unit']}", apart, remark))
    return found


def headline_names(result: dict[str, Any]) -> list[str]:
    """The figures that the command is about."""
    return [n for n in result["figures"] if n.startswith(("us_per_layer.", "ms_per_step."))]

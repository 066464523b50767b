"""`python -m bench layers`: what the device does in one KDA and one MLA layer with experts.

Each traced call is one layer alone, after the caches were filled with something else. Exchanges are
looped back. Durations are the device's own; tracing lengthens gaps and may lengthen kernels, so
these figures place time, and steps are timed elsewhere. Captured programs hide which instruction a
kernel belongs to, so kernels are launched one by one here.

    KIND.layer.busy_us      time in which at least one activity runs
    KIND.layer.span_us      from the first activity's start to the last one's end, gaps included
    KIND.layer.floor_share  floor (bytes over the device's fixed bandwidth) over busy_us
    KIND.STAGE.us, .gb_s    activities of one stage, and its bytes over their time
    KIND.NN_NAME.kernel_us  one activity, in order of its start (NxNAME: N of one name together)

Bytes of a stage: its weights, of the experts those that were chosen, and what it reads and writes
of state and cache. Activations stay in the caches and are not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import activities, rank_slice, slice_model, slice_parity
from bench.activities import Activity
from bench.devices import find
from bench.floor import Work, layer_bytes
from bench.layers_options import LayersOptions, require_layers
from bench.machine import command_line, describe_machine, with_clocks_now
from bench.rank_slice_report import routing_words
from bench.result import SCHEMA, figure, median_figure, noisy_names
from jax_impl.backend import AUTO, STAGES, Backend
from jax_impl.config import ModelConfig
from jax_impl.memory import MemorySettings
from jax_impl.model import Stream, layer_weights, place, run_layer
from jax_impl.progress import note
from jax_impl.random_step import Case, make_inputs, random_cache, random_stream
from jax_impl.random_weights import random_weights
from jax_impl.static import Static
from jax_impl.weights import BYTES, weight_table

FLUSH_BYTES = 512 << 20  # several times any cache
FLUSH_BYTES_CPU = 1 << 20
MOST_KERNELS = 60  # listed one by one
# arrays that a stage reads; all others of a layer belong to its attention
READS = {
    "attn_in": ("input_layernorm", "self_attention_res_norm", "self_attention_res_proj"),
    "attn_out": ("o_proj", "post_attention_layernorm", "mlp_res_norm", "mlp_res_proj"),
    "route": (
        "gate", "e_score_correction_bias", "routed_expert_down_proj", "shared_gate_up_proj",
    ),
    "experts": ("shared_down_proj",),
    "moe_out": ("routed_expert_norm", "routed_expert_up_proj"),
}  # fmt: skip


def disable_command_buffers() -> None:
    """Before JAX's first use of a device; changes launches, not kernels."""
    flag, flags = "--xla_gpu_enable_command_buffer=", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def scoped(backend: Backend) -> Backend:
    """The backend with every stage traced under its name."""

    def wrapped(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kw: Any) -> Any:
            with jax.named_scope(activities.SCOPE + name):
                return stage(*args, **kw)

        return run

    stages = {name: wrapped(name, getattr(backend, name)) for name in STAGES}
    return Backend(**stages, whole_stacks=backend.whole_stacks)


def one_layer(static: Static, backend: Backend, case: Case, layer: int) -> Any:
    """Jitted: (weights, cache, inputs, prefix, bank, delta) -> (cache, ids, rest). Donates cache.

    A verification's layer leaves what the commit needs; the commit itself is no part of it.
    """

    def run(weights: Any, cache: Any, inputs: Any, *stream: jax.Array) -> Any:
        record: dict[str, Any] = {}
        w = layer_weights(static, weights, layer, backend.whole_stacks)
        after, cache, pending = run_layer(
            static, backend, w, place(static, layer), Stream(*stream), cache, inputs, record,
            commit=not case.verifies,
        )  # fmt: skip
        return cache, record["ids"], (after, pending)

    return jax.jit(run, donate_argnums=1)


def stage_bytes(
    config: ModelConfig, settings: MemorySettings, work: Work, kind: str
) -> dict[str, float]:
    """Bytes of every stage of a layer on one rank; they add up to the layer's."""
    whole = layer_bytes(config, settings, work)[kind]
    found: dict[str, float] = {}
    for stage, names in READS.items():
        found[stage] = sum(
            prod(a.shape(config, settings.ranks)[1:]) * BYTES[a.dtype]
            for a in weight_table(config)
            if a.kind in ("layer", kind, "moe") and a.name in names
        )
    found["attention"] = sum(whole.values()) - sum(found.values())
    mixture = sum(found[s] for s in ("route", "experts", "moe_out"))
    routed = whole["feed-forward weights"] - mixture
    return found | {
        "experts": found["experts"] + routed, "attention": found["attention"] - routed,
    }  # fmt: skip


def trace_layer(
    compiled: Any, arguments: list[Any], repeats: int, perfetto: Path | None
) -> tuple[list[list[Activity]], Any]:
    """Activities of each traced call with their stages, and the ids of the chosen experts."""
    cpu = jax.devices()[0].platform == "cpu"
    flush = jnp.ones((FLUSH_BYTES_CPU if cpu else FLUSH_BYTES) // 4, jnp.float32)
    fill = jax.jit(lambda x: jnp.sum(x * 1.5))
    where = activities.stages_of(compiled.as_text(), STAGES)
    found, ids = [], None

    def call() -> Any:
        nonlocal ids
        arguments[1], ids, rest = compiled(*arguments)
        return arguments[1], rest

    jax.block_until_ready(call())
    for turn in range(repeats):
        fill(flush).block_until_ready()
        seen = activities.leaves(activities.record(call, perfetto if turn == 0 else None))
        found.append([replace(a, stage=where.get(a.operation, "")) for a in seen])
    return found, ids


def layer_figures(
    prefix: str, calls: list[list[Activity]], size: dict[str, float], tb_s: float | None
) -> dict[str, Any]:
    """Figures of one layer kind; without a known device no floor."""
    total, found = sum(size.values()), {}
    busy = [activities.busy_us(c) for c in calls]
    span = [activities.span_us(c) for c in calls]
    found[f"{prefix}.layer.busy_us"] = median_figure(busy, "us")
    found[f"{prefix}.layer.span_us"] = median_figure(span, "us")
    found[f"{prefix}.layer.activities"] = figure(median(map(len, calls)), "count")
    for stage, bytes_ in ({"layer": total} | size).items():
        mine = busy if stage == "layer" else [_stage_us(c, stage) for c in calls]
        time = median(mine)
        if stage != "layer":
            found[f"{prefix}.{stage}.us"] = figure(time, "us", mine)
        found[f"{prefix}.{stage}.bytes"] = figure(round(bytes_), "bytes")
        if time > 0:
            found[f"{prefix}.{stage}.gb_s"] = figure(bytes_ / time / 1e3, "GB/s")
        if tb_s is not None:
            floor = bytes_ / tb_s / 1e6
            found[f"{prefix}.{stage}.floor_us"] = figure(floor, "us")
            if time > 0:
                found[f"{prefix}.{stage}.floor_share"] = figure(floor / time, "share")
    unknown = [_stage_us(c, "") for c in calls]
    found[f"{prefix}.no_stage.us"] = figure(median(unknown), "us", unknown)
    return found | _kernel_figures(prefix, calls)


def _kernel_figures(prefix: str, calls: list[list[Activity]]) -> dict[str, Any]:
    """One figure per activity in order of start; where a loop makes many, one per name."""
    alike = [c for c in calls if len(c) == len(calls[0])]
    names = [
        "".join(ch if ch.isalnum() or ch in "_." else "_" for ch in a.name)[:48] for a in calls[0]
    ]
    if len(names) <= MOST_KERNELS:
        return {
            f"{prefix}.{i:02d}_{name}.kernel_us": median_figure(
                [c[i].duration for c in alike], "us"
            )
            for i, name in enumerate(names)
        }
    found = {}
    for name in dict.fromkeys(names):
        places = [i for i, other in enumerate(names) if other == name]
        sums = [sum(c[i].duration for i in places) for c in alike]
        found[f"{prefix}.{len(places)}x_{name}.kernel_us"] = median_figure(sums, "us")
    return found


def _stage_us(call: list[Activity], stage: str) -> float:
    inside = ("kda", "kda_step", "mla") if stage == "attention" else (stage,)
    return activities.busy_us([a for a in call if a.stage in inside])


def run_layers(
    o: LayersOptions, argv: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, list[Activity]]]:
    """Run the benchmark; the result document, and one call's activities by backend and layer kind.

    Raises:
        ValueError: options, sizes, memory or backend that cannot run; says why.
    """
    require_layers(o)
    settings = {name: rank_slice.prepare(o.slice_options(name)) for name in o.names}
    bound = settings.get("latency_specialized", settings[o.names[0]])
    static, config = bound.static, bound.static.config
    case = bound.cases[-1]
    weights = random_weights(config, bound.placement, o.seed, static.run)
    cache = random_cache(config, static.run, bound.placement, o.seed)
    inputs, _ = make_inputs(config, static.run, case, o.context, 1, o.seed)
    stream = random_stream(static, case, o.seed)
    device = find(jax.devices()[0].device_kind)
    machine, figures, apart = describe_machine(), {}, {}
    timelines: dict[str, list[Activity]] = {}
    counts: list[float] = []
    for name, setting in settings.items():
        stages = AUTO if name == "auto" else setting.backend
        for kind, layer in slice_parity.checked_layers(static).items():
            note(f"layers: compiling, tracing {name}, {kind}")
            check = slice_parity.layer_check(static, stages, layer)
            distances = check(weights, cache, inputs, *stream)
            apart[f"{name}.{kind}"] = {n: float(v) for n, v in distances.items()}
            arguments = [weights, cache, inputs, *stream]
            program = one_layer(static, scoped(stages), case, layer).lower(*arguments).compile()
            folder = None if o.perfetto is None else o.perfetto / f"{name}.{kind}"
            calls, ids = trace_layer(program, arguments, o.repeats, folder)
            cache = arguments[1]
            distinct = fmean(slice_model.distinct_counts(np.asarray(ids)[None]))
            counts.append(distinct)
            work = Work(case.batch, case.tokens, o.context, distinct)
            memory = MemorySettings(ranks=o.tp, kv_dtype=o.kv_dtype)
            size = stage_bytes(config, memory, work, kind)
            prefix = f"{name}.{kind}"
            tb_s = None if device is None else device.read_tb_s
            figures |= layer_figures(prefix, calls, size, tb_s)
            figures[f"{prefix}.distinct_experts"] = figure(distinct, "count")
            timelines[prefix] = calls[0]
    spread = routing_words(config, case, fmean(counts))
    result = {
        "schema": SCHEMA,
        "command": command_line(list(argv) if argv is not None else None),
        "conditions": with_clocks_now(machine) | _conditions(o, case, figures)
        | {"routing": spread},
        "figures": figures,
        "parity": slice_parity.verdict(static, apart),
    }  # fmt: skip
    return result, timelines


def _conditions(o: LayersOptions, case: Case, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": "device activities of single layers, compute only",
        "seed": o.seed,
        "shapes": {
            "preset": o.preset, "tp": o.tp, "context": o.context, "kv_dtype": o.kv_dtype,
            "sequences": case.batch, "rows_each": case.tokens,
        },
        "acceptance": "none",
        "backend": o.backends,
        "excluded": "exchanges between ranks (looped back), other layers, the commit of a "
        "verification; launches are one by one, not captured",
        "execution": f"{o.repeats} traced calls per layer, each after {FLUSH_BYTES >> 20} MiB of "
        "other data were read (1 MiB on a CPU)",
        "noisy": noisy_names(figures),
    }  # fmt: skip


def rows_to_print(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """(layer and stage or kernel, us, MB, GB/s, share of the floor)."""
    figures, rows = result["figures"], []

    def shown(name: str, scale: float = 1.0) -> str:
        return f"{figures[name]['value'] / scale:,.2f}" if name in figures else ""

    for name in figures:
        if name.endswith(".kernel_us"):
            rows.append((name.removesuffix(".kernel_us"), shown(name), "", "", ""))
        elif name.endswith((".busy_us", ".us")):
            base, what = name.rsplit(".", 1)
            label = base if what == "us" else f"{base} (busy)"
            more = (
                shown(f"{base}.bytes", 1e6),
                shown(f"{base}.gb_s"),
                shown(f"{base}.floor_share"),
            )
            rows.append((label, shown(name), *more))
    return rows

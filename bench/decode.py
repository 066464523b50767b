"""`python -m bench decode`: decode steps of an engine, decode apart from prefill.

Every figure's definition is in `bench.decode_metrics.DEFINITIONS` and in the output. Requests of a
group are submitted together and run together; nobody joins. Warm-up (compilation, and one group of
every batch size that the steps may have) is not counted. With two backends each run is made with
one and then the other, in one process and at the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from bench import replay, slice_parity
from bench.decode_metrics import DEFINITIONS, Group, decode_figures
from bench.engine_options import DecodeOptions, require_decode
from bench.engine_setup import Loaded, load, plans_of
from bench.machine import command_line, describe_machine, with_clocks_now
from bench.result import SCHEMA, figure, noisy_names
from bench.serve import serve_group, warm_up_sizes
from bench.timing import Clock
from jax_impl.engine import Engine
from jax_impl.processes import COMPILING, report
from jax_impl.progress import activity, count_bar
from jax_impl.random_step import Case, make_inputs, random_stream
from jax_impl.speculative_engine import SpeculativeEngine

EXCLUDED = "loading, compilation and warm-up groups; prefill where a definition says so"
RATIOS = ("step_ms", "decode_tokens_s")


def prompts_of(o: DecodeOptions, vocabulary: int, run: int, group: int) -> list[list[int]]:
    """Random prompts of one group; the same for every backend."""
    rng = np.random.default_rng([o.seed, run, group])
    return rng.integers(0, vocabulary, (o.batch, o.isl)).tolist()


def measure(
    engines: dict[str, Engine], o: DecodeOptions, vocabulary: int, clock: Clock
) -> dict[str, list[list[Group]]]:
    """Groups by backend and run; backends in turns."""
    report(0, "warm-up (compiles first)", allow=COMPILING)
    tokens = min(o.osl, 4 + 2 * o.drafts)
    for name, engine in engines.items():
        with activity(f"compiling, warm-up: {name}"):
            for size in warm_up_sizes(o.batch, shrinking=o.drafts > 0):
                prompts = prompts_of(o, vocabulary, 0, 0)[:size]
                serve_group(engine, prompts, tokens, temperature=o.temperature)
    found: dict[str, list[list[Group]]] = {name: [] for name in engines}
    with count_bar("measuring", o.runs * len(engines)) as progress:
        for run in range(o.runs):
            for name, engine in engines.items():
                groups = [
                    serve_group(
                        engine, prompts_of(o, vocabulary, run + 1, g), o.osl,
                        temperature=o.temperature, seed=o.seed, clock=clock,
                    )
                    for g in range(o.groups)
                ]  # fmt: skip
                found[name].append(groups)
                progress(sum(map(len, found.values())))
    return found


def start(engine: Engine, o: DecodeOptions, vocabulary: int) -> list[int]:
    """A prefilled group with one decode step behind it."""
    prompts = prompts_of(o, vocabulary, 0, 1)
    handles = [engine.add(p, temperature=o.temperature, seed=o.seed) for p in prompts]
    for handle in handles:
        engine.prefill(handle)
    engine.decode(handles)
    return handles


def check(loaded: Loaded, engine: Engine, batch: int) -> dict[str, dict[str, float]]:
    """Distances of two layers from the reference at the end of a full context.

    At this engine's weights, and its cache as the served requests have left it.
    """
    tokens = 1 + engine.drafts if isinstance(engine, SpeculativeEngine) else 1
    seed, case = loaded.options.seed, Case("decode", batch, tokens)
    inputs, _ = make_inputs(loaded.config, loaded.run, case, loaded.context, 1, seed)
    stream = random_stream(engine.static, case, seed)
    found = {}
    for kind, layer in slice_parity.checked_layers(engine.static).items():
        run = slice_parity.layer_check(engine.static, engine.backend, layer, engine.placement)
        apart = run(engine.weights, engine.cache, inputs, *stream)
        found[kind] = {name: float(value) for name, value in apart.items()}
    return found


def run_decode(o: DecodeOptions, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; the result document.

    Raises:
        ValueError: options, sizes or backend that cannot run; says why.
    """
    require_decode(o)
    clock = time.perf_counter
    report(None, "weights", allow=COMPILING)
    loaded = load(o, o.batch, o.isl, o.needed, o.backends)
    vocabulary = loaded.config.vocab_size
    engines = {name: loaded.engine(name) for name in o.backends}
    machine = describe_machine()
    groups = measure(engines, o, vocabulary, clock)
    machine = with_clocks_now(machine)
    figures: dict[str, Any] = {}
    apart: dict[str, dict[str, float]] = {}
    for name, engine in engines.items():
        prefix = f"{name}." if len(engines) > 1 else ""
        mine = decode_figures(groups[name], o.batch)
        report(1, "replay and comparison (compile first)", allow=COMPILING)
        handles = start(engine, o, vocabulary)
        apart |= {f"{name}.{kind}": v for kind, v in check(loaded, engine, o.batch).items()}
        if o.replays:
            found = replay.replay_figures(engine, handles, o.replays, clock)
            step = mine["step_ms"]["value"]
            for label, by in (("replay", "replay_ms"), ("device", "replay_device_ms")):
                mine[f"host_over_{label}"] = figure(step / found[by]["value"], "ratio")
            mine |= found
        for handle in handles:
            engine.release(handle)
        figures |= {prefix + key: value for key, value in mine.items()}
    figures |= ratios(figures, o.backends)
    return {
        "schema": SCHEMA,
        "command": command_line(list(argv) if argv is not None else None),
        "conditions": machine | conditions_of(o, loaded, engines, figures),
        "figures": figures,
        "parity": slice_parity.verdict(next(iter(engines.values())).static, apart),
    }


def ratios(figures: dict[str, Any], backends: Sequence[str]) -> dict[str, Any]:
    """First backend over the second; samples are run by run, so that their spread is shown."""
    if len(backends) != 2:
        return {}
    found = {}
    for name in RATIOS:
        a, b = (figures[f"{backend}.{name}"] for backend in backends)
        each = [x / y for x, y in zip(a["samples"], b["samples"], strict=True)]
        label = f"ratio.{name}.{backends[0]}_over_{backends[1]}"
        found[label] = figure(a["value"] / b["value"], "ratio", each)
    return found


def conditions_of(
    o: DecodeOptions, loaded: Loaded, engines: dict[str, Engine], figures: dict[str, Any]
) -> dict[str, Any]:
    """Conditions of the result, but for the machine."""
    options = {k: str(v) if k in ("checkpoint", "draft") else v for k, v in asdict(o).items()}
    return {
        "what": "decode through the engine",
        "seed": o.seed,
        "shapes": {
            "model": str(o.checkpoint or f"random weights, preset {o.preset}"),
            "isl": o.isl, "osl": o.osl, "batch": o.batch, "drafts": o.drafts,
            "context": loaded.context, "tp": o.tp, "dcp": o.dcp, "experts": o.experts,
            "kv_dtype": o.kv_dtype, "processes": jax.process_count(),
        },
        "acceptance": loaded.acceptance,
        "backend": ",".join(o.backends),
        "excluded": EXCLUDED,
        "execution": f"{o.runs} runs of {o.groups} groups of {o.batch} prompt(s); host-timed",
        "definitions": DEFINITIONS | ({"replay": replay.DEFINITION} if o.replays else {}),
        "plans": {
            name: plans_of(engine, name) for name, engine in engines.items()
        },
        "options": options,
        "noisy": noisy_names(figures),
    }  # fmt: skip


def headline_names(result: dict[str, Any]) -> list[str]:
    """The figures that the command is about."""
    ends = ("step_ms", "decode_tokens_s", "user_tokens_s.p90", "accepted_length")
    return [n for n in result["figures"] if n.endswith(ends) or n.startswith("ratio.")]

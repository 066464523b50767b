"""`python -m bench startup`: what a decode step costs before the device computes.

One rank's share, exchanges looped back. Every program is compiled in two new processes, from shapes
alone: one whose compilation cache is empty, and one that finds there what the first has left. A
third calls it, on random weights.

    trace_s, lower_s, compile_s   seconds of the three parts of a compilation; the key of the cache
                                  is the lowered program, so that the first two are never saved
    total_s                       of all three
    process_s                     of the whole process, imports and start of the device included
        .cold.CASE                with an empty cache
        .cached.CASE              in a new process, with the cache that the cold one filled
    cache_bytes.CASE              what the cold one left
    first_step_s.cached.CASE      first call in the third process, which has that cache too, weights
                                  being there, to the end of its results: tracing, lowering,
                                  loading, whatever the runtime does at a first call, and the step
    dispatch_us                   from a call that enqueues a step in place until it returns
    handover_us                   what goes before it: alone, inputs from the host to their place;
                                  chained, the copy of the tokens that the step before has made
    dispatch_p10_us, ..p90_us     deciles of the same calls
    step_us                       from the call to the end of the step's results
        .alone.CASE               inputs on the host, the step before has ended: a loop that looks
                                  at every token
        .chained.CASE             inputs from the step before, up to 16 steps in flight (the first
                                  call of each row is not counted); `step_us` per step of a row
    busy.CASE                     share of the chained calls that returned before the step in front
                                  had ended: at 1 the device was never without work
    buffers_in.CASE, .._out.CASE  arrays that go in and come out of a call
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import slice_model
from bench.machine import command_line
from bench.options import see_help
from bench.rank_slice_options import SliceOptions
from bench.result import SCHEMA, figure, median_figure, noisy_names
from bench.startup_options import IN_FLIGHT, StartupOptions, option_problems
from jax_impl.config import ConfigError
from jax_impl.problems import listed
from jax_impl.progress import note
from jax_impl.random_step import cases, load_config, run_for
from jax_impl.sharding import require_ranks

ROOT = Path(__file__).parents[1]
PARTS = ("trace_s", "lower_s", "compile_s", "total_s", "process_s")
EXCLUDED = (
    "exchanges between ranks (looped back); from compilation: imports, start of the device (both "
    "in process_s), what the runtime does at a program's first call (in first_step_s); from "
    "dispatch: waiting for results, making the inputs, looking at tokens"
)
NOTE = (
    "weights and caches are stacks over the layers, so a call hands over as many buffers at any "
    "depth; how many launches of kernels it holds is the runtime's affair (--layers 8,93 compares "
    "two depths). On a CPU a call may hold the step itself"
)


def programs(o: StartupOptions) -> dict[str, SliceOptions]:
    """The program of every depth and batch by its name, `moeN.rowsB`; N layers with experts.

    Raises:
        ValueError: listing everything that is out of range or does not suit the model.
    """
    config, problems, found = load_config(o.preset), option_problems(o), {}
    depths = (config.num_hidden_layers,) if o.layers is None else o.layers
    if o.context > config.max_position_embeddings:
        limit = f"expected at most {config.max_position_embeddings}, the model's"
        problems.append(f"--context {o.context}: {limit}")
    for layers in depths:
        try:
            cut = slice_model.with_moe_layers(config, layers)
        except ConfigError as error:
            problems.append(str(error))
            continue
        for rows in o.rows:
            name = f"moe{cut.num_moe_layers}.rows{rows}"
            if name in found and len(set(depths)) == len(depths):
                problems.append(f"--layers {depths}: two of them are equally deep")
            found[name] = o.slice_options((rows,), (layers,))
    try:
        run = run_for(cases((1,), 0), 1, 1, o.kv_dtype, o.backend)
        require_ranks(config, run, o.tp, called=lambda name: f"--{name}")
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ValueError(listed("startup", dict.fromkeys(problems), see_help("startup")))
    return found


def start(what: str, o: SliceOptions, cache: Path, *, shapes_only: bool) -> dict[str, Any]:
    """What a new process found (`bench.startup_process`); `process_s` is how long it took.

    Raises:
        ValueError: it refused what was asked, or failed; says why.
    """
    job = {"what": what, "shapes_only": shapes_only, "options": asdict(o)}
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # small presets compile in less
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        # -P: this code, whatever lies in the folder that the user is in
        command = [sys.executable, "-P", "-m", "bench.startup_process", json.dumps(job)]
        begin = time.perf_counter()
        done = subprocess.run([*command, str(file)], env=env, capture_output=True, text=True)
        took = time.perf_counter() - begin
        found = json.loads(file.read_text()) if file.exists() else {}
    if "refused" in found:
        raise ValueError(found["refused"])
    if done.returncode or not found:
        said = "\n".join(done.stderr.splitlines()[-20:])
        raise ValueError(
            f"startup: the process for {what} ended with status {done.returncode}, expected 0; "
            f"what it said last:\n{said}\nChange what it names, or ask for less (--layers, --rows)"
        )
    return found | {"process_s": took}


@contextmanager
def cache_folder(asked: Path | None) -> Iterator[Path]:
    """The folder asked for, or one that goes afterwards."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        yield asked.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="k3-startup-") as folder:
        yield Path(folder)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def measure(name: str, o: SliceOptions, repeats: int, dispatch: bool, kept: Path) -> dict[str, Any]:
    """What the processes of one program found: `cold`, `cached` (lists), `cache_bytes`, `calls`."""
    found: dict[str, Any] = {"cold": [], "cached": [], "cache_bytes": [], "calls": None}
    cache = kept
    for turn in range(repeats):
        cache = kept / f"{name}.{turn}"  # each program and repeat begins with nothing
        for state in ("cold", "cached"):
            note(f"startup: {name}, {state}: a new process traces, lowers and compiles")
            found[state].append(start("compile", o, cache, shapes_only=not dispatch))
            took = found[state][-1]
            note(f"startup: {name}, {state}: {took['total_s']:.1f} s")
            if state == "cold":
                found["cache_bytes"].append(folder_bytes(cache))
    if dispatch:
        note(f"startup: {name}: a new process makes weights and calls the step")
        found["calls"] = start("dispatch", o, cache, shapes_only=False)
    return found


def figures_of(name: str, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All figures of one program."""
    out = {}
    for state in ("cold", "cached"):
        for part in PARTS:
            samples = [each[part] for each in found[state]]
            out[f"{part}.{state}.{name}"] = median_figure(samples, "s")
    out[f"cache_bytes.{name}"] = figure(found["cache_bytes"][-1], "bytes")
    for way in ("buffers_in", "buffers_out"):
        out[f"{way}.{name}"] = figure(found["cold"][0][way], "count")
    if found["calls"] is None:
        return out
    out[f"first_step_s.cached.{name}"] = figure(found["calls"]["first_step_s"], "s")
    for kind, calls in found["calls"]["kinds"].items():
        each = [s * 1e6 for s in calls["dispatch"]]
        deciles = statistics.quantiles(each, n=10)
        out[f"dispatch_us.{kind}.{name}"] = median_figure(each, "us")
        given = [s * 1e6 for s in calls["handover"]]
        out[f"handover_us.{kind}.{name}"] = median_figure(given, "us")
        out[f"dispatch_p10_us.{kind}.{name}"] = figure(deciles[0], "us")
        out[f"dispatch_p90_us.{kind}.{name}"] = figure(deciles[-1], "us")
        out[f"step_us.{kind}.{name}"] = median_figure([s * 1e6 for s in calls["step"]], "us")
    out[f"busy.{name}"] = figure(
        statistics.fmean(found["calls"]["kinds"]["chained"]["busy"]), "share"
    )
    return out


def parity_of(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The layers' verdicts where steps ran, and whether each cache was as empty or full as said."""
    comparisons: list[dict[str, Any]] = []
    finite, ran = True, False
    for name, found in measured.items():
        for state, hits in (("cold", 0), ("cached", 1)):
            for each in found[state]:
                what = f"{name}.{state}.cache_hits"
                passed = each["hits"] == hits
                comparisons.append(
                    {"what": what, "found": each["hits"], "limit": hits, "passed": passed}
                )
        if found["calls"] is not None:
            ran, finite = True, finite and found["calls"]["finite"]
            hits = found["calls"]["hits"]  # of the process whose first step is called cached
            one = {"what": f"{name}.calls.cache_hits", "found": hits, "limit": 1}
            comparisons.append(one | {"passed": hits == 1})
            for one in found["calls"]["parity"]["comparisons"]:
                comparisons.append(one | {"what": f"{name}.{one['what']}"})
    failed = not finite or not all(c["passed"] for c in comparisons)
    verdict = {"verdict": "failed" if failed else "passed" if ran else "none"}
    if not ran:
        return verdict | {"why": "nothing was computed (--no-dispatch)", "comparisons": comparisons}
    return verdict | {
        "against": "hits of the cache that each compilation must have; layers as in rank-slice",
        "logits_finite_in_every_sample": finite,
        "comparisons": comparisons,
    }


def conditions_of(
    o: StartupOptions, measured: dict[str, dict[str, Any]], figures: dict[str, Any]
) -> dict[str, Any]:
    """Conditions of the result; the machine's are those that the last process saw."""
    last = list(measured.values())[-1]
    source = last["cached"][-1] if last["calls"] is None else last["calls"]
    calls = {name: found["calls"] for name, found in measured.items() if found["calls"]}
    return source["machine"] | {
        "host": source["host"],
        "what": "one rank's step: compilation, and the host's part of a call",
        "seed": o.seed,
        "shapes": {
            "preset": o.preset, "tp": o.tp, "context": o.context, "kv_dtype": o.kv_dtype,
            "page_size": o.page_size, "programs": list(measured),
        },
        "acceptance": "none",
        "backend": o.backend,
        "excluded": EXCLUDED,
        "execution": f"a new process for every compilation, {o.repeats} with an empty cache and as "
        "many with what it left; one more for the calls: in place, alone and in rows of "
        f"{IN_FLIGHT} in turns, after 3 rounds of warm-up; Python's garbage collector as it is",
        "dispatch": NOTE if o.dispatch else "not measured",
        "layers": {name: found["cold"][0]["layers"] for name, found in measured.items()},
        "cache_events": {
            name: {
                state: [{k: each[k] for k in ("hits", "misses")} for each in found[state]]
                for state in ("cold", "cached")
            }
            | {"first_step": found["calls"] and {k: found["calls"][k] for k in ("hits", "misses")}}
            for name, found in measured.items()
        },
        "weights": {name: f"random, made in {c['weights_s']:.1f} s" for name, c in calls.items()},
        "memory": {
            "fraction": o.memory_fraction,
            "peak_bytes": {name: c["peak_bytes"] for name, c in calls.items()},
        },
        "options": asdict(o) | {"compile_cache": o.compile_cache and str(o.compile_cache)},
        "noisy": noisy_names(figures),
    }  # fmt: skip


def run_startup(o: StartupOptions, argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; the result document. This process uses no device.

    Raises:
        ValueError: options, sizes, memory or backend that cannot run; says why.
    """
    found, measured = programs(o), {}
    with cache_folder(o.compile_cache) as kept:
        for name, one in found.items():
            measured[name] = measure(name, one, o.repeats, o.dispatch, kept)
    figures: dict[str, Any] = {}
    for name, each in measured.items():
        figures |= figures_of(name, each)
    return {
        "schema": SCHEMA,
        "command": command_line(argv),
        "conditions": conditions_of(o, measured, figures),
        "figures": figures,
        "parity": parity_of(measured),
    }


def headline_names(result: dict[str, Any]) -> list[str]:
    """The figures that the command is about."""
    return [n for n in result["figures"] if n.startswith(("total_s.", "dispatch_us."))]

"""`python -m bench rank-slice`: one rank's decode step at the real shapes on one device.

COMPUTE ONLY: exchanges between ranks are looped back, so the times hold neither communication nor
waiting for other ranks. Weights are random and distinct in every layer; tokens are random and other
ones in every step; the context stays as long as it is said to be.

    us_per_step.moeN.CASE   median time of a step of the dense and N layers with experts, all steps
                            of a sample in one program (`dispatched`: one call per step, the end of
                            the last one waited for)
    us_per_layer.CASE       difference of two such depths over the difference of N
    ms_per_step.CASE        a step of the whole model
    distinct_experts.CASE   mean over the layers, from the router, in a run outside the timing
    floor_us_per_layer.CASE bytes of a mean layer (3 KDA : 1 MLA, the distinct experts above) over
                            the device's fixed bandwidth
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import jax
import numpy as np

from bench import slice_model, slice_parity, timing
from bench.machine import command_line, describe_machine, with_clocks_now
from bench.rank_slice_options import SliceOptions, require_options
from bench.rank_slice_report import conditions_of, figures_of
from bench.result import SCHEMA
from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import Backend, choose_backend
from jax_impl.binding import bind, is_bound
from jax_impl.cache import Cache
from jax_impl.collectives import Ranks
from jax_impl.compiling import compile_all
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.loader import free_device_bytes
from jax_impl.memory import require_room
from jax_impl.params import Weights, abstract_weights
from jax_impl.progress import count_bar, note
from jax_impl.random_step import (
    Case,
    cases,
    load_config,
    make_inputs,
    random_cache,
    random_stream,
    run_for,
)
from jax_impl.random_weights import random_weights
from jax_impl.sharding import Placement, require_ranks
from jax_impl.static import Static

COUNTED = 20  # layers in which distinct experts are counted, so that no deep program is needed


@dataclass(frozen=True)
class Setting:
    """Everything that is fixed in a run.

    `depths` is by number of layers with experts, shallow first; weights and cache are those of the
    deepest model and serve all depths.
    """

    options: SliceOptions
    config: ModelConfig
    depths: dict[int, Static]
    cases: list[Case]
    backend: Backend
    method: Acceptance
    placement: Placement

    @property
    def static(self) -> Static:
        """Of the deepest model."""
        return list(self.depths.values())[-1]

    @property
    def routed(self) -> Static:
        """Of the shallowest, whose layers' experts are counted; at most `COUNTED` of them."""
        found = next(iter(self.depths.values()))
        if found.config.num_moe_layers <= COUNTED:
            return found
        return replace(found, config=slice_model.with_moe_layers(self.config, COUNTED))


def prepare(o: SliceOptions, *, shapes_only: bool = False) -> Setting:
    """Check everything that can be checked before memory is taken.

    Args:
        o: what to run.
        shapes_only: nothing will be allocated, so that no memory is asked for.

    Raises:
        ValueError: options, sizes or backend that cannot run; says why.
        DoesNotFitError: more memory than there is.
    """
    require_options(o)
    config = load_config(o.preset)
    if o.context > config.max_position_embeddings:
        raise ConfigError(
            f"--context {o.context}: expected at most {config.max_position_embeddings}, the "
            "model's; ask for less"
        )
    configs = [slice_model.with_moe_layers(config, n) for n in o.layers]
    by_depth = {c.num_moe_layers: c for c in sorted(configs, key=lambda c: c.num_moe_layers)}
    if len(by_depth) != len(configs):
        raise ConfigError(
            f"--layers {o.layers}: two of them are equally deep, expected different depths; "
            "change one"
        )
    found = cases(o.rows, o.drafts)
    run = run_for(found, o.context, o.page_size, o.kv_dtype, o.backend)
    placement = Placement(Ranks(o.tp))
    for c in by_depth.values():
        require_ranks(c, run, o.tp)
    deepest = list(by_depth.values())[-1]
    free = None if shapes_only else free_device_bytes()
    if free is not None:
        require_room(deepest, free, run, o.tp)
    method = Acceptance(rule="synthetic", length=o.length) if o.drafts else Acceptance()
    depths = {n: Static(c, run, placement.ranks) for n, c in by_depth.items()}
    return Setting(o, config, depths, found, choose_backend(run, deepest, o.tp), method, placement)


@contextmanager
def stage(text: str, took: dict[str, float]) -> Iterator[None]:
    """Note what is done and how long it took, in seconds."""
    note(f"rank-slice: {text}")
    begin = time.perf_counter()
    yield
    took[text] = round(time.perf_counter() - begin, 2)


class Programs:
    """The compiled programs of one case."""

    def __init__(self, setting: Setting, case: Case) -> None:
        """Make what is to be compiled; nothing is yet."""
        o = setting.options
        self.case = case
        self.inputs, self.tokens = make_inputs(
            setting.config, setting.static.run, case, o.context, o.steps, o.seed
        )
        self.each = [replace(self.inputs, tokens=t) for t in self.tokens]
        self.stream = random_stream(setting.static, case, o.seed)
        self.compiled: dict[Any, Any] = {}

    def jobs(
        self, setting: Setting, weights: Weights, cache: Cache
    ) -> list[tuple[Any, Callable[[], Any]]]:
        """(key, lower) of every program."""
        backend, case, method = setting.backend, self.case, setting.method
        found: list[tuple[Any, Any, tuple[Any, ...]]] = []
        args = (weights, cache, self.inputs)
        for n, static in setting.depths.items():
            one = slice_model.one_step(static, backend, case, method)
            found.append(((n, "loop"), slice_model.captured_loop(one), (*args, self.tokens)))
            if setting.options.dispatched:
                step = slice_model.dispatched_step(static, backend, case, method)
                found.append(((n, "dispatched"), step, args))
        found.append(("ids", slice_model.chosen_experts(setting.routed, case), args))
        for kind, layer in slice_parity.checked_layers(setting.static).items():
            check = slice_parity.layer_check(setting.static, backend, layer)
            found.append((("check", kind), check, (*args, *self.stream)))
        return [(key, lambda f=f, a=a: f.lower(*a)) for key, f, a in found]


def compile_programs(
    setting: Setting, programs: list[Programs], weights: Weights, cache: Cache
) -> None:
    """Compile everything that the cases need."""
    jobs = [
        ((i, key), lower)
        for i, p in enumerate(programs)
        for key, lower in p.jobs(setting, weights, cache)
    ]
    for (i, key), compiled in compile_all(jobs, setting.options.compile_workers).items():
        programs[i].compiled[key] = compiled


def temporaries(programs: list[Programs]) -> dict[str, int]:
    """Bytes that each timed program needs beside weights, cache and inputs; copies would show."""
    return {
        f"{p.case.name}.moe{key[0]}.{key[1]}": int(run.memory_analysis().temp_size_in_bytes)
        for p in programs
        for key, run in p.compiled.items()
        if key[1] in ("loop", "dispatched")
    }


class Runner:
    """Calls programs on the one cache, which every step donates and gives back."""

    def __init__(self, weights: Weights, cache: Cache) -> None:
        self.weights, self.cache, self.finite = weights, cache, True

    def loop(self, programs: Programs, depth: int) -> Any:
        """All steps of a sample in one program."""
        run = programs.compiled[depth, "loop"]
        self.cache, finite, tokens = run(self.weights, self.cache, programs.inputs, programs.tokens)
        return finite, tokens

    def dispatched(self, programs: Programs, depth: int) -> Any:
        """One call per step."""
        run, outputs = programs.compiled[depth, "dispatched"], None
        for inputs in programs.each:
            self.cache, outputs, *_ = run(self.weights, self.cache, inputs)
        return outputs.finite, outputs  # type: ignore[union-attr]

    def wait(self, found: Any) -> Any:
        """Wait for the end of a sample; notes whether its logits were finite."""
        jax.block_until_ready(found)
        self.finite &= bool(np.all(np.asarray(found[0])))
        return found

    def measure(self, setting: Setting, programs: Programs) -> dict[str, list[float]]:
        """Samples in us per step: `moeN` and `moeN_dispatched`."""
        calls = {}
        for n in setting.depths:
            calls[f"moe{n}"] = lambda n=n: self.loop(programs, n)
            if setting.options.dispatched:
                calls[f"moe{n}_dispatched"] = lambda n=n: self.dispatched(programs, n)
        o = setting.options
        return timing.alternate(
            calls, self.wait, steps=o.steps, repeats=o.repeats, warmups=o.warmups,
            budget_s=o.budget,
        )  # fmt: skip


def routing(setting: Setting, runner: Runner, programs: Programs) -> list[float]:
    """Mean distinct experts per layer, of up to four steps' tokens."""
    run = programs.compiled["ids"]
    found = [run(runner.weights, runner.cache, inputs) for inputs in programs.each[:4]]
    return [fmean(slice_model.distinct_counts(np.asarray(ids))) for ids in found]


def distances(programs: Programs, runner: Runner) -> dict[str, dict[str, float]]:
    """Distances of the checked layers from the reference, by case and layer kind."""
    return {
        f"{programs.case.name}.{key[1]}": {
            name: float(value)
            for name, value in run(
                runner.weights, runner.cache, programs.inputs, *programs.stream
            ).items()
        }
        for key, run in programs.compiled.items()
        if key[0] == "check"
    }


def run_rank_slice(o: SliceOptions, argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; the result document.

    Raises:
        ValueError: options, sizes, memory or backend that cannot run; says why.
    """
    if o.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(o.compile_cache))
    setting, took = prepare(o), {}
    note(f"rank-slice: memory fraction {o.memory_fraction:g}, free {free_device_bytes()} bytes")
    with stage("random weights and cache", took):
        config, run = setting.static.config, setting.static.run
        weights = random_weights(config, setting.placement, o.seed, run)
        cache = random_cache(config, run, setting.placement, o.seed)
        jax.block_until_ready((weights, cache))
    _require_layout(weights, config, run, o.tp)
    with stage("compilation", took):
        programs = [Programs(setting, case) for case in setting.cases]
        compile_programs(setting, programs, weights, cache)
    runner = Runner(weights, cache)
    with stage("routing and parity", took):
        distinct = {p.case.name: routing(setting, runner, p) for p in programs}
        apart = {k: v for p in programs for k, v in distances(p, runner).items()}
    machine = describe_machine()
    figures: dict[str, Any] = {}
    with stage("timing", took), count_bar("measuring", len(programs)) as progress:
        for done, p in enumerate(programs, start=1):
            samples = runner.measure(setting, p)
            figures |= figures_of(setting, p.case, samples, distinct[p.case.name])
            progress(done)
    machine = with_clocks_now(machine)
    parity = slice_parity.verdict(setting.static, apart)
    parity |= {"logits_finite_in_every_sample": runner.finite}
    if not runner.finite:
        parity["verdict"] = "failed"
    return {
        "schema": SCHEMA,
        "command": command_line(argv),
        "conditions": machine
        | {"temporaries_bytes": temporaries(programs)}
        | conditions_of(setting, figures, took),
        "figures": figures,
        "parity": parity,
    }


def weight_shapes(config: ModelConfig, run: RunConfig, tp: int) -> Weights:
    """Shapes and dtypes of one rank's weights as the step takes them; nothing allocated."""
    shapes = abstract_weights(config, tp)
    return jax.eval_shape(bind, shapes) if is_bound(run) else shapes


def _require_layout(weights: Weights, config: ModelConfig, run: RunConfig, tp: int) -> None:
    """What was made has the shapes and dtypes that the step is built for."""
    shapes = weight_shapes(config, run, tp)
    want = jax.tree.map(lambda a: (a.shape, str(a.dtype)), shapes)
    have = jax.tree.map(lambda a: (a.shape, str(a.dtype)), weights)
    if want != have:
        raise ConfigError("random weights and the model's table of weights do not agree")

"""The new processes of `python -m bench startup`: each compiles one program, or calls it.

    python -m bench.startup_process JOB FILE

JOB is JSON: `what` is to be done ("compile" or "dispatch"), the `options` of a rank slice of one
depth and one batch, and whether `shapes_only` are needed, now and by the processes that follow.
What was found is written to FILE. The compilation cache is the one that the environment names.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import slice_parity
from bench.machine import describe_machine, with_clocks_now
from bench.rank_slice import Setting, prepare, weight_shapes
from bench.rank_slice_options import SliceOptions
from bench.rank_slice_report import how_layers_run
from bench.startup_options import IN_FLIGHT
from bench.timing import Clock
from jax_impl.cache import StepInputs, cache_shapes
from jax_impl.output import BAD_INPUT, write_json
from jax_impl.params import Weights
from jax_impl.random_step import make_inputs, random_cache, random_stream
from jax_impl.random_weights import random_weights
from jax_impl.step import Turn, build_step_in_place, first_turn, with_inputs

WARMUPS = 3  # rounds of calls that are not counted
CACHE_EVENT = "/jax/compilation_cache/cache_"

_copied = jax.jit(jnp.copy)  # jnp.copy itself takes the host twice as long


@contextmanager
def cache_events() -> Iterator[Counter[str]]:
    """Counts `hits` and `misses` of the compilation cache."""
    found: Counter[str] = Counter()
    counting = True

    def note(event: str, **_: Any) -> None:
        if counting and event.startswith(CACHE_EVENT):
            found[event.removeprefix(CACHE_EVENT)] += 1

    jax.monitoring.register_event_listener(note)
    try:
        yield found
    finally:
        counting = False  # a listener stays for good


def compile_step(setting: Setting) -> dict[str, Any]:
    """Trace, lower and compile the step from shapes alone; seconds of each.

    Also `hits` and `misses` of the compilation cache, and the arrays that go in and come out.
    """
    o, static, case = setting.options, setting.static, setting.cases[0]
    weights = weight_shapes(static.config, static.run, o.tp)
    cache = cache_shapes(static.config, static.run, static.ranks)
    inputs, _ = make_inputs(static.config, static.run, case, o.context, 1, o.seed)
    step: Any = build_step_in_place(static, setting.backend, "last")
    turn = jax.eval_shape(partial(first_turn, static), weights, cache, inputs)
    marks = [time.perf_counter()]
    traced = step.trace(weights, turn)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    with cache_events() as events:
        compiled = lowered.compile()
    marks.append(time.perf_counter())
    trace, lower, compilation = (b - a for a, b in pairwise(marks))
    return {
        "trace_s": trace, "lower_s": lower, "compile_s": compilation,
        "total_s": marks[-1] - marks[0],
        "hits": events["hits"], "misses": events["misses"],
        "buffers_in": compiled.in_tree.num_leaves,
        "buffers_out": compiled.out_tree.num_leaves,
        "layers": how_layers_run(static.config, setting.backend),
    }  # fmt: skip


@dataclass
class Calls:
    """Seconds of calls that enqueue a step.

    Attributes:
        dispatch: of each call, until it returned.
        handover: of what goes before: alone, inputs from the host to where they belong; chained,
            the copy of the tokens of the step before, for whoever reads them.
        step: of a step, until its results were there; of steps in a row the mean.
        busy: per call, whether the step before it was still running when it returned.
    """

    dispatch: list[float] = field(default_factory=list)
    handover: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)  # of steps in a row only


class Loop:
    """The decode loop around a step in place, whose turn is donated and replaced by every call."""

    def __init__(
        self, step: Any, weights: Weights, turn: Turn, inputs: StepInputs,
        clock: Clock = time.perf_counter,
        given: Callable[[Turn, StepInputs], Turn] = with_inputs,
        kept: Callable[[Any], Any] = _copied,
    ) -> None:  # fmt: skip
        self.step, self.weights, self.turn, self.clock = step, weights, turn, clock
        self.given, self.kept = given, kept
        self.on_host = jax.tree.map(np.asarray, inputs)
        # a row of steps ends where `inputs` stand
        self.first = replace(self.on_host, position=self.on_host.position - (IN_FLIGHT - 1))
        self.finite = True

    def give(self, inputs: StepInputs) -> float:
        """Seconds of bringing inputs on the host to where they belong."""
        begin = self.clock()
        self.turn = self.given(self.turn, inputs)
        return self.clock() - begin

    def enqueue(self) -> float:
        """Seconds of one call."""
        begin = self.clock()
        self.turn = self.step(self.weights, self.turn)
        return self.clock() - begin

    def wait(self) -> None:
        """Wait for the last step's results; notes whether its logits were finite."""
        jax.block_until_ready(self.turn)
        self.finite &= bool(np.all(np.asarray(self.turn.outputs.finite)))

    def alone(self, found: Calls) -> None:
        """One step of inputs that are on the host, nothing else on the device."""
        begin = self.clock()
        found.handover.append(self.give(self.on_host))
        found.dispatch.append(self.enqueue())
        self.wait()
        found.step.append(self.clock() - begin)

    def chained(self, found: Calls) -> None:
        """`IN_FLIGHT` steps, each of the tokens of the one before; all calls but the first."""
        begin = self.clock()
        self.give(self.first)
        self.enqueue()
        for _ in range(IN_FLIGHT - 1):
            called = self.clock()
            token = self.kept(self.turn.outputs.token)
            found.handover.append(self.clock() - called)
            found.dispatch.append(self.enqueue())
            found.busy.append(not token.is_ready())
        self.wait()
        found.step.append((self.clock() - begin) / IN_FLIGHT)


def measure(loop: Loop, calls: int, budget: float) -> dict[str, Calls]:
    """`alone` and `chained` in turns, in whole rounds behind `WARMUPS` that are not counted.

    Args:
        loop: whose steps.
        calls: of each kind, rounded up to whole rounds.
        budget: seconds for all of them; beyond it there are fewer, at least one round.
    """
    each = IN_FLIGHT - 1

    def one_round(found: dict[str, Calls]) -> float:
        begin = loop.clock()
        for _ in range(each):
            loop.alone(found["alone"])
        loop.chained(found["chained"])
        return loop.clock() - begin

    took = 0.0
    for _ in range(WARMUPS):
        took = one_round({"alone": Calls(), "chained": Calls()})
    rounds = -(-calls // each)
    if took * rounds > budget:
        rounds = max(1, int(budget / took))
    found = {"alone": Calls(), "chained": Calls()}
    for _ in range(rounds):
        one_round(found)
    return found


def dispatch_steps(setting: Setting) -> dict[str, Any]:
    """Call the step with random weights: the first call whole, then what calls take.

    Seconds by name, whether all logits were finite, and the distances of the parity verdict.
    """
    o, static, case = setting.options, setting.static, setting.cases[0]
    begin = time.perf_counter()
    weights = random_weights(static.config, setting.placement, o.seed, static.run)
    cache = random_cache(static.config, static.run, setting.placement, o.seed)
    inputs, _ = make_inputs(static.config, static.run, case, o.context, 1, o.seed)
    turn = first_turn(static, weights, cache, inputs)
    jax.block_until_ready((weights, turn, inputs))
    made = time.perf_counter()
    step = build_step_in_place(static, setting.backend, "last")
    loop = Loop(step, weights, turn, inputs)
    del cache, turn
    with cache_events() as events:
        loop.enqueue()
        loop.wait()
    first = time.perf_counter()
    found = measure(loop, o.repeats, o.budget)
    machine = with_clocks_now(describe_machine())
    stream = random_stream(static, case, o.seed)
    distances = {}
    for kind, layer in slice_parity.checked_layers(static).items():
        check = slice_parity.layer_check(static, setting.backend, layer)
        apart = check(loop.weights, loop.turn.cache, inputs, *stream)
        distances[kind] = {name: float(value) for name, value in apart.items()}
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "weights_s": made - begin, "first_step_s": first - made,
        "hits": events["hits"], "misses": events["misses"],
        "kinds": {kind: vars(calls) for kind, calls in found.items()},
        "finite": loop.finite, "parity": slice_parity.verdict(static, distances),
        "machine": machine, "peak_bytes": stats.get("peak_bytes_in_use"),
    }  # fmt: skip


def describe_host() -> dict[str, Any]:
    """Processor and CPUs: what the times of a host depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": names[0] if names else platform.machine(), "cpus": free}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """What `compile_step` or `dispatch_steps` finds, with the machine and its host.

    Raises:
        ValueError: sizes, memory or backend that cannot run; says why.
    """
    lists = {name: tuple(job["options"][name]) for name in ("rows", "layers")}
    setting = prepare(SliceOptions(**(job["options"] | lists)), shapes_only=job["shapes_only"])
    machine = describe_machine()  # starts the device, which is no part of what is timed
    work = {"compile": compile_step, "dispatch": dispatch_steps}[job["what"]]
    return {"machine": machine, "host": describe_host()} | work(setting)


def main(argv: list[str]) -> int:
    """Do a job; 0, or 2 where it was refused, with the reason in the file."""
    job, file = argv
    try:
        found = run_job(json.loads(job))
    except ValueError as error:
        write_json(file, {"refused": str(error)})
        return BAD_INPUT
    write_json(file, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

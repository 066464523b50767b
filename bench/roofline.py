"""`python -m bench roofline`: bytes of a decode step on one rank, and the time they take at least.

Arithmetic only; nothing runs on a device. Floor = bytes / the device's fixed read bandwidth
(`bench/devices.py`). It holds for one rank and leaves out exchanges, launches and dependences
between operations, so a real step is longer; it is printed beside measured times, not for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro

from bench.devices import DEVICES, Device
from bench.floor import KINDS, Work, kind_of, layer_bytes, mean_distinct, step_bytes
from bench.machine import code_version, command_line, versions
from bench.options import see_help
from bench.projection import assumption_rows, project, projection_rows
from bench.published import PUBLISHED, tokens_per_second
from bench.result import SCHEMA, figure
from jax_impl.config import RELEASED_CONFIG, ConfigError, ModelConfig
from jax_impl.memory import MemorySettings
from jax_impl.number_list import Numbers
from jax_impl.problems import listed
from jax_impl.weights import choose_ranks, indivisible, weight_table

MOE_PERIOD = ("kda", "kda", "kda", "mla")  # of the layers that repeat


Length = Annotated[float | None, tyro.conf.arg(name="accept-length")]


@dataclass(frozen=True)
class RooflineOptions:
    """What to compute floors for.

    Attributes:
        device: GPU whose bandwidth counts.
        tp: tensor-parallel ranks.
        rows: sequences in a step, one row each.
        drafts: with drafts K each sequence has 1 + K rows, a verification.
        context: tokens per sequence in the cache.
        kv_dtype: dtype of the latent cache.
        experts: width of every expert cut over the ranks, or whole experts per rank.
        dcp: ranks that share the latent cache.
        distinct: distinct experts of a layer; default: the mean under random routing.
        acceptance_length: with drafts: tokens per round, for tokens per second at the floor.
    """

    device: Literal["H100", "H200", "B200", "GB300"] = "GB300"
    tp: int = 16
    rows: Numbers = (1, 8, 64)
    drafts: int = 0
    context: int = 1024
    kv_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] = "float8_e4m3fn"
    experts: Literal["tp", "ep"] = "tp"
    dcp: int = 1
    distinct: float | None = None
    acceptance_length: Length = None


def roofline(
    config: ModelConfig, options: RooflineOptions, measured: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The result document; with a `measured` rank slice also the projection to all ranks.

    Raises:
        ConfigError: listing every option that does not fit the model.
        ResultError: nothing can be projected from `measured`.
    """
    _check(config, options)
    device = DEVICES[options.device]
    settings = MemorySettings(
        ranks=options.tp, kv_dtype=options.kv_dtype, experts=options.experts, dcp=options.dcp
    )
    figures: dict[str, dict[str, Any]] = {}

    def add(name: str, size: float) -> None:
        figures[f"bytes.{name}"] = figure(round(size), "bytes")
        figures[f"floor_us.{name}"] = figure(round(_us(size, device), 3), "us")

    for sequences in options.rows:
        work = Work(sequences, 1 + options.drafts, options.context, options.distinct)
        label = f"verify{work.rows}" if options.drafts else f"rows{sequences}"
        layers = layer_bytes(config, settings, work)
        for kind in KINDS:
            add(f"layer.{kind}.{label}", sum(layers[kind].values()))
        mean = sum(sum(layers[kind].values()) for kind in MOE_PERIOD) / len(MOE_PERIOD)
        add(f"layer.moe_mean.{label}", mean)
        whole = sum(step_bytes(config, settings, work).values())
        add(f"step.{label}", whole)
        found = mean_distinct(config, work.rows) if options.distinct is None else options.distinct
        figures[f"distinct_experts.{label}"] = figure(round(found, 1), "count")
        if options.acceptance_length is not None:
            rate = sequences * tokens_per_second(
                options.acceptance_length, _us(whole, device) / 1000
            )
            figures[f"tokens_per_s_at_floor.{label}"] = figure(round(rate, 1), "tokens/s")
    conditions = {
        "device": device.name,
        "device_table": asdict(device),
        "driver": "none",
        "versions": versions(),
        "code": code_version(),
        "clocks": "none",
        "seed": None,
        "shapes": asdict(options)
        | {
            "model": "released"
            if _is_released(config)
            else f"{config.num_hidden_layers} layers "
            f"of {config.hidden_size}, not the released model",
            "layers": {
                k: sum(kind_of(config, i) == k for i in range(config.num_hidden_layers))
                for k in KINDS
            },
        },
        "acceptance": _acceptance(options),
        "backend": "none",
        "excluded": "exchanges, launches, activations, the drafter's own weights and cache",
    }
    if measured is not None:
        length, asked = options.acceptance_length, _shapes_of_slice(config, options)
        more, assumptions = project(config, measured, device, length, asked)
        figures |= more
        conditions["projection"] = assumptions
    return {
        "schema": SCHEMA,
        "command": command_line(),
        "conditions": conditions,
        "figures": figures,
        "parity": {"verdict": "none", "why": "arithmetic: nothing was run"},
    }


def _is_released(config: ModelConfig) -> bool:
    return config == ModelConfig.load(RELEASED_CONFIG)


def _shapes_of_slice(config: ModelConfig, o: RooflineOptions) -> dict[str, Any]:
    """What a slice must have been measured with, so that its projection is for these options.

    Raises:
        ConfigError: the options are for another model than slices are of.
    """
    if not _is_released(config):
        raise ConfigError(
            "--project: found another model in --config, expected the released one, which slices "
            "are measured for; leave out one of the two"
        )
    names = ["tp", "context", "kv_dtype", "experts", "dcp", *(["drafts"] if o.drafts else [])]
    return {name: getattr(o, name) for name in names}


def _us(size: float, device: Device) -> float:
    return size / device.read_tb_s / 1e6


def _acceptance(options: RooflineOptions) -> str:
    if options.acceptance_length is None:
        return "none"
    return f"assumed length {options.acceptance_length:g}, as with synthetic acceptance"


def _check(config: ModelConfig, o: RooflineOptions) -> None:
    problems = []
    if o.tp < 1:
        problems.append(f"--tp {o.tp}: expected at least 1")
    else:
        problems += indivisible(config, weight_table(config), o.tp, o.experts)
    if not o.rows or min(o.rows) < 1:
        problems.append(f"--rows {o.rows}: expected numbers of at least 1")
    if o.dcp not in (1, o.tp):
        problems.append(f"--dcp {o.dcp}: expected 1 or the number of ranks, {o.tp}")
    if not 0 <= o.drafts <= 7:
        problems.append(f"--drafts {o.drafts}: expected 0 to 7")
    if not 0 <= o.context <= config.max_position_embeddings:
        problems.append(
            f"--context {o.context}: expected 0 to {config.max_position_embeddings}, the model's"
        )
    each = config.num_experts_per_token
    most = min(config.num_experts, each * (1 + o.drafts) * min(o.rows, default=1))
    if o.distinct is not None and not each <= o.distinct <= most:
        problems.append(
            f"--distinct {o.distinct}: expected {each}, which one row chooses, to {most}, which "
            "the fewest rows can"
        )
    length = o.acceptance_length
    if length is not None and not (o.drafts and 1 <= length <= o.drafts + 1):
        problems.append(
            f"--accept-length {length}: expected 1 to drafts + 1 = {o.drafts + 1}, with drafts"
        )
    if problems:
        do = see_help("roofline")
        if any("divide" in p for p in problems):
            do += "\n" + choose_ranks(config, weight_table(config), o.experts)
        raise ConfigError(listed("roofline", problems, do))


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[Sequence[str]]]]:
    """(title, columns, rows) to print: floors, and what others published."""
    figures, device = result["figures"], result["conditions"]["device_table"]
    rows: list[Sequence[str]] = []
    for name, found in figures.items():
        if not name.startswith("bytes."):
            continue
        what = name.removeprefix("bytes.")
        floor = figures[f"floor_us.{what}"]["value"]
        rows.append((what, f"{found['value'] / 1e6:,.2f}", f"{floor:,.1f}"))
    rows += [
        (n, f"{f['value']:,g}", "")
        for n, f in figures.items()
        if n.startswith(("distinct", "tokens"))
    ]
    title = (
        f"one rank of {result['conditions']['shapes']['tp']}, {device['name']}: bytes, and floor "
        f"at {device['read_tb_s']} TB/s ({device['basis']})"
    )
    published = [
        (p.what, f"{p.specialised:g}", f"{p.stock:g}", p.unit, p.conditions) for p in PUBLISHED
    ]
    found = [(title, ["", "MB", "floor us"], rows)]
    if "projection" in result["conditions"]:
        about = (
            "PROJECTION from one rank's compute and a model of exchanges, not a measurement "
            f"(backend {result['conditions']['projection']['backend']})"
        )
        projection = result["conditions"]["projection"]
        columns = ["", "exchanges ms", "step ms", "tokens/s", ""]
        found.append((about, columns, list(projection_rows(figures, projection))))
        found.append(("what the projection assumes", ["", ""], list(assumption_rows(projection))))
    return [
        *found,
        (
            "published elsewhere, not reproduced here",
            ["", "specialised", "stock", "unit", "conditions"],
            list(published),
        ),
    ]

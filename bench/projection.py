"""A step on all ranks from one rank's measured compute and a model of the exchanges: a PROJECTION.

    step = compute of one rank (measured, looped back) x bandwidth of the measured device over that
           of the target
         + sum over exchanges of min(one shot, two shots)

    one shot   latency + (R - 1) bytes / link      every rank sends its whole part to each other
    two shots  2 latency + 2 (R - 1) / R bytes / link      reduce-scatter, then all-gather
    gather     latency + (R - 1) / R bytes / link      bytes of the gathered whole

Nothing overlaps, no rank waits for a slower one, and compute scales with memory bandwidth alone:
assumptions, all of them printed. It is no measurement, and no figure of it is ours to claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.devices import DEVICES, Device, find
from bench.floor import kind_of
from bench.published import tokens_per_second
from bench.result import ResultError, all_noisy, figure
from jax_impl.config import ModelConfig
from jax_impl.problems import listed

# 1e9 bytes per second that one GPU sends over NVLink, as the maker states it
LINK_GB_S = {"H100": 450.0, "H200": 450.0, "B200": 900.0, "GB300": 900.0}


NOISY_SOURCE = "NOISY source"
# how every slice is cut, whose files do not say so
SLICE_CUT = {"experts": "tp", "dcp": 1}


@dataclass(frozen=True)
class Exchange:
    """How an exchange is made.

    Attributes:
        name: of the variant.
        latency_us: of one exchange of few bytes.
        basis: where the latency comes from.
    """

    name: str
    latency_us: float
    basis: str


EXCHANGES = (
    Exchange(
        "in_kernel", 1.9,
        "all-reduce of 14 to 112 KiB inside a running kernel, two H200 over NVLink: 1.5 to 1.9 us; "
        "16 ranks assumed alike",
    ),
    Exchange(
        "nccl", 12.2,
        "one psum of 14 KiB inside a captured program, two H200 over NVLink, NCCL without "
        "multicast: 12.2 us; 16 ranks assumed alike",
    ),
)  # fmt: skip


def exchanges(config: ModelConfig, rows: int) -> list[tuple[str, int]]:
    """(`reduce` or `gather`, bytes of the whole) of every exchange of a step, in the step's order.

    Sums travel as f32 partial results and are rounded once.
    """
    d, z, e = config.hidden_size, config.routed_expert_hidden_size, config.num_experts
    attention = ("reduce", rows * d * 4)
    mixture = [
        ("gather", rows * (e * 4 + z * 2)),  # router logits and latent in one
        ("reduce", rows * (z + d) * 4),  # routed and shared sums in one
        ("gather", rows * d * 2),
    ]
    found = [("reduce", rows * d * 2)]  # embedding
    for layer in range(config.num_hidden_layers):
        dense = kind_of(config, layer) == "dense"
        found += [attention, *([("reduce", rows * d * 4)] if dense else mixture)]
    return [*found, *[("reduce", rows * 4)] * 3]  # largest logit, its id, finiteness


def exchange_us(kind: str, size: int, ranks: int, how: Exchange, link_gb_s: float) -> float:
    """Time of one exchange by the model above."""
    link = link_gb_s * 1e3  # bytes per us
    if kind == "gather":
        return how.latency_us + (ranks - 1) / ranks * size / link
    one = how.latency_us + (ranks - 1) * size / link
    two = 2 * how.latency_us + 2 * (ranks - 1) / ranks * size / link
    return min(one, two)


def compute_ms(result: dict[str, Any], case: str, layers: int) -> tuple[float, str]:
    """One rank's compute of the whole model, and how it comes from the result.

    Raises:
        ResultError: the result has neither the whole step nor two depths.
    """
    figures = result["figures"]
    if (whole := f"ms_per_step.{case}") in figures:
        return figures[whole]["value"], "whole step measured" + _noise(result, whole)
    layer = figures.get(f"us_per_layer.{case}")
    depths = [n for n in figures if n.startswith("us_per_step.moe") and n.endswith(f".{case}")]
    if layer is None or not depths:
        raise ResultError(
            f"found no time of a step or a layer for {case}, expected a rank slice of it; measure "
            "two depths with --layers"
        )
    name = min(depths, key=lambda n: figures[n]["value"])
    shallow = int(name.removeprefix("us_per_step.moe").split(".")[0])
    rest = figures[name]["value"] - shallow * layer["value"]
    text = f"{layers} layers with experts of {layer['value']:.1f} us, and the rest of {name}"
    text += _noise(result, name, f"us_per_layer.{case}")
    return (layers * layer["value"] + rest) / 1e3, text


def _noise(result: dict[str, Any], *names: str) -> str:
    """A remark about those of the figures that are noisy."""
    noisy = all_noisy(result)
    found = [n for n in names if n in noisy]
    return f"; {NOISY_SOURCE}: {', '.join(found)}" if found else ""


def project(
    config: ModelConfig,
    result: dict[str, Any],
    target: Device,
    acceptance_length: float | None,
    asked: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures, assumptions) of the step on all ranks, on the measured device and on `target`.

    Args:
        config: the released model.
        result: a measured rank slice.
        target: GPU to project to.
        acceptance_length: tokens per round of a verification.
        asked: shapes that the slice must have been measured with, by option.

    Raises:
        ResultError: not a rank slice at the released sizes and `asked` shapes on a known GPU, or
            parity not passed.
    """
    shapes, kind = result["conditions"]["shapes"], result["conditions"]["device"]
    measured = find(kind)
    problems = []
    if not isinstance(shapes, dict) or shapes.get("preset") != "k3" or "cases" not in shapes:
        problems.append(
            f"shapes: found {str(shapes)[:60]}, expected a rank slice of the released model"
        )
    else:
        shapes = SLICE_CUT | shapes
        problems += [
            f"{name}: measured with {shapes.get(name)}, expected --{name.replace('_', '-')} {want}"
            for name, want in asked.items()
            if shapes.get(name) != want
        ]
    if measured is None:
        problems.append(f"device {kind}: expected one of {', '.join(DEVICES)}")
    if result["parity"]["verdict"] != "passed":
        problems.append(f"parity: {result['parity']['verdict']}, expected a passed run")
    if problems or measured is None:
        do = (
            "Give a result of `python -m bench rank-slice` at the released sizes, and the options "
            "that it was measured with."
        )
        raise ResultError(listed("no projection from this result", problems, do))
    figures: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for case, rows in shapes["cases"].items():
        number = rows["sequences"] * rows["rows_each"]
        own, notes[case] = compute_ms(result, case, config.num_moe_layers)
        for device in dict.fromkeys((measured, target)):
            scaled = own * measured.read_tb_s / device.read_tb_s
            for how in EXCHANGES:
                label = f"{case}.{how.name}.{device.name}"
                link = LINK_GB_S[device.name]
                wire = sum(
                    exchange_us(k, size, shapes["tp"], how, link)
                    for k, size in exchanges(config, number)
                )
                step = scaled + wire / 1e3
                figures[f"projected.exchange_ms.{label}"] = figure(wire / 1e3, "ms")
                figures[f"projected.step_ms.{label}"] = figure(step, "ms")
                drafts = rows["rows_each"] > 1
                if not drafts or acceptance_length is not None:
                    each = acceptance_length if drafts and acceptance_length else 1.0
                    rate = rows["sequences"] * tokens_per_second(each, step)
                    figures[f"projected.tokens_s.{label}"] = figure(rate, "tokens/s")
    return figures, {
        "kind": "projection from one rank's compute and a model of exchanges; not a measurement",
        "source": result["command"],
        "backend": result["conditions"]["backend"],
        "measured_on": asdict(measured),
        "compute": notes,
        "scaling": "compute scales with the fixed read bandwidth of the devices, and with nothing "
        "else",
        "exchanges_per_step": len(exchanges(config, 1)),
        "exchange_variants": [asdict(how) for how in EXCHANGES],
        "link_gb_s": {d.name: LINK_GB_S[d.name] for d in (measured, target)},
        "tokens_per_round": "1 per sequence; of a verification "
        + ("not given" if acceptance_length is None else f"{acceptance_length:g}, assumed"),
        "left_out": "overlap of exchanges with compute, waiting for slower ranks, the drafter "
        "(verifications are without it), the host",
    }


def projection_rows(
    figures: dict[str, Any], about: dict[str, Any]
) -> list[tuple[str, str, str, str, str]]:
    """(case, variant and device; exchanges ms; step ms; tokens/s; remark) to print."""
    rows = []
    for name, found in figures.items():
        if not name.startswith("projected.step_ms."):
            continue
        label = name.removeprefix("projected.step_ms.")
        wire = figures[f"projected.exchange_ms.{label}"]["value"]
        rate = figures.get(f"projected.tokens_s.{label}")
        shown = "" if rate is None else f"{rate['value']:,.0f}"
        remark = NOISY_SOURCE if NOISY_SOURCE in about["compute"][label.split(".")[0]] else ""
        rows.append((label, f"{wire:.2f}", f"{found['value']:.2f}", shown, remark))
    return rows


def assumption_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    """(assumption, in words) to print."""
    links = ", ".join(f"{name} {rate:g} GB/s" for name, rate in about["link_gb_s"].items())
    return [
        ("measured by", about["source"]),
        *((f"compute, {case}", text) for case, text in about["compute"].items()),
        ("scaling", about["scaling"]),
        *(
            (f"exchange, {how['name']}", f"{how['latency_us']:g} us latency; {how['basis']}")
            for how in about["exchange_variants"]
        ),
        ("exchanges per step", str(about["exchanges_per_step"])),
        ("link, one way", links),
        ("tokens per round", about["tokens_per_round"]),
        ("left out", about["left_out"]),
    ]

"""The projection of a step on all ranks: its arithmetic, and what it refuses."""

import json

import pytest

from bench.__main__ import main
from bench.devices import DEVICES
from bench.projection import (
    EXCHANGES,
    compute_ms,
    exchange_us,
    exchanges,
    project,
    projection_rows,
)
from bench.result import CONDITIONS, ResultError, figure, write
from jax_impl.config import RELEASED_CONFIG, ModelConfig
from jax_impl.tiny_presets import PRESETS, text_config


@pytest.fixture(scope="module")
def k3():
    return ModelConfig.load(RELEASED_CONFIG)


ASKED = {"tp": 16, "context": 1024, "kv_dtype": "float8_e4m3fn", "experts": "tp", "dcp": 1}


def made(**changed):
    shapes = {
        "preset": "k3", "tp": 16, "context": 1024, "kv_dtype": "float8_e4m3fn", "drafts": 7,
        "cases": {
            "rows8": {"sequences": 8, "rows_each": 1},
            "verify8": {"sequences": 1, "rows_each": 8},
        },
    }  # fmt: skip
    figures = {
        f"{name}.{case}": figure(value, "us")
        for case in ("rows8", "verify8")
        for name, value in (
            ("us_per_layer", 100.0), ("us_per_step.moe8", 1100.0), ("us_per_step.moe20", 2300.0),
        )
    }  # fmt: skip
    given = {
        "device": "NVIDIA H200",
        "shapes": shapes,
        "backend": "auto",
        "versions": {},
        "noisy": [],
    }
    return {
        "schema": "k3-bench-1",
        "command": "python -m bench rank-slice",
        "conditions": dict.fromkeys(CONDITIONS, "none") | given,
        "figures": figures,
        "parity": {"verdict": "passed"},
    } | changed


def test_a_whole_step_from_two_depths():
    # 300 us besides the layers with experts, and 92 of 100 us
    assert compute_ms(made(), "rows8", 92)[0] == pytest.approx(9.5)
    whole = made()
    whole["figures"]["ms_per_step.rows8"] = figure(9.0, "ms")
    assert compute_ms(whole, "rows8", 92) == (9.0, "whole step measured")
    with pytest.raises(ResultError, match="rows9"):
        compute_ms(made(), "rows9", 92)


def test_a_noisy_source_is_named():
    noisy = made()
    noisy["figures"]["us_per_layer.rows8"]["samples"] = [90.0, 90.0, 110.0, 110.0]
    assert "NOISY source: us_per_layer.rows8" in compute_ms(noisy, "rows8", 92)[1]
    assert "NOISY" not in compute_ms(noisy, "verify8", 92)[1]
    about = {"compute": {"rows8": compute_ms(noisy, "rows8", 92)[1]}}
    shown = {
        f"projected.{name}.rows8.nccl.H200": figure(1.0, "ms")
        for name in ("step_ms", "exchange_ms")
    }
    assert projection_rows(shown, about)[0][4] == "NOISY source"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp": 8}, "tp: measured with 16, expected --tp 8"),
        ({"context": 131072}, "context: measured with 1024, expected --context 131072"),
        ({"kv_dtype": "bfloat16"}, "expected --kv-dtype bfloat16"),
        ({"experts": "ep"}, "experts: measured with tp, expected --experts ep"),
        ({"dcp": 16}, "dcp: measured with 1, expected --dcp 16"),
    ],
)
def test_a_slice_of_other_shapes_is_refused(k3, asked, message):
    with pytest.raises(ResultError, match=message):
        project(k3, made(), DEVICES["GB300"], None, ASKED | asked)


def test_exchanges_of_a_step(k3):
    found = exchanges(k3, 1)
    assert len(found) == 1 + 2 + 92 * 4 + 3
    assert found[0] == ("reduce", 14336)
    assert found[3:7] == [
        ("reduce", 28672), ("gather", 896 * 4 + 3584 * 2), ("reduce", 43008), ("gather", 14336),
    ]  # fmt: skip


def test_time_of_an_exchange():
    kernel = EXCHANGES[0]
    assert exchange_us("reduce", 0, 16, kernel, 450.0) == kernel.latency_us
    # large: two shots move 2 x 15/16 of the bytes, one shot 15 times them
    large = 450_000 * 1000
    assert exchange_us("reduce", large, 16, kernel, 450.0) == pytest.approx(
        2 * kernel.latency_us + 1875
    )
    assert exchange_us("gather", large, 16, kernel, 450.0) == pytest.approx(
        kernel.latency_us + 937.5
    )


def test_the_step_is_compute_and_exchanges(k3):
    figures, about = project(k3, made(), DEVICES["GB300"], 6.0, ASKED)
    own = figures["projected.step_ms.rows8.in_kernel.H200"]["value"]
    wire = figures["projected.exchange_ms.rows8.in_kernel.H200"]["value"]
    assert own == pytest.approx(9.5 + wire, rel=1e-5)
    there = figures["projected.step_ms.rows8.in_kernel.GB300"]["value"]
    gone = figures["projected.exchange_ms.rows8.in_kernel.GB300"]["value"]
    assert there - gone == pytest.approx(9.5 * 4.55 / 7.58, rel=1e-4)
    assert figures["projected.step_ms.rows8.nccl.H200"]["value"] > own
    verify = figures["projected.step_ms.verify8.in_kernel.GB300"]["value"]
    rate = figures["projected.tokens_s.verify8.in_kernel.GB300"]["value"]
    assert rate == pytest.approx(6 / verify * 1000, rel=1e-4)
    assert "not a measurement" in about["kind"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parity": {"verdict": "failed"}}, "expected a passed run"),
        ({"conditions": made()["conditions"] | {"device": "cpu"}}, "device cpu"),
        ({"conditions": made()["conditions"] | {"shapes": {"preset": "tiny"}}}, "released model"),
    ],
)
def test_what_cannot_be_projected_from_is_refused(k3, changed, message):
    with pytest.raises(ResultError, match=message):
        project(k3, made(**changed), DEVICES["GB300"], None, ASKED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--drafts 3 --accept-length 4", "drafts: measured with 7, expected --drafts 3"),
        ("--experts ep --dcp 16", "experts: measured with tp, expected --experts ep"),
        ("--config {other}", "found another model in --config"),
    ],
)
def test_options_that_the_slice_is_not_for_are_refused(tmp_path, capsys, options, message):
    source, other = tmp_path / "slice.json", tmp_path / "config.json"
    write(str(source), made())
    other.write_text(json.dumps(text_config(PRESETS["tp16"].target)))
    command = f"roofline --rows 1 --project {source} {options.format(other=other)}"
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err


def test_the_command_labels_projection_and_published(tmp_path, capsys):
    source, out = tmp_path / "slice.json", tmp_path / "roofline.json"
    write(str(source), made())
    assert main(["roofline", "--rows", "8", "--project", str(source), "--json", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "PROJECTION from one rank's compute" in printed
    for part in (
        "what the projection assumes", "compute scales with the fixed read bandwidth",
        "1.9 us latency; all-reduce", "12.2 us latency; one psum", "H200 450 GB/s, GB300 900 GB/s",
        "92 layers with experts of 100.0 us", "waiting for slower ranks", "374",
    ):  # fmt: skip
        assert part in printed, part
    assert "published elsewhere, not reproduced here" in printed
    found = json.loads(out.read_text())
    assert found["conditions"]["projection"]["exchanges_per_step"] == 374
    assert found["parity"]["verdict"] == "none"

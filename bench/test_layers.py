"""Activities of traces: what is counted, to which stage it belongs, and a small run."""

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from bench import layers, timeline
from bench.__main__ import main
from bench.activities import Activity, busy_us, leaves, record, stages_of
from bench.floor import Work, layer_bytes
from bench.layers import layer_figures, stage_bytes
from bench.layers_options import LayersOptions, require_layers
from bench.result import CONDITIONS, read
from bench.timeline import draw_timeline
from jax_impl.memory import MemorySettings
from jax_impl.random_step import load_config


def act(name, start, duration, stage=""):
    return Activity(name, name, start, duration, stage)


def test_overlapping_activities_are_busy_once():
    assert busy_us([act("a", 0, 10), act("b", 5, 10), act("c", 20, 1)]) == 16


def test_a_loop_counts_by_its_body():
    inside = [act("body", 1, 2), act("body", 4, 2)]
    assert leaves([act("while", 0, 10), *inside, act("next", 11, 1)]) == [
        *inside, act("next", 11, 1),
    ]  # fmt: skip


def test_instructions_know_their_stage():
    text = """
      %fusion.3 = bf16[8]{0} fusion(%a), metadata={op_type="x" op_name="jit(run)/stage_route/dot"}
      %dot.1 = f32[8]{0} dot(%a, %b), metadata={op_name="jit(run)/stage_kda_step/stage_kda/d"}
      %call.1 = f32[8]{0} custom-call(%a), metadata={op_name="jit(run)/jit(attn_out)/pallas"}
      %copy.1 = f32[8]{0} copy(%a), metadata={op_name="jit(run)/add"}
    """
    found = stages_of(text, ["route", "kda", "kda_step", "attn_out"])
    assert found == {"fusion.3": "route", "dot.1": "kda_step", "call.1": "attn_out"}


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_bytes_of_the_stages_are_those_of_the_layer(kind):
    config, settings = load_config("k3"), MemorySettings(ranks=16, kv_dtype="float8_e4m3fn")
    work = Work(8, 1, 1024, 119.0)
    found = stage_bytes(config, settings, work, kind)
    assert sum(found.values()) == pytest.approx(
        sum(layer_bytes(config, settings, work)[kind].values())
    )
    assert found["route"] == 2 * (56 + 224 + 768) * 7168 + 4 * 896
    assert found["moe_out"] == 2 * (3584 + 448 * 3584)
    assert found["experts"] == pytest.approx(119 * 3 * 192 * 3584 * 17 / 32 + 2 * 7168 * 384)
    assert min(found.values()) > 0


def test_figures_of_a_layer():
    calls = [[act("k3_experts", 0, 10.0 + i, "experts"), act("copy", 20, 5)] for i in range(3)]
    found = layer_figures("auto.kda", calls, {"experts": 44e6, "attention": 0.0}, 4.4)
    assert found["auto.kda.layer.busy_us"]["value"] == 16
    assert found["auto.kda.layer.span_us"]["value"] == 25
    assert found["auto.kda.experts.us"]["value"] == 11
    assert found["auto.kda.experts.gb_s"]["value"] == pytest.approx(4000)
    assert found["auto.kda.experts.floor_share"]["value"] == pytest.approx(10 / 11, rel=1e-4)
    assert found["auto.kda.no_stage.us"]["value"] == 5
    assert found["auto.kda.00_k3_experts.kernel_us"]["samples"] == [10, 11, 12]
    many = [[act("body", 2.0 * i, 1.0, "experts") for i in range(100)]]
    summed = layer_figures("auto.kda", many, {"experts": 1e6}, None)
    assert summed["auto.kda.100x_body.kernel_us"]["value"] == 100
    assert "auto.kda.layer.floor_us" not in summed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backends": "fast"}, "expected some of auto"),
        ({"rows": 65}, "1 to 64"),
        ({"repeats": 0}, "at least 1"),
        ({"picture": "x.svg"}, "ends in .png"),
    ],
)
def test_bad_conditions_name_the_limit(changed, message):
    from pathlib import Path

    if "picture" in changed:
        changed = {"picture": Path(changed["picture"])}
    with pytest.raises(ValueError, match=message):
        require_layers(replace(LayersOptions(), **changed))


def test_a_traced_call_is_read_with_its_stages(tmp_path):
    def run(x):
        with jax.named_scope("stage_route"):
            y = jnp.sin(x @ x)
        with jax.named_scope("stage_experts"):
            return jax.lax.fori_loop(0, 3, lambda _, z: jnp.cos(z @ x), y)

    x = jnp.ones((64, 64))
    compiled = jax.jit(run).lower(x).compile()
    where = stages_of(compiled.as_text(), ["route", "experts"])
    seen = leaves(record(lambda: compiled(x), tmp_path / "traces"))
    stages = [where.get(a.operation, "") for a in seen]
    assert {"route", "experts"} <= set(stages)
    assert stages.count("experts") >= 3  # one per turn of the loop
    assert busy_us(seen) > 0
    assert list((tmp_path / "traces").rglob("perfetto_trace.json.gz"))
    draw_timeline({"auto.kda": seen}, tmp_path / "pictures" / "t.png")
    assert (tmp_path / "pictures" / "t.png").read_bytes().startswith(b"\x89PNG")


def test_the_result_is_there_before_the_picture_is_drawn(tmp_path, monkeypatch, capsys):
    result = {
        "schema": "k3-bench-1", "command": "python -m bench layers",
        "conditions": dict.fromkeys(CONDITIONS, "none") | {"versions": {}, "noisy": []},
        "figures": {}, "parity": {"verdict": "passed"},
    }  # fmt: skip
    out = tmp_path / "l.json"

    def broken(*_):
        assert read(out) == result
        raise OSError("disk full")

    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the command changes both
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setattr(layers, "run_layers", lambda o: (result, {}))
    monkeypatch.setattr(timeline, "draw_timeline", broken)
    command = ["layers", "--picture", str(tmp_path / "l.png"), "--json", str(out)]
    assert main(command) == 2
    assert "disk full" in capsys.readouterr().err
    assert read(out) == result


def test_what_did_not_pass_is_not_drawn(tmp_path, monkeypatch):
    result = {
        "schema": "k3-bench-1", "command": "python -m bench layers",
        "conditions": dict.fromkeys(CONDITIONS, "none") | {"versions": {}, "noisy": []},
        "figures": {}, "parity": {"verdict": "failed"},
    }  # fmt: skip
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the command changes both
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setattr(layers, "run_layers", lambda o: (result, {"auto.kda": []}))
    assert main(["layers", "--picture", str(tmp_path / "l.png")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_small_run(tmp_path, quick_compile):
    out, picture, traces = tmp_path / "l.json", tmp_path / "l.png", tmp_path / "traces"
    command = "layers --preset tiny --tp 2 --rows 2 --context 64 --repeats 2"
    files = ["--json", str(out), "--picture", str(picture), "--perfetto", str(traces)]
    assert main([*command.split(), *files]) == 0
    found = read(out)
    figures = found["figures"]
    assert "distinct experts per layer" in found["conditions"]["routing"]
    for kind in ("kda", "mla"):
        for stage in ("attention", "attn_in", "attn_out", "route", "experts", "moe_out"):
            assert figures[f"auto.{kind}.{stage}.us"]["value"] > 0, (kind, stage)
        stages = sum(f["value"] for n, f in figures.items() if n.startswith(f"auto.{kind}.") and
                     n.endswith(".us"))  # fmt: skip
        assert stages >= 0.9 * figures[f"auto.{kind}.layer.busy_us"]["value"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(traces.rglob("perfetto_trace.json.gz"))

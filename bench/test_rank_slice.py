"""One rank's slice: what is refused, what the figures are made of, and a small run."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import slice_model
from bench.__main__ import main
from bench.rank_slice import prepare
from bench.rank_slice_options import SliceOptions
from bench.rank_slice_report import figures_of, how_layers_run, in_ratio
from bench.result import read
from jax_impl.backend import AUTO, LATENCY_SPECIALIZED
from jax_impl.binding import bind
from jax_impl.collectives import Ranks
from jax_impl.config import ConfigError, RunConfig
from jax_impl.random_step import load_config
from jax_impl.random_weights import fill_all, random_weights
from jax_impl.sharding import Placement
from jax_impl.weights import weight_table

SMALL = SliceOptions(preset="tiny", tp=2, rows=(2,), layers=(4,), context=64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": (65,)}, "1 to 64"),
        ({"drafts": 8}, "0 to 7"),
        ({"drafts": 3, "accept_length": 5.0}, "1 to 4"),
        ({"accept_length": 2.0}, "only with --drafts"),
        ({"layers": (4, 4)}, "different numbers"),
        ({"layers": (6,)}, "multiple of 4"),
        ({"layers": (8, 7)}, "multiple of 4"),
        ({"context": 2, "drafts": 3}, "at least the 4 row"),
        ({"context": 5000}, "at most 4096"),
        ({"tp": 5}, "does not divide"),
        ({"steps": 0, "repeats": 0}, "--repeats 0"),
    ],
)
def test_bad_conditions_name_the_limit(changed, message):
    with pytest.raises(ValueError, match=message):
        prepare(replace(SMALL, **changed))


def test_a_forced_backend_that_cannot_run_says_why(capsys):
    command = ["rank-slice", "--preset", "tiny", "--tp", "2", "--layers", "4"]
    assert main([*command, "--backend", "latency_specialized"]) == 2
    assert "latency_specialized" in capsys.readouterr().err


@pytest.mark.parametrize(("layers", "kda", "mla"), [(8, 6, 2), (20, 15, 5)])
def test_depths_keep_three_kda_to_one_mla(layers, kda, mla):
    config = slice_model.with_moe_layers(load_config("k3"), layers)
    kinds = slice_model.layer_kinds(config)
    assert kinds == {"dense": 1, "kda": kda, "mla": mla}
    assert not config.is_mla(0)


def test_all_layers_are_the_released_model():
    whole = load_config("k3")
    assert slice_model.with_moe_layers(whole, 93) is whole
    with pytest.raises(ConfigError, match="93, the whole model"):
        slice_model.with_moe_layers(whole, 90)


def test_figures_from_samples():
    setting = prepare(replace(SMALL, preset="tp16", tp=16, layers=(4, 8), rows=(1,)))
    assert in_ratio(setting) == [4, 8]
    samples = {
        "moe4": [340.0, 341.0, 342.0, 343.0], "moe8": [620.0, 621.0, 622.0, 623.0],
        "moe4_dispatched": [400.0] * 4, "moe8_dispatched": [720.0] * 4,
    }  # fmt: skip
    found = figures_of(setting, setting.cases[0], samples, [15.5, 16.5])
    assert found["us_per_layer.rows1"] == {"value": 70.0, "unit": "us", "samples": [70.0] * 4}
    assert found["us_per_layer_dispatched.rows1"]["value"] == 80.0
    assert found["us_per_step.moe8.rows1"]["value"] == 621.5
    assert found["distinct_experts.rows1"]["value"] == 16.0
    # the median of the paired differences, on which noise is judged too
    uneven = samples | {"moe8": [620.0, 721.0, 642.0, 623.0]}
    layer = figures_of(setting, setting.cases[0], uneven, [16.0])["us_per_layer.rows1"]
    assert layer == {"value": 72.5, "unit": "us", "samples": [70.0, 95.0, 75.0, 70.0]}
    size = found["bytes_per_layer.rows1"]["value"]
    assert found["gb_s.rows1"]["value"] == pytest.approx(size / 70.0 / 1e3, rel=1e-5)
    assert "ms_per_step.rows1" not in found  # no depth is the whole model


def test_conditions_say_which_layers_were_one_loop():
    whole = load_config("k3")
    assert how_layers_run(whole, LATENCY_SPECIALIZED) == "layers 2..85 as one loop of 7 x 12"
    assert how_layers_run(whole, AUTO) == "unrolled"
    eight = slice_model.with_moe_layers(whole, 8)
    assert how_layers_run(eight, LATENCY_SPECIALIZED) == "unrolled"


def test_every_layer_has_weights_of_its_own_in_the_loaders_shapes():
    config, placement = slice_model.with_moe_layers(load_config("tiny"), 4), Placement(Ranks(2))
    table = tuple(a for a in weight_table(config) if a.kind in ("root", "moe"))
    made, again = (fill_all(config, table, placement, seed) for seed in (1, 1))
    for array in table:
        values = made[array.kind, array.name]
        assert values.shape == array.shape(config, 2)
        assert values.dtype == array.dtype
        assert bool((values == again[array.kind, array.name]).all())
        assert bool(jnp.isfinite(values.astype(jnp.float32)).all())
        if array.kind == "moe":
            layers = {np.asarray(layer).tobytes() for layer in values}
            assert len(layers) == values.shape[0]
    scales = np.asarray(made["moe", "w13_scale"])
    assert len(np.unique(scales)) == 3
    assert scales.min() > 100
    assert scales.max() < 128
    other = fill_all(config, table[:1], placement, 2)["root", "embed_tokens"]
    assert bool((other != made["root", "embed_tokens"]).any())


def test_distinct_experts_are_counted_per_layer():
    ids = np.array([[[0, 1], [1, 2]], [[5, 6], [7, 8]]])
    assert slice_model.distinct_counts(ids) == [3, 4]


def test_a_small_run(tmp_path, capsys, quick_compile):
    out = tmp_path / "slice.json"
    command = "rank-slice --preset tiny --tp 2 --rows 2 --drafts 1 --layers 4 --context 64"
    sizes = "--steps 2 --repeats 4 --warmups 1 --compile-workers 2"
    assert main([*command.split(), *sizes.split(), "--json", str(out)]) == 0
    found = read(out)
    assert found["parity"]["verdict"] == "passed"
    assert {c["what"].split(".")[0] for c in found["parity"]["comparisons"]} == {"rows2", "verify2"}
    for name in ("rows2", "verify2"):
        assert len(found["figures"][f"us_per_step.moe4.{name}"]["samples"]) == 4
        assert 3 <= found["figures"][f"distinct_experts.{name}"]["value"] <= 6
    assert found["conditions"]["acceptance"]["label"] == "synthetic acceptance"
    printed = capsys.readouterr().out
    assert "COMPUTE ONLY" in printed
    assert json.loads(out.read_text())["conditions"]["shapes"]["tp"] == 2


def test_weights_bound_layer_by_layer_are_the_bound_weights():
    config, placement = slice_model.with_moe_layers(load_config("tp16"), 4), Placement(Ranks(8))
    run = RunConfig(decode_backend="latency_specialized")
    made = random_weights(config, placement, 5, run)
    want = bind(random_weights(config, placement, 5))
    assert jax.tree.structure(made) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert bool((a == b).all())

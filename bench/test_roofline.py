"""The arithmetic of floors: against hand counts of the released model, and its refusals."""

import json

import pytest

from bench.__main__ import main
from bench.devices import DEVICES
from bench.floor import Work, layer_bytes, mean_distinct, step_bytes
from bench.published import PUBLISHED, tokens_per_second
from jax_impl.config import RELEASED_CONFIG, ModelConfig
from jax_impl.memory import MemorySettings, weight_bytes


@pytest.fixture(scope="module")
def k3():
    return ModelConfig.load(RELEASED_CONFIG)


def test_six_tokens_in_a_round_of_7_126_ms_are_842_per_second():
    assert round(tokens_per_second(6, 7.126)) == 842
    for bad in ((0, 7), (6, 0), (6, -1)):
        with pytest.raises(ValueError, match="expected both above 0"):
            tokens_per_second(*bad)


def test_distinct_experts_of_random_rows(k3):
    assert mean_distinct(k3, 1) == pytest.approx(16)
    assert 115 < mean_distinct(k3, 8) < 128
    assert 595 < mean_distinct(k3, 64) < 896
    assert mean_distinct(k3, 100_000) == pytest.approx(896)


@pytest.mark.parametrize(("rows", "megabytes"), [(1, 99), (8, 219), (64, 804)])
def test_bytes_of_a_layer_with_experts_at_tp16(k3, rows, megabytes):
    found = layer_bytes(k3, MemorySettings(ranks=16, kv_dtype="float8_e4m3fn"), Work(rows, 1, 1024))
    mean = (3 * sum(found["kda"].values()) + sum(found["mla"].values())) / 4
    assert mean / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_a_kda_layer_by_hand(k3):
    """One row at TP16: 6 heads of 128; 16 experts of 192 columns."""
    found = layer_bytes(k3, MemorySettings(ranks=16), Work())["kda"]
    p, d, z = 6 * 128, 7168, 3584
    matrices = 2 * ((4 * p + 128 + 6) * d + p * 128 + d * p)
    small = 4 * (3 * p * 4 + 6 + p + 128)  # convolution, A_log, dt_bias, o_norm in f32
    assert found["attention weights"] == matrices + small
    experts = 16 * 3 * 192 * z * 17 // 32  # packed halves and a scale byte per 32
    mixture = 2 * ((56 + 224) * d + 448 * z + z + 3 * 384 * d) + 4 * 896
    assert found["feed-forward weights"] == pytest.approx(experts + mixture)
    assert found["state"] == 2 * 6 * 128 * 128 * 4 + 2 * 3 * 3 * p * 2


def test_all_experts_once_are_all_weights_but_the_embedding(k3):
    settings = MemorySettings(ranks=16)
    found = step_bytes(k3, settings, Work(0, 1, 0, distinct=896))
    embedding = 163840 // 16 * 7168 * 2
    assert sum(found.values()) == pytest.approx(sum(weight_bytes(k3, settings)) - embedding)


def test_context_counts_in_mla_layers_only_and_dcp_divides_it(k3):
    at = lambda context, dcp=1: layer_bytes(  # noqa: E731
        k3, MemorySettings(ranks=16, kv_dtype="float8_e4m3fn", dcp=dcp), Work(1, 1, context)
    )
    grown = sum(at(131072)["mla"].values()) - sum(at(0)["mla"].values())
    assert grown == pytest.approx(131072 * 576)
    spread = sum(at(131072, 16)["mla"].values()) - sum(at(0)["mla"].values())
    assert spread == pytest.approx(131072 * 576 / 16)
    assert at(131072)["kda"] == at(0)["kda"]


def test_the_command_writes_a_result_without_published_figures(tmp_path, capsys):
    file = tmp_path / "r.json"
    options = ["--device", "H200", "--rows", "1", "--drafts", "7", "--accept-length", "6"]
    assert main(["roofline", *options, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert set(result) == {"schema", "command", "conditions", "figures", "parity"}
    step = result["figures"]["floor_us.step.verify8"]["value"]
    size = result["figures"]["bytes.step.verify8"]["value"]
    assert step == pytest.approx(size / DEVICES["H200"].read_tb_s / 1e6, rel=1e-6)
    rate = result["figures"]["tokens_per_s_at_floor.verify8"]["value"]
    assert rate == pytest.approx(6e6 / step, rel=1e-3)
    assert "synthetic" in result["conditions"]["acceptance"]
    assert result["conditions"]["versions"] and result["conditions"]["code"]
    assert result["conditions"]["shapes"]["model"] == "released"
    assert not {f["value"] for f in result["figures"].values()} & {p.specialised for p in PUBLISHED}
    printed = capsys.readouterr().out
    assert "published elsewhere, not reproduced here" in printed and "842" in printed


@pytest.mark.parametrize("distinct", ["15", "17"])
def test_one_row_chooses_16_experts(capsys, distinct):
    assert main(["roofline", "--rows", "1,8", "--distinct", distinct]) == 2
    assert "expected 16, which one row chooses, to 16, which" in capsys.readouterr().err


def test_everything_wrong_is_said_at_once(capsys):
    wrong = ["--tp", "3", "--rows", "0", "--drafts", "9", "--context", "-1", "--dcp", "2"]
    assert main(["roofline", *wrong, "--accept-length", "11", "--distinct", "900"]) == 2
    said = capsys.readouterr().err
    for part in (
        "does not divide by 3 ranks", "--rows (0,)", "--drafts 9", "--context -1", "--dcp 2",
        "--accept-length 11", "--distinct 900",
    ):  # fmt: skip
        assert part in said

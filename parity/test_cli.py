"""The `k3` command: results, errors, exit statuses, and what its help may import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jax_impl.cli import main
from jax_impl.config import RELEASED_CONFIG


def k3(*args: str) -> int:
    """Run a command in this process and return its exit status."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in args])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "tiny"
    assert k3("make-tiny", directory, "--seed", 3) == 0
    return directory


def test_help_imports_neither_jax_nor_torch_nor_numpy():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['k3', '--help']\n"
        "try: runpy.run_module('jax_impl', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print([m for m in ('jax', 'torch', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
    assert "make-tiny" in run.stdout


def test_check_reports_what_it_found(tiny, tmp_path):
    assert k3("check", tiny / "target", "--json", tmp_path / "check.json") == 0
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["tensors"] == 716 and found["shards"] == 3
    assert found["files_not_in_index"] == []


def test_check_refuses_a_missing_shard_by_name(tiny, tmp_path, capsys):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny / "target", broken)
    (broken / "model-00002-of-00003.safetensors").unlink()
    for command in (("check", broken), ("generate", broken, "--prompt-ids", "1")):
        assert k3(*command) == 2
        error = capsys.readouterr().err
        assert "2 of 3 shards found; missing model-00002-of-00003.safetensors" in error
        assert "looks incomplete" in error


def test_memory_of_the_released_model(tmp_path):
    target = tmp_path / "memory.json"
    args = ("--tp", 16, "--context", 32768, "--batch", 32, "--json", target)
    assert k3("memory", RELEASED_CONFIG, *args) == 0
    found = json.loads(target.read_text())
    assert (found["text_bytes"], found["text_tensors"]) == (1_559_965_606_912, 497_052)
    weights = sum(found["per_rank_bytes"][k] for k in ("routed experts", "other weights"))
    assert round(weights / 1e9, 2) == 98.31


def test_memory_refuses_what_does_not_fit(capsys):
    args = ("--tp", 16, "--context", 1048576, "--batch", 64, "--device-gb", 288)
    assert k3("memory", RELEASED_CONFIG, *args) == 2
    error = capsys.readouterr().err
    assert "too much" in error and "Largest batch at this context" in error


def test_generate_writes_ids_with_their_conditions(tiny, tmp_path):
    prompt = tmp_path / "prompt.json"
    prompt.write_text("[5, 17, 101]")
    out = tmp_path / "out.json"
    args = ("--steps", 5, "--ignore-eos", "--compute", "float32", "--seed", 4, "--json", out)
    assert k3("generate", tiny / "target", "--prompt-ids", prompt, *args) == 0
    found = json.loads(out.read_text())
    assert found["prompt_ids"] == [5, 17, 101] and len(found["output_ids"]) == 5
    assert found["conditions"]["compute"] == "float32"
    assert "first decode step" in found["conditions"]["excluded"]


def test_forced_rates_are_labelled_wherever_they_are_shown(tmp_path, capsys):
    from jax_impl.make_tiny import make_checkpoint

    make_checkpoint(tmp_path / "pair", "tiny", 0, overrides={"num_hidden_layers": 2})
    capsys.readouterr()
    out = tmp_path / "out.json"
    args = ("--prompt-ids", "5,17", "--steps", 10, "--draft", tmp_path / "pair" / "draft")
    forced = ("--drafts", 3, "--accept", "synthetic", "--accept-rates", "1,1,0")
    more = ("--commit", "snapshots", "--ignore-eos", "--json", out)
    assert k3("generate", tmp_path / "pair" / "target", *args, *forced, *more) == 0
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert "generated (synthetic acceptance)" in printed and "output_ids" not in found
    assert found["acceptance"] == "synthetic acceptance" in found["text"]
    assert found["mean_acceptance_length"] == 3 and found["verify_steps"] == 3
    spoken = found["conditions"]["speculation"]
    assert spoken["kind"] == spoken["label"] == "synthetic acceptance"
    assert spoken["commit"] == "snapshots"
    assert (spoken["schedule"], spoken["schedule_kind"]) == ([1.0, 1.0, 0.0], "given rates")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt-ids", "1,2,x"), "not token ids"),
        (("--prompt-ids", "nowhere.txt"), "expected an existing file or a list"),
        (("--prompt-ids", "99999"), "[99999] outside 0..383"),
        (("--prompt-ids", "1", "--kv-dtype", "float8_e4m3fn"), "needs an explicit positive scale"),
        (("--prompt-ids", "1", "--kv-scale", "2"), "kv_dtype is not float8_e4m3fn"),
        (("--prompt-ids", "1", "--steps", "0"), "expected at least 1"),
        (("--prompt-ids", "1", "--steps", "9999"), "the model limit is 4096"),
        (("--prompt-ids", "1", "--backend", "latency_specialized"), "need an NVIDIA GPU"),
        (("--prompt-ids", "1", "--page-size", "0"), "--page-size: found 0"),
        (("--prompt-ids", "1", "--seed", "-1"), "seed -1: expected 0.."),
    ],
)
def test_bad_input_gives_one_clear_error(tiny, capsys, args, message):
    assert k3("generate", tiny / "target", *args) == 2
    assert message in capsys.readouterr().err


def test_a_result_that_cannot_be_written_says_where(tiny, tmp_path, capsys):
    assert k3("check", tiny / "target", "--json", tmp_path) == 2
    assert f"{tmp_path} is a directory" in capsys.readouterr().err
    assert k3("check", tiny / "target", "--json", "/dev/null/x.json") == 2
    assert "/dev/null is a file" in capsys.readouterr().err


def test_a_directory_in_use_is_not_overwritten(tiny, capsys):
    assert k3("make-tiny", tiny) == 2
    assert str(tiny) in capsys.readouterr().err


def test_memory_with_a_drafter_prints_both_forms_of_commit(tmp_path, golden_dir, capsys):
    asked = ["memory", RELEASED_CONFIG, "--tp", "16", "--drafts", "7"]
    out = tmp_path / "memory.json"
    assert k3(*asked, "--draft", "released", "--json", out) == 0
    found = json.loads(out.read_text())
    assert found["per_rank_bytes"]["draft weights"] == 519_252_482
    assert found["per_rank_bytes"]["commit buffers"] == found["commit_forms"]["replay"]["memory"]
    assert found["commit_forms"]["snapshots"]["traffic"] == 298_450_944
    assert "commit by snapshots" in capsys.readouterr().out
    assert k3(*asked, "--draft", tmp_path / "nowhere") == 2


def test_check_takes_a_drafter_too(tiny, tmp_path):
    assert k3("check", tiny / "draft", "--json", tmp_path / "check.json") == 0
    assert json.loads((tmp_path / "check.json").read_text())["tensors"] > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "0"), "tp 0: expected a whole number of ranks, at least 1"),
        (("--tp", "-1"), "tp -1: expected a whole number of ranks, at least 1"),
        (("--drafts", "3", "--accept", "block"), "--accept block: only with --draft"),
        (("--accept-length", "3"), "--accept-length 3.0: only with --draft"),
        (("--tp", "2", "--dcp", "3"), "dcp 3: expected 1 or the number of ranks, 2"),
        (("--tp", "2", "--dcp", "2", "--profile", "H"), "with profile 'H'"),
    ],
)
def test_generate_refuses_before_it_loads(tiny, options, message, capsys):
    assert k3("generate", tiny / "target", "--prompt-ids", "5", *options) == 2
    error = capsys.readouterr().err
    assert message in error and "loading" not in error

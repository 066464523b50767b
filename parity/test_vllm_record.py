"""The script that records vLLM: its arguments here, its names and objects in a vLLM environment.

Tests marked `vllm` need VLLM_PYTHON, the Python of such an environment (`make test-vllm`). They run
no engine, which needs a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_impl.make_tiny import make_checkpoint
from parity.records import fingerprint, read_record

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "torch_ref" / "vllm_record.py"
PROBE = ROOT / "parity" / "vllm_probe.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("vllm_record", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_record"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint pair and a prompt file."""
    path = tmp_path_factory.mktemp("vllm")
    make_checkpoint(path / "pair", "tiny", 4)
    (path / "prompts.txt").write_text("3, 1 4\n\n[5,9]\n")
    return path


def arguments(place, *more):
    pair = place / "pair"
    model = ["--model", str(pair / "target"), "--prompts", str(place / "prompts.txt")]
    return [str(place / "out"), *model, *more]


def test_a_command_line_becomes_a_plan(script, place):
    draft = str(place / "pair" / "draft")
    more = ("--draft", draft, "--tp", "16", "--logprobs", "all", "--preset", "tiny", "--seed", "4")
    plan = script.plan_of(script.parser().parse_args(arguments(place, *more)))
    assert plan.prompts == [[3, 1, 4], [5, 9]] and plan.runs == ["greedy", "dspark"]
    assert plan.logprobs == -1 and plan.tp == 16
    named = {"preset": "tiny", "seed": 4, "fingerprint": fingerprint(place / "pair" / "target")}
    assert plan.checkpoint == named
    asked = script.engine_arguments(plan, speculative=True)
    assert asked["speculative_config"]["num_speculative_tokens"] == 7
    assert "additional_config" not in asked and asked["max_model_len"] >= 3 + 48 + 7
    plain = script.engine_arguments(plan, speculative=False)
    assert "speculative_config" not in plain


def test_the_specialised_backend_and_further_arguments_reach_the_engine(script, place):
    more = ("--decode-backend", "latency_specialized", "--engine", '{"max_num_seqs": 8}')
    plan = script.plan_of(script.parser().parse_args(arguments(place, *more)))
    asked = script.engine_arguments(plan, speculative=False)
    assert asked["additional_config"] == {"decode_backend": "latency_specialized"}
    assert asked["max_num_seqs"] == 8 and plan.runs == ["greedy"]


def test_all_reasons_of_a_refusal_come_at_once(script, place, tmp_path):
    (tmp_path / "bad.txt").write_text("1 2\nfour\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("x")
    line = [
        str(tmp_path / "taken"), "--model", str(tmp_path), "--prompts", str(tmp_path / "bad.txt"),
        "--runs", "greedy,dspark,vibes", "--tokens", "0", "--logprobs", "-3", "--top-p", "0",
        "--decode-backend", "fast", "--preset", "tiny", "--engine", "[1]",
    ]  # fmt: skip
    with pytest.raises(script.Refused) as error:
        script.plan_of(script.parser().parse_args(line))
    words = (
        "found vibes", "dspark: they need --draft", "no config.json", "absent or empty",
        "--tokens: found 0", "--logprobs: found '-3'", "--top-p: found 0.0", "found 'fast'",
        "belong together", "line 2: 'four'", "expected a JSON object",
    )  # fmt: skip
    assert [w for w in words if w not in str(error.value)] == []
    assert len(str(error.value).split("\n")) == len(words)


def test_digits_of_other_scripts_are_no_numbers(script, place, tmp_path):
    (tmp_path / "odd.txt").write_text("1 \u00b2\n\u0661\n", encoding="utf-8")
    line = arguments(place, "--logprobs", "\u00b2", "--prompts", str(tmp_path / "odd.txt"))
    with pytest.raises(script.Refused) as error:
        script.plan_of(script.parser().parse_args(line))
    for words in ("--logprobs: found", "line 1: ", "line 2: "):
        assert words in str(error.value)


def test_eager_steps_never_take_the_specialised_path(script, place):
    more = ("--decode-backend", "latency_specialized", "--eager")
    with pytest.raises(script.Refused, match="eager"):
        script.plan_of(script.parser().parse_args(arguments(place, *more)))


def test_chosen_kernels_are_found_in_the_log(script):
    line = "(Worker_TP0 pid=7) INFO 11-30 00:11 [cuda.py:448] Using FLASHMLA attention backend.\n"
    assert script.CHOSEN.search(line)[0].strip() == "Using FLASHMLA attention backend."
    assert not script.CHOSEN.search("Using 7 as the seed")


# ---- in an environment with vLLM ----


@pytest.fixture(scope="module")
def vllm_python():
    python = os.environ.get("VLLM_PYTHON")
    assert python, "set VLLM_PYTHON to the Python of an environment with vLLM 0.27 to 0.33"
    return python


def run(python, *command, cwd):
    """Outside the repository, so that nothing of this project can be imported."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([python, *command], capture_output=True, text=True, cwd=cwd, env=clean)


@pytest.mark.vllm
def test_the_check_accepts_every_run(vllm_python, place, tmp_path):
    draft = str(place / "pair" / "draft")
    runs = "greedy,batched_greedy,sampled,dspark,batched_dspark,dspark_sampled"
    more = ("--draft", draft, "--runs", runs, "--check")
    for further in (("--eager",), ("--decode-backend", "latency_specialized", "--tp", "16")):
        done = run(vllm_python, str(SCRIPT), *arguments(place, *more, *further), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "nothing was run" in done.stdout
    assert not (place / "out").exists()


@pytest.mark.vllm
def test_an_engine_argument_that_does_not_exist_is_refused(vllm_python, place, tmp_path):
    line = arguments(place, "--engine", '{"warp_factor": 9}', "--check")
    done = run(vllm_python, str(SCRIPT), *line, cwd=tmp_path)
    assert done.returncode == 2 and "EngineArgs has no warp_factor" in done.stderr


@pytest.fixture(scope="module")
def probed(vllm_python, place, tmp_path_factory):
    path = tmp_path_factory.mktemp("probed")
    line = [str(SCRIPT), str(place / "pair" / "target"), str(place / "prompts.txt")]
    # -P: the directory of this script is no place to import from; it holds an html.py
    done = run(vllm_python, "-P", str(PROBE), *line, str(path / "record"), cwd=path)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().split("\n")[-1]), path / "record"


@pytest.mark.vllm
def test_every_name_exists_in_the_installed_version(probed):
    found, _ = probed
    assert found["unknown"] == []
    assert "dspark" in found["methods"] and "greedy" in found["draft_methods"]
    assert {"standard", "block", "synthetic"} <= set(found["rules"])
    assert found["temperatures"] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    if found["version"].startswith("0.33"):
        assert found["lacking"] == []


@pytest.mark.vllm
def test_what_is_made_of_real_outputs_is_a_valid_record(probed):
    found, path = probed
    record = read_record(path)
    texts = {t.key: t for t in record.texts}
    assert set(texts) == {("case0", r) for r in ("greedy", "sampled", "dspark")} | {
        ("case1", "greedy")
    }
    greedy, spoken = texts["case0", "greedy"], texts["case0", "dspark"]
    assert greedy.prompt.tolist() == [3, 1, 4] and len(greedy.ids) == 8
    assert greedy.distribution.first == 0 and greedy.distribution.ids.shape == (10, 5)
    assert (np.diff(greedy.distribution.logprobs, axis=-1) <= 0).all()  # best first
    assert texts["case0", "sampled"].distribution.first == 2
    assert not texts["case0", "sampled"].greedy
    assert spoken.accepted.tolist() == [2, 0, 3] and len(spoken.ids) == 8  # one short of 9
    assert "equal to vLLM's own list" in found["how"]
    assert record.meta["texts"]["dspark"]["accepted_counts"] == found["how"]
    whole = texts["case1", "greedy"].distribution
    assert whole.ids is None and whole.logprobs.shape == (10, 16)
    assert record.meta["engine"]["version"] == found["version"]

"""Wrong uses of `python -m bench`, and what each message must hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from bench import commit_forms, loader_memory, loader_ranks
from bench.__main__ import main
from parity.wrong_uses import Wrong, make_workspace, problems

ROOT = Path(__file__).parents[1]
HELP = "has all options"
SPECIALIZED = "latency_specialized"
ALL = (
    Wrong("decode --drafts 9 --accept-length 20 --batch 0 --isl 0", "--drafts 9: expected 0 to 7",
          "--batch 0: expected 1 to 64", HELP),
    Wrong("decode --drafts 3 --accept-length 4.5", "4.5", "expected 1 to drafts + 1 = 4", HELP),
    Wrong("decode --commit snapshots", "--commit snapshots: found without drafts",
          "expected --drafts of 1 to 7", HELP),
    Wrong("decode --checkpoint tiny/target --drafts 3", "found missing", "with --checkpoint", HELP),
    Wrong("decode --compare auto,fast", "auto,fast", "expected two of auto,latency", HELP),
    Wrong("decode --context 10", "--context 10", "at least the 1001 tokens", HELP),
    Wrong("decode --osl 99999", "context 100000", "limit is 4096 tokens", "ask for less (--osl"),
    Wrong("decode --memory-fraction 2", "2.0", "at most 1", "change it"),
    Wrong("decode --json full", "full is a directory", "name of a file", "choose another place"),
    Wrong("decode --checkpoint nowhere", "not a directory", "a checkpoint directory", "config"),
    Wrong("decode --checkpoint half", "cut short", "header and size", "Fetch the named files"),
    Wrong("decode --checkpoint tiny/target --draft other_draft --drafts 3", "draft 9",
          "the target's 8", "made for this target"),
    Wrong("decode --tp 4", "6 does not divide by 4", "divides all of it", ": 1, 2."),
    Wrong("decode --tp 2", "1 device(s)", "one device per rank", "emulate 2 devices"),
    Wrong("decode --preset k3", "weights need", "are free", "Use more ranks"),
    Wrong(f"decode --backend {SPECIALIZED}", "devices found: cpu", "an NVIDIA GPU", "'auto'"),
    Wrong("decode --num-processes 2", "found --num-processes", "give all three", "multi_process"),
    Wrong("decode --osl x", "'x'", "int()", "For full helptext"),
    Wrong(f"decode --backend {SPECIALIZED} --batch 16 --drafts 7", "128 rows",
          "takes at most 64; expected --batch of at most 8", HELP),
    Wrong(f"agentic --backend {SPECIALIZED} --users 9 --drafts 7", "128 rows", "at most 8", HELP),
    Wrong("agentic --speed nan --seed -1", "--speed nan", "--seed -1: expected 0 to", HELP),
    Wrong("rank-slice --seed 4294967296 --repeats 0", "--seed 4294967296", "at least 1", HELP),
    Wrong("layers --picture full --perfetto file/x", "full is a directory", "file is a file",
          "choose another place"),
    Wrong("layers --seed -1 --context 0 --rows 99", "--seed -1", "--context 0",
          "--rows 99: expected 1 to 64", HELP),
    Wrong("agentic --trace nowhere", "nowhere: not readable", "a session per line", "check the"),
    Wrong("agentic --trace trace.jsonl", "line 2: found KeyError", "new >= 1", "Correct these"),
    Wrong("agentic --users 0 --runs 0 --speed 0", "--users 0", "expected 1 to 64", HELP),
    Wrong("rank-slice --rows 0,99 --drafts 9 --context 0", "(0, 99)", "1 to 64, the largest", HELP),
    Wrong("rank-slice --rows 1,8,1 --budget inf", "(1, 8, 1): expected different numbers",
          "--budget inf: expected a finite number", HELP),
    Wrong("rank-slice --rows 1;2", "'1;2'", "whole numbers with commas", "correct it"),
    Wrong("rank-slice --layers 5", "--layers 5", "a multiple of 4", "change it"),
    Wrong("rank-slice --tp 7", "does not divide by 7", "divides all of it", "Choose a number"),
    Wrong("rank-slice --context 9999999", "9999999", "at most 1048576", "ask for less"),
    Wrong(f"rank-slice --preset tp16 --tp 1 --layers 4 --backend {SPECIALIZED}",
          "devices found: cpu", "an NVIDIA GPU", "Use decode_backend 'auto'"),
    Wrong("layers --backends fast --rows 99 --picture x.jpg", "--rows 99: expected 1 to 64",
          "a name that ends in .png", HELP),
    Wrong("startup --rows 0 --layers 5 --calls 0 --tp 7 --compile-cache full",
          "--layers 5: expected a multiple of 4", "--calls 0: expected at least 1", HELP),
    Wrong("startup --rows 99 --tp 7 --compile-cache full", "--rows (99,): expected numbers of 1 to",
          "full: found files in it, expected a new or an empty folder", HELP),
    Wrong("startup --compile-cache file", "found a file", "expected a new or an empty", HELP),
    Wrong("startup --compile-cache tiny/target/new", "tiny/target/new: found it inside",
          "outside of", HELP),
    Wrong("startup --context 9999999 --budget 0", "9999999", "at most 1048576", "above 0", HELP),
    Wrong("startup --preset k3", "weights need", "are free", "Use more ranks"),
    Wrong(f"startup --preset tp16 --layers 4 --backend {SPECIALIZED} --no-dispatch",
          "devices found: cpu", "an NVIDIA GPU", "Use decode_backend 'auto'"),
    Wrong("ops nothing", "no case for ['nothing']", "parts of case names", "--list prints all"),
    Wrong("ops", "found cpu", "expected an NVIDIA GPU", "run it there"),
    Wrong("ops --repeats 0", "--repeats 0", "at least 1", HELP),
    Wrong("roofline --device H300", "'H300'", "Expected one of", "For full helptext"),
    Wrong("roofline --tp 7 --rows 0", "does not divide by 7", "at least 1", "Choose a number"),
    Wrong("roofline --config nowhere", "not found", "config.json of a Kimi K3", "give the dir"),
    Wrong("roofline --project other.json", "keys: found ['schema']", "expected ['schema', 'com",
          "Give a file that a measuring command"),
    Wrong("compare other.json nowhere.json", "nowhere.json: not readable", "expected a JSON file",
          "measure again"),
    Wrong("compare other.json", "Missing from", "another", "For full helptext"),
    Wrong("plot --report out", "no result files", "at least one", "give their names"),
    Wrong("plot other.json --report file", "file is a file", "expected a directory", "choose"),
    Wrong("plot nested.json --report out", "found list", "expected ['schema'", "Give a file"),
)  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    make_workspace(folder)
    return folder


@pytest.mark.parametrize("wrong", ALL, ids=lambda w: w.command)
def test_bench(wrong, workspace, monkeypatch, capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("what it refuses for want of a GPU it would run here")
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # commands change it
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    assert not problems(main, wrong, capsys, workspace)


@pytest.mark.parametrize("module", [commit_forms, loader_memory, loader_ranks])
def test_modules_of_their_own_refuse_before_the_work(module, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    with pytest.raises(ValueError, match="full is a directory, expected the name of a file"):
        module.main(["--json", "full"])
    if module is not commit_forms:
        with pytest.raises(ValueError, match="not a directory"):
            module.main(["nowhere"])


def test_a_refusal_of_a_module_is_a_message(workspace):
    command = [sys.executable, "-m", "bench.loader_ranks", "--scratch", "nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("python -m bench.loader_ranks: --scratch nowhere: expected a dir")

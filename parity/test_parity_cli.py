from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_impl.backend import AUTO
from parity import driver
from parity.__main__ import main
from parity.folders import read_tensors

ROOT = Path(__file__).parents[1]


@pytest.fixture
def small(tmp_path, golden_dir) -> Path:
    """A folder that is quick to judge."""
    target = tmp_path / "few"
    target.mkdir()
    for stem in ("situ", "router_scaled"):
        for suffix in ("safetensors", "json"):
            shutil.copy(golden_dir / "ops" / f"{stem}.{suffix}", target)
    return target


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_help_is_quick_and_imports_neither_jax_nor_torch():
    code = (
        "import sys, parity.__main__ as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "assert not {'jax', 'torch', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("run", "golden", "compare", "serve"))


def test_a_good_folder_passes_and_delivers_json_and_report(small, tmp_path, capsys):
    out = tmp_path / "out" / "verdicts.json"
    report = tmp_path / "report"
    assert run("golden", str(small), "--json", str(out), "--report", str(report)) == 0
    made = json.loads(out.read_text())
    assert made["passed"] and made["counts"]["failed"] == 0
    errors = [v for v in made["verdicts"] if v["passed"] and v["metrics"].get("max_abs", 0) > 0]
    assert errors and all(v["reason"] for v in made["verdicts"])
    page = (report / "index.html").read_text()
    assert "<html" in page and 'src="http' not in page and "few" in page
    assert not list(out.parent.glob(".*")), "a temporary file was left behind"
    shown = capsys.readouterr()
    assert "everything asked for passed" in shown.out and "few" in shown.err


def test_dash_sends_the_json_to_stdout_and_the_table_to_stderr(small, capsys):
    assert run("golden", str(small), "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["passed"]
    assert "everything asked for passed" in shown.err


@pytest.mark.parametrize("name", ["y_f64", "gate"])
def test_a_corrupted_tensor_fails(small, name, capsys):
    tensors = read_tensors(small / "situ.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name].flat[7] += 1e-2
    save_file(tensors, small / "situ.safetensors")
    assert run("golden", str(small)) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_tensor_of_another_shape_fails(small):
    tensors = read_tensors(small / "situ.safetensors")
    tensors["y_f64"] = np.ascontiguousarray(tensors["y_f64"][:-1])
    save_file(tensors, small / "situ.safetensors")
    assert run("golden", str(small)) == 1


def test_a_missing_input_fails_without_a_traceback(small, capsys):
    tensors = read_tensors(small / "situ.safetensors")
    del tensors["up"]
    save_file(tensors, small / "situ.safetensors")
    assert run("golden", str(small)) == 1
    assert "NOT RUN" in capsys.readouterr().out


def test_an_operation_file_never_seen_before_is_judged(tmp_path):
    """Other shapes, seeds and group counts, with truth from the PyTorch reference in float64."""
    pytest.importorskip("torch")
    from parity.case_check import with_truth
    from parity.cases import Case

    unseen = (
        Case(
            "router", "unseen", 7, seed=91,
            sizes=(("experts", 40), ("top_k", 3), ("groups", 5), ("kept", 3)),
        ),
        Case("attn_res", "unseen", 3, seed=92, sizes=(("width", 56), ("snapshots", 4))),
        Case("rmsnorm", "unseen", 4, seed=93, sizes=(("width", 33),)),
    )  # fmt: skip
    for case in unseen:
        tensors, meta = with_truth(case)
        save_file(dict(tensors), tmp_path / f"{case.op}_x.safetensors")
        (tmp_path / f"{case.op}_x.json").write_text(json.dumps(meta | {"op": case.op}))
    assert run("golden", str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("content", "word"), [('{"kind": "seance"}', "seance"), ("[", "JSON"), ("[1]", "object")]
)
def test_an_unknown_kind_or_damaged_sidecar_is_an_error(tmp_path, content, word, capsys):
    (tmp_path / "golden.json").write_text(content)
    assert run("golden", str(tmp_path)) == 2
    shown = capsys.readouterr()
    assert "parity:" in shown.err and word in shown.err and not shown.out


def test_a_folder_that_does_not_exist_is_an_error(tmp_path, capsys):
    assert run("golden", str(tmp_path / "nowhere")) == 2
    assert "not a directory" in capsys.readouterr().err


def test_an_empty_folder_is_an_error(tmp_path):
    assert run("golden", str(tmp_path)) == 2


def test_golden_without_folders_is_an_error():
    assert run("golden") == 2


def test_a_checkpoint_belongs_to_records_of_an_engine(small, tmp_path, capsys):
    assert run("golden", str(small), "--checkpoint", str(tmp_path)) == 2
    assert "--checkpoint" in capsys.readouterr().err


def test_a_damaged_tensor_file_is_an_error(small, capsys):
    file = small / "situ.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert run("golden", str(small)) == 2
    assert "situ.safetensors" in capsys.readouterr().err


def test_a_model_folder_with_a_shard_missing_is_an_error(tmp_path, golden_dir, capsys):
    target = tmp_path / "model"
    shutil.copytree(golden_dir / "model_tiny3", target)
    next(target.glob("model-00002*")).unlink()
    assert run("golden", str(target)) == 2
    assert "model-00002" in capsys.readouterr().err


def test_errors_of_all_folders_are_listed_before_anything_runs(
    small, tmp_path, monkeypatch, capsys
):
    ran = []
    monkeypatch.setattr("parity.commands.check_folder", lambda f, *_: ran.append(f) or iter(()))
    damaged = shutil.copytree(small, tmp_path / "damaged")
    (damaged / "situ.json").write_text("{")
    file = damaged / "router_scaled.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    nowhere = tmp_path / "nowhere"
    assert run("golden", str(small), str(nowhere), str(damaged)) == 2
    shown = capsys.readouterr().err
    assert not ran and all(w in shown for w in (str(nowhere), "damaged"))


@pytest.mark.parametrize("error", [KeyError("k"), ValueError("v"), IndexError("i"), TypeError("t")])
def test_an_error_in_one_folder_leaves_the_verdicts_of_others(
    small, tmp_path, monkeypatch, capsys, error
):
    from parity import commands
    from parity.verdict import Where, judge, tolerance

    def check(folder, *_):
        where = Where("ops", folder.name, "-")
        yield judge(where, "first", {"exact": True}, tolerance("equal"))
        if folder.name == "other":
            raise error

    monkeypatch.setattr(commands, "check_folder", check)
    other, out = shutil.copytree(small, tmp_path / "other"), tmp_path / "v.json"
    assert run("golden", str(other), str(small), "--json", str(out)) == 1
    found = json.loads(out.read_text())["verdicts"]
    assert [(v["folder"], v["status"]) for v in found] == [
        ("other", "passed"), ("other", "not run"), ("few", "passed"),
    ]  # fmt: skip
    assert str(other) in found[1]["note"] and type(error).__name__ in found[1]["note"]
    assert "README" in found[1]["note"]


def test_a_remark_neither_fails_nor_passes_a_run(capsys):
    from parity import report
    from parity.verdict import Where, judge, not_recorded, tolerance

    where = Where("model", "f", "-")
    remark = not_recorded(where, "optional data", "prompt2_ids")
    passed = judge(where, "q", {"exact": True}, tolerance("equal"))
    assert not report.good([remark]) and report.good([passed, remark])
    assert report.summary([passed, remark])["not recorded"] == 1
    report.print_table([passed, remark])
    assert "NOT RECORDED" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--json", "--report"])
@pytest.mark.parametrize("place", ["a directory", "below a file"])
def test_places_that_cannot_be_written_are_found_before_the_work(
    small, tmp_path, monkeypatch, capsys, option, place
):
    monkeypatch.setattr("parity.commands.execute", lambda _: pytest.fail("it ran"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "made" / "index.html").mkdir(parents=True)
    target = tmp_path / "file" / "x" if place == "below a file" else tmp_path / "made"
    assert run("golden", str(small), option, str(target)) == 2
    shown = capsys.readouterr()
    assert option in shown.err and str(tmp_path) in shown.err and not shown.out


def test_an_unknown_suite_lists_the_known_ones(capsys):
    assert run("run", "--suite", "ops,vibes") == 2
    shown = capsys.readouterr().err
    assert "vibes" in shown and all(s in shown for s in ("ops", "model", "mutants"))


@pytest.mark.parametrize("ids", ["1 2 x", "99999", "", "-1"])
def test_a_prompt_that_cannot_be_run_is_an_error(golden_dir, ids, capsys):
    pytest.importorskip("torch")
    checkpoint = str(golden_dir / "model_tiny3")
    assert run("compare", checkpoint, f"--prompt-ids={ids}") == 2
    assert "--prompt-ids" in capsys.readouterr().err


def test_compare_of_something_that_is_no_checkpoint_is_an_error(tmp_path, capsys):
    pytest.importorskip("torch")
    assert run("compare", str(tmp_path / "nowhere")) == 2
    assert "parity:" in capsys.readouterr().err


@pytest.mark.slow
def test_compare_passes_on_a_checkpoint(golden_dir, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("[3, 1, 4, 1, 5]\n")
    out = tmp_path / "pair.json"
    checkpoint = str(golden_dir / "model_tiny3")
    asked = ["--prompt-ids", str(prompt), "--steps", "3", "--json", str(out)]
    assert run("compare", checkpoint, *asked, "--report", str(tmp_path)) == 0
    found = json.loads(out.read_text())["verdicts"]
    assert {(v["dtype"], v["profile"]) for v in found} == {
        (d, p) for d in ("float32", "bfloat16") for p in "HV"
    }
    assert (tmp_path / "index.html").read_text().count("data:image/png") == 3


@pytest.fixture(scope="module")
def packable(tmp_path_factory) -> Path:
    """A KDA and an MLA layer whose experts can be packed as kernels have them."""
    from jax_impl.make_tiny import make_checkpoint

    directory = tmp_path_factory.mktemp("packable") / "made"
    make_checkpoint(directory, "synthetic", 0, overrides={"num_hidden_layers": 2})
    return directory / "target"


def times(factor):
    """The standard stages as a backend of their own whose experts' sum is `factor` times."""

    def moe_out(*args):
        return (AUTO.moe_out(*args) * factor).astype("bfloat16")

    return AUTO._replace(moe_out=moe_out)


def as_kernels(monkeypatch, module, backend):
    """Where kernels would be chosen, `backend` is."""
    for place in (driver, module):
        monkeypatch.setattr(place, "choose_backend", lambda run, *_: backend)


@pytest.mark.parametrize(
    ("factor", "passed"), [(20.0, False), pytest.param(1.0, True, marks=pytest.mark.slow)]
)
def test_single_tokens_go_through_the_backend(packable, monkeypatch, factor, passed):
    pair = pytest.importorskip("parity.pair")
    as_kernels(monkeypatch, pair, times(factor))
    found = list(pair.check_pair(packable, "3,1,4", 3, "latency_specialized"))
    assert {(v.where.ours, v.where.dtype, v.where.profile) for v in found} == {
        ("jax latency_specialized", "bfloat16", "V")
    }
    assert {v.where.case for v in found} == {"stepwise"}
    assert all(v.status == "passed" for v in found) is passed


@pytest.mark.slow
def test_an_engines_text_is_fed_to_the_backend_behind_its_prompt(packable, monkeypatch):
    golden_vllm = pytest.importorskip("parity.golden_vllm")
    prompt, ids = np.array([3, 1, 4]), np.array([5, 9, 2])
    text = SimpleNamespace(
        prompt=prompt, ids=ids, fed=np.concatenate([prompt, ids[:-1]]), key=("case0", "greedy")
    )
    rows = []
    for backend in (AUTO, times(1.0), times(20.0)):
        as_kernels(monkeypatch, golden_vllm, backend)
        settings = {} if backend is AUTO else {"decode_backend": "latency_specialized"}
        opened = driver.Driver.open(packable, "bfloat16", "V", 5, **settings)
        found = golden_vllm.forced(opened, SimpleNamespace(texts=[text]))
        rows.append(found[text.key])
    assert rows[0].shape == rows[1].shape == (5, rows[0].shape[1])
    apart = [np.abs(x - rows[0]).max(axis=1) / np.abs(rows[0]).max() for x in rows[1:]]
    assert apart[0].max() < 2e-2  # one width of a step or another: roundings fall elsewhere
    assert apart[1][:3].max() < 2e-2 < apart[1][3:].min()

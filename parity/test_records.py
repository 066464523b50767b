"""The record format: what is read, what is refused, and that all problems come at once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from parity.metrics import log_softmax
from parity.records import RecordError, fingerprint, parse, read_record, write_record

V, K = 12, 3


def made(**changes):
    """A small valid record: JSON side and tensors."""
    rng = np.random.default_rng(0)
    meta = {
        "kind": "vllm",
        "format": 1,
        "engine": {"name": "vLLM", "version": "0.33.0"},
        "device": "one of the mind",
        "run": {"dtype": "bfloat16", "tensor_parallel": 2},
        "kernels": {},
        "checkpoint": {"preset": "tiny", "seed": 3},
        "speculation": {
            "method": "dspark",
            "drafts": K,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
        },
        "texts": {
            "greedy": {"sampling": {"temperature": 0}, "speculative": False},
            "warm": {"sampling": {"temperature": 0.7, "seed": 5}, "speculative": False},
            "spec": {"sampling": {"temperature": 0.0}, "speculative": True},
        },
    }
    rows = log_softmax(rng.normal(size=(7, V))).astype(np.float32)
    ids = np.arange(1, 5, dtype=np.int32)
    order = np.argsort(-rows[3:], -1)[:, :4]
    tensors = {
        "case0.prompt_ids": np.array([3, 1, 4, 1], np.int32),
        "case0.greedy_ids": ids,
        "case0.greedy_logprobs": rows,
        "case0.reference_f32_logprobs": rows,
        "case0.warm_ids": ids[::-1].copy(),
        "case0.warm_top_ids": order.astype(np.int32),
        "case0.warm_top_logprobs": np.take_along_axis(rows[3:], order, -1),
        "case0.spec_ids": np.array([5, 6, 7, 8, 9, 10], np.int32),
        "case0.spec_accepted_counts": np.array([2, 3], np.int32),
        "case0.spec_drafts": np.array([[6, 7, 1], [9, 10, 2]], np.int32),
        "case0.spec_stage.layer01.attn_out": np.zeros((9, 4), np.float32),
    }
    tensors["case0.spec_accepted_counts"] = np.array([2, 2], np.int32)
    return meta | changes, tensors


def test_a_record_survives_writing_and_reading(tmp_path):
    meta, tensors = made()
    write_record(tmp_path / "a" / "record", meta, tensors)
    assert not list((tmp_path / "a").glob(".*"))
    record = read_record(tmp_path / "a" / "record")
    greedy, warm, spec = record.texts
    assert [t.kind for t in record.texts] == ["greedy", "warm", "spec"]
    assert record.engine == "vLLM 0.33.0"
    assert greedy.greedy and spec.greedy and not warm.greedy
    assert greedy.fed.tolist() == [3, 1, 4, 1, 1, 2, 3]
    assert greedy.distribution.first == 0 and warm.distribution.first == 3
    assert np.array_equal(warm.distribution.best(), greedy.distribution.best()[3:])
    assert np.array_equal(warm.distribution.rows(np.arange(7)), [3, 4, 5, 6])
    assert spec.accepted.tolist() == [2, 2] and spec.drafts.shape == (2, K)
    assert list(spec.stages) == ["layer01.attn_out"]
    assert record.references["case0", "f32"].shape == (7, V)


def test_a_place_that_is_taken_is_not_written(tmp_path):
    meta, tensors = made()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("keep")
    with pytest.raises(FileExistsError, match="absent or empty"):
        write_record(tmp_path / "x", meta, tensors)
    assert [f.name for f in tmp_path.rglob("*")] == ["x", "mine"]


def test_an_invalid_record_is_not_written(tmp_path):
    meta, tensors = made(format=2)
    with pytest.raises(RecordError, match="format: found 2, expected 1"):
        write_record(tmp_path / "x", meta, tensors)
    assert not list(tmp_path.iterdir())


META = {
    "kind": ({"kind": "model"}, "kind: found 'model', expected 'vllm'"),
    "engine": ({"engine": "vLLM 0.33.0"}, "engine: found 'vLLM 0.33.0', expected an object"),
    "version": ({"engine": {"name": "vLLM"}}, "engine.version: missing"),
    "run": ({"run": {"dtype": "int8", "tensor_parallel": True}}, "run.dtype: found 'int8'"),
    "ranks": ({"run": {"dtype": "bfloat16", "tensor_parallel": 0}}, "tensor_parallel: found 0"),
    "mode": (
        {"run": {"dtype": "float16", "tensor_parallel": 1, "logprobs_mode": "processed_logits"}},
        "before temperature",
    ),
    "kernels": ({"kernels": None}, "kernels: found None"),
    "seed": ({"checkpoint": {"preset": "tiny"}}, "checkpoint: no seed, and no fingerprint"),
    "hash": ({"checkpoint": {"fingerprint": "abc"}}, "64 hexadecimal digits"),
    "texts": ({"texts": {}}, "texts: found {}"),
    "speculation": ({"speculation": None}, "texts.spec is speculative"),
    "rule": (
        {"speculation": {"method": "dspark", "drafts": 0, "draft_sample_method": "greedy",
                         "rejection_sample_method": "hope"}},
        "speculation.rejection_sample_method: found 'hope'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", META)
def test_what_is_wrong_in_the_json_side_is_named(name):
    changes, words = META[name]
    with pytest.raises(RecordError) as error:
        parse(*made(**changes), "here")
    assert words in str(error.value) and str(error.value).startswith("here: ")


def _set(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


def _drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


_ROWS = made()[1]["case0.greedy_logprobs"]
TENSORS = {
    "typo": (_set("case0.greedy_logprob", _ROWS), "case0.greedy_logprob: no name of this format"),
    "run": (_set("case0.other_ids", np.array([1])), "names no run 'other' under texts"),
    "prompt": (_drop("case0.prompt_ids"), "no case0.prompt_ids"),
    "floats": (_set("case0.prompt_ids", np.array([1.0])), "one row of whole numbers"),
    "negative": (_set("case0.greedy_ids", np.array([1, -1, 2, 3])), "id -1, expected 0 or more"),
    "no ids": (_drop("case0.warm_ids"), "other tensors but no case0.warm_ids"),
    "rows": (_set("case0.greedy_logprobs", _ROWS[:-1]), "expected [7 or 4, vocabulary]"),
    "sum": (_set("case0.greedy_logprobs", _ROWS + 0.5), "expected 1; are these natural"),
    "log2": (_set("case0.greedy_logprobs", _ROWS / np.log(2)), "are these natural"),
    "nan": (_set("case0.greedy_logprobs", _ROWS * np.nan), "NaN"),
    "outside": (_set("case0.spec_ids", np.array([5, 6, 7, 8, 9, 99])), "id 99, but the vocabulary"),
    "half": (_drop("case0.warm_top_ids"), "belong together"),
    "list": (_set("case0.warm_top_ids", np.zeros((4, 4), int)), "lists one token twice"),
    "much": (_set("case0.warm_top_logprobs", np.zeros((4, 4))), "expected at most 1"),
    "both": (_set("case0.warm_logprobs", _ROWS), "expected one form"),
    "counts": (_set("case0.spec_accepted_counts", np.array([4, 0])), "expected 0 to 3"),
    "short": (_set("case0.spec_accepted_counts", np.array([1, 0])), "2 steps emit 4 ids"),
    "long": (_set("case0.spec_accepted_counts", np.array([3, 3, 0])), "only the last step"),
    "drafts": (_set("case0.spec_drafts", np.full((2, K), 1)), "step 0 accepted 2, but its drafts"),
    "unplaced": (_drop("case0.spec_accepted_counts"), "places are unknown"),
    "plain": (_set("case0.greedy_accepted_counts", np.array([1, 0])), "that is not speculative"),
    "stage": (_set("case0.spec_stage.x", np.zeros((3, 2))), "expected [9, ...]"),
    "reference": (_set("case0.reference_bf16_logprobs", _ROWS[1:]), "expected [7, vocabulary]"),
    "vocabulary": (
        _set("case0.reference_bf16_logprobs", log_softmax(np.zeros((7, 9)))), "different vocab",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_wrong_in_the_tensors_is_named(name):
    change, words = TENSORS[name]
    meta, tensors = made()
    change(tensors)
    with pytest.raises(RecordError) as error:
        parse(meta, tensors, "here")
    assert words in str(error.value), error.value


def test_all_problems_come_at_once():
    meta, tensors = made(device=None, kernels=[], checkpoint={})
    for change in ("typo", "rows", "counts"):
        TENSORS[change][0](tensors)
    with pytest.raises(RecordError) as error:
        parse(meta, tensors, "here")
    lines = str(error.value).split("\n")
    assert len(lines) == 7 and all(line.startswith("here: ") for line in lines)
    assert "docs/records.md" in lines[-1]  # what to do


def test_a_text_cut_inside_its_last_step_is_valid():
    meta, tensors = made()
    tensors["case0.spec_accepted_counts"] = np.array([2, 3], np.int32)  # one more than it shows
    tensors["case0.spec_drafts"] = np.array([[6, 7, 1], [9, 10, 2]], np.int32)
    assert parse(meta, tensors, "here").texts[2].accepted.tolist() == [2, 3]


# ---- the first record ----


def test_the_recorded_engine_is_a_record(golden_dir):
    record = read_record(golden_dir / "vllm033_tiny")
    assert record.meta["format"] == 1 and record.engine == "vLLM 0.33.0"
    kinds = ["greedy", "batched_greedy", "dspark"]
    assert [t.key for t in record.texts] == [(c, k) for c in ("case0", "case2") for k in kinds]
    assert [t.distribution is not None for t in record.texts] == [True, False, False] * 2
    assert record.texts[0].distribution.logprobs.shape == (57, 2048)
    assert set(record.references) == {(c, r) for c in ("case0", "case2") for r in ("f32", "bf16")}


def test_the_example_of_the_page_runs(golden_dir, monkeypatch, capsys):
    root = golden_dir.parents[1]
    page = (root / "docs" / "records.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(root)
    exec(compile(code, "docs/records.md", "exec"), {})
    assert "case2 dspark 96 False" in capsys.readouterr().out


FIRST_FORM = {
    "kind": "vllm",
    "engine": "vLLM 0.33.0",
    "dtype": "bfloat16",
    "device": "one NVIDIA H200",
    "kernels": {"mla_decode": "FLASHMLA"},
    "checkpoint": {"preset": "synthetic", "seed": 7},
    "dspark": {"num_speculative_tokens": 7, "per_step_accepted_counts": None},
    "sampling": {"temperature": 0.0},
    "cases": {"case0": {"prompt": 10}},
}


def test_the_first_form_is_the_same_record(golden_dir):
    current = read_record(golden_dir / "vllm033_tiny")
    tensors = load_file(golden_dir / "vllm033_tiny" / "golden.safetensors")
    old = parse(FIRST_FORM, tensors, "old")
    assert old.engine == current.engine and old.meta["speculation"]["drafts"] == 7
    assert {t.key for t in old.texts} == {t.key for t in current.texts}
    assert (
        not old.meta["texts"]["greedy"]["speculative"]
        and old.meta["texts"]["dspark"]["speculative"]
    )


def test_counts_in_the_first_form_are_read():
    _, tensors = made()
    kept = {n: tensors[f"case0.{n}"] for n in ("prompt_ids", "spec_ids")}
    old = {"case0.prompt_ids": kept["prompt_ids"], "case0.dspark_ids": kept["spec_ids"]}
    counts = {"num_speculative_tokens": K, "per_step_accepted_counts": {"case0": [2, 2]}}
    record = parse(FIRST_FORM | {"dspark": counts}, old, "old")
    assert record.texts[0].accepted.tolist() == [2, 2]
    counts["per_step_accepted_counts"] = {"case0": [2, 9]}
    with pytest.raises(RecordError, match="expected 0 to 3"):
        parse(FIRST_FORM | {"dspark": counts}, old, "old")


def test_golden_lists_the_problems_of_a_record(tmp_path, golden_dir, capsys):
    from parity.__main__ import main

    target = tmp_path / "vllm_bad"
    shutil.copytree(golden_dir / "vllm033_tiny", target, copy_function=shutil.copyfile)
    meta = json.loads((target / "golden.json").read_text())
    meta["run"]["dtype"] = "int4"
    del meta["checkpoint"]
    (target / "golden.json").write_text(json.dumps(meta))
    assert main(["golden", str(target)]) == 2
    shown = capsys.readouterr().err
    assert "run.dtype: found 'int4'" in shown and "checkpoint: missing" in shown


# ---- fingerprints ----


def _checkpoint(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    for name, size in (("a", 3 << 20), ("b", 100)):
        data = np.arange(size, dtype=np.uint8) if size < 256 else np.zeros(size, np.uint8)
        save_file({"w": data}, path / f"{name}.safetensors")
    return path


def test_a_fingerprint_tells_checkpoints_apart(tmp_path):
    one, two = _checkpoint(tmp_path / "one"), _checkpoint(tmp_path / "two")
    known = fingerprint(one)
    assert known == fingerprint(two)
    for at in (20, -1):  # the header, the last byte
        raw = bytearray((one / "a.safetensors").read_bytes())
        raw[at] ^= 1
        (two / "a.safetensors").write_bytes(raw)
        assert fingerprint(two) != known
    shutil.copy(one / "a.safetensors", two / "a.safetensors")
    (two / "config.json").write_text("{ }")
    assert fingerprint(two) != known
    with pytest.raises(RecordError, match=r"expected config\.json"):
        fingerprint(tmp_path)

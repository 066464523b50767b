"""Prepared checkpoints: round trips, interruptions, damage, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_impl import convert as converting
from jax_impl.checkpoint import Checkpoint, CheckpointError
from jax_impl.cli import main
from jax_impl.collectives import Ranks
from jax_impl.convert import convert
from jax_impl.draft_weights import open_draft
from jax_impl.loader import load_arrays, load_draft, load_weights
from jax_impl.make_tiny import make_checkpoint
from jax_impl.prepared import CONFIG, MANIFEST, MARKER, STATE, verify
from jax_impl.sharding import AXIS, Placement

ROOT = Path(__file__).resolve().parent.parent
ITEMS = ["root", *(f"layer_{i:05d}" for i in range(5))]
W1 = "language_model.model.layers.2.block_sparse_moe.experts.w1.weight_packed"
A_LOG = "language_model.model.layers.1.self_attn.A_log"
SMALL = {"num_hidden_layers": 5, "num_experts": 4}


class Stop(Exception):
    """Stands for whatever may end a conversion."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prepared") / "made"
    make_checkpoint(path, "tiny", 0, overrides=SMALL)
    return path


@pytest.fixture(scope="module")
def source(made) -> Checkpoint:
    return Checkpoint.open(made / "target")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """A complete conversion, not to be changed."""
    out = tmp_path_factory.mktemp("prepared") / "whole"
    convert(source, out)
    return out


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def bits(weights) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(weights)]


def data(out: Path) -> dict[str, bytes]:
    """Every array file of a conversion."""
    return {
        str(f.relative_to(out)): f.read_bytes()
        for f in sorted(out.glob("*/*/*"))
        if f.name != ".zarray"
    }


def refused(path: Path, *parts: str) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(path)
    for part in parts:
        assert part in str(error.value)
    return str(error.value)


def k3(*args: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in args])
    return int(stop.value.code or 0)


# ---- what it holds ----


def test_both_forms_load_the_same_bits(source, whole):
    assert bits(load_weights(Checkpoint.open(whole))) == bits(load_weights(source))


def test_a_drafter(made, tmp_path):
    draft = open_draft(made / "draft")
    convert(draft, tmp_path / "draft")
    prepared = open_draft(tmp_path / "draft")
    assert prepared.prepared and bits(load_draft(prepared)) == bits(load_draft(draft))


def test_orbax_restores_every_item(source, whole):
    import orbax.checkpoint as ocp

    tensors = {}
    for file in {s.file for s in source.consumed.values()}:
        tensors |= load_file(source.path / file)
    heads = source.config.kda_num_heads
    with ocp.PyTreeCheckpointer() as checkpointer:
        for item in ITEMS:
            for key, found in checkpointer.restore(whole / item).items():
                if ".experts." in key:
                    before, after = key.split("experts.")
                    wanted = [tensors[f"{before}experts.{e}.{after}"] for e in range(4)]
                else:
                    wanted = tensors[key][:heads] if key.endswith("A_log") else tensors[key]
                np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), key)


def test_manifest_and_copies(source, whole):
    manifest = json.loads((whole / MANIFEST).read_text())
    assert (whole / CONFIG).read_bytes() == (source.path / CONFIG).read_bytes()
    assert list(manifest["items"]) == ITEMS and manifest["source"] == str(source.path)
    assert manifest["items"]["layer_00002"][W1]["shape"] == [4, 64, 48]
    assert manifest["items"]["layer_00001"][A_LOG]["shape"] == [6]  # without the padding
    stored = data(whole)
    assert manifest["bytes"] == sum(map(len, stored.values())) == verify(whole)
    assert manifest["tensors"] == len(source.consumed)
    everything = {*ITEMS, MANIFEST, STATE, CONFIG}
    assert {p.name for p in whole.iterdir()} == everything


def test_progress_adds_up(source, tmp_path):
    seen = []
    result = convert(source, tmp_path / "out", lambda item, size: seen.append((item, size)))
    assert sum(size for _, size in seen) == result["bytes"] == result["written_bytes"]
    assert [item for item, size in seen if size == 0] == ITEMS


def test_commands_take_a_prepared_directory(whole, made, tmp_path, capsys):
    file = tmp_path / "check.json"
    assert k3("check", whole, "--checksums", "--json", file) == 0
    found = json.loads(file.read_text())
    assert found["bytes"] == found["bytes_with_equal_checksums"]
    assert k3("check", made / "target", "--checksums") == 2
    assert "has no checksums" in capsys.readouterr().err
    assert k3("convert", made / "draft", tmp_path / "draft", "--json", file) == 0
    assert json.loads(file.read_text())["items"] == 3
    assert open_draft(tmp_path / "draft").prepared


@pytest.mark.slow
def test_generate_gives_the_same_tokens(whole, made, tmp_path):
    ids = []
    for path in (whole, made / "target"):
        file = tmp_path / "ids.json"
        args = ("--prompt-ids", "5,17,101", "--steps", "4", "--json", file)
        assert k3("generate", path, *args) == 0
        ids.append(json.loads(file.read_text())["output_ids"])
    assert ids[0] == ids[1]


# ---- any number of ranks ----


def test_shares_of_single_ranks(source, whole):
    prepared = Checkpoint.open(whole)
    for ranks, experts in ((2, "tp"), (2, "ep")):
        for rank in range(ranks):
            placement = Placement(Ranks(ranks, AXIS), None, rank, experts)
            reads = {}, {}
            a = load_arrays(source, None, placement, reads[0])
            b = load_arrays(prepared, None, placement, reads[1])
            assert bits(a) == bits(b) and reads[0] == reads[1]


SPREAD = """
import sys, numpy as np, jax
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import RunConfig
from jax_impl.loader import load_arrays
from jax_impl.sharding import place_ranks
pair = [Checkpoint.open(path) for path in sys.argv[1:]]
for ranks in (1, 4, 16):
    for experts in ("tp", "ep"):
        placement = place_ranks(ranks, RunConfig(experts=experts))
        reads = {}, {}
        a, b = (load_arrays(c, None, placement, r) for c, r in zip(pair, reads, strict=True))
        assert list(a) == list(b) and reads[0] == reads[1]
        for key in a:
            for x, y in zip(a[key].addressable_shards, b[key].addressable_shards, strict=True):
                assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes(), key
        print(ranks, experts, len(a))
"""


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_ranks(tmp_path):
    over = {"num_hidden_layers": 4, "moe_intermediate_size": 512, "num_experts": 16}
    make_checkpoint(tmp_path / "made", "tp16", overrides=over)
    released = tmp_path / "made" / "target"
    convert(Checkpoint.open(released), tmp_path / "out")
    flags = "--xla_force_host_platform_device_count=16"
    run = subprocess.run(
        [sys.executable, "-c", SPREAD, str(released), str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 6


# ---- interruptions ----


def stop_at(item: str, complete: bool):
    """A progress callback that stops in the middle of the item, or right behind it."""

    def progress(found: str, size: int) -> None:
        if found == item and (size == 0) == complete:
            raise Stop

    return progress


@pytest.mark.parametrize("complete", [False, True], ids=["in", "behind"])
@pytest.mark.parametrize("item", ITEMS)
def test_a_stopped_conversion_is_refused_and_goes_on(source, whole, tmp_path, item, complete):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, stop_at(item, complete))
    refused(out, "did not finish", f"k3 convert {source.path} {out}")
    result = convert(source, out)
    assert result["kept_items"] == ITEMS.index(item) + complete
    assert data(out) == data(whole)
    assert (
        json.loads((out / MANIFEST).read_text())["items"]
        == (json.loads((whole / MANIFEST).read_text())["items"])
    )


def test_stopped_while_an_item_is_written(source, whole, tmp_path, monkeypatch):
    out, sync = tmp_path / "out", converting._sync

    def stopping(path):
        if path.parent.parent.name == ".partial-layer_00003":
            raise Stop
        sync(path)

    monkeypatch.setattr(converting, "_sync", stopping)
    with pytest.raises(Stop):
        convert(source, out)
    monkeypatch.undo()
    assert (out / ".partial-layer_00003").exists() and not (out / "layer_00003").exists()
    refused(out, "did not finish")
    assert convert(source, out)["kept_items"] == 4
    assert data(out) == data(whole) and not list(out.glob(".*"))


KILLED = """
import sys, time
from jax_impl.checkpoint import Checkpoint
from jax_impl.convert import convert

def progress(item, size):
    print(item, size, flush=True)
    time.sleep(0.003)

convert(Checkpoint.open(sys.argv[1]), sys.argv[2], progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("item", [ITEMS[0], ITEMS[2], ITEMS[-1]])
def test_a_killed_process(source, whole, tmp_path, item):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source.path), str(out)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.split()[0] == item:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    refused(out, "did not finish")
    assert convert(source, out)["kept_items"] <= ITEMS.index(item)
    assert data(out) == data(whole)


def test_interrupting_the_command_says_how_to_go_on(made, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "_gather", interrupted)
    out = tmp_path / "out"
    assert k3("convert", made / "target", out) == 130
    assert f"`k3 convert {made / 'target'} {out}` goes on" in capsys.readouterr().err
    monkeypatch.undo()
    assert k3("convert", made / "target", out) == 0


def test_a_lost_manifest(source, copy, whole):
    (copy / MANIFEST).unlink()
    refused(copy, "did not finish", MANIFEST, "k3 convert")
    assert convert(source, copy)["kept_items"] == len(ITEMS)
    assert bits(load_weights(Checkpoint.open(copy))) == bits(load_weights(source))


def test_items_that_changed_are_written_again(source, copy, whole):
    (copy / MANIFEST).unlink()
    flip(copy / "layer_00002" / W1 / "0.0.0")
    (copy / "root" / MARKER).write_text("{")
    shutil.rmtree(copy / "layer_00004")
    assert convert(source, copy)["kept_items"] == 3
    assert data(copy) == data(whole)


# ---- damage ----


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_missing_items_and_arrays_are_all_named(copy):
    shutil.rmtree(copy / "layer_00003")
    (copy / "layer_00002" / W1 / "0.0.0").unlink()
    text = refused(copy, f"layer_00002: {W1}: 0.0.0 is missing", "layer_00003: missing")
    assert "tensor(s) cannot be read. Delete manifest.json and run `k3 convert" in text
    assert "3 problem(s)" in text


def test_a_file_of_another_size(copy):
    file = copy / "layer_00002" / W1 / "0.0.0"
    file.write_bytes(file.read_bytes()[:-1])
    refused(copy, f"{W1}: 12,287 bytes of data, expected 12,288")


def test_a_file_that_shrinks_after_the_check(copy):
    checkpoint = Checkpoint.open(copy)
    file = copy / "layer_00002" / W1 / "0.0.0"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1.*cannot be read any more"):
        load_weights(checkpoint)


def test_another_layout_of_an_array(copy):
    file = copy / "layer_00002" / W1 / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"compressor": {"id": "zstd"}}))
    refused(copy, ".zarray has compressor {'id': 'zstd'}, expected None")


def test_changed_data_has_another_checksum(copy, capsys):
    flip(copy / "layer_00002" / W1 / "0.0.0")
    flip(copy / "root" / "language_model.model.norm.weight" / "0")
    with pytest.raises(CheckpointError) as error:
        verify(copy)
    text = str(error.value)
    assert "2 array(s) are damaged" in text and f"layer_00002: {W1}: CRC-32" in text
    assert k3("check", copy, "--checksums") == 2 and "CRC-32" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"", b"[]", b"null", b"{}", b'{"format": "k3-prepared/1"}']
)
def test_a_manifest_that_is_none(copy, content):
    (copy / MANIFEST).write_bytes(content)
    refused(copy, MANIFEST, "k3 convert")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": [4, 64, -1]}, "not consistent"),
        ({"dtype": "float64"}, "not consistent"),
        ({"tensor": "../../x"}, "not consistent"),
        ({"bytes": 3}, "not consistent"),
    ],
)
def test_entries_that_are_not_consistent(copy, change, text):
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["items"]["layer_00002"][W1] |= change
    (copy / MANIFEST).write_text(json.dumps(manifest))
    refused(copy, MANIFEST, text)


def test_another_format_or_configuration(copy):
    file = copy / CONFIG
    file.write_text(file.read_text() + "\n")
    refused(copy, "config.json: changed since the conversion")
    manifest = json.loads((copy / MANIFEST).read_text()) | {"format": "k3-prepared/9"}
    (copy / MANIFEST).write_text(json.dumps(manifest))
    refused(copy, "k3-prepared/9", "k3-prepared/1", "Convert the released checkpoint again")


def test_a_tensor_that_the_manifest_lacks(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["items"]["layer_00002"][W1]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    refused(copy, "experts.0.w1.weight_packed: missing, expected uint8 [64, 48]")


# ---- what is refused ----


def test_places_that_are_not_free(source, whole, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    cases = {
        tmp_path / "file": "a file; expected a directory",
        tmp_path / "full": "holds other files",
        source.path: "holds other files",
        whole: "holds a complete prepared checkpoint",
    }
    for out, text in cases.items():
        with pytest.raises(CheckpointError, match=text):
            convert(source, out)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["x"]


def test_what_is_prepared_already(whole, tmp_path):
    with pytest.raises(CheckpointError, match="expected a released one"):
        convert(Checkpoint.open(whole), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unfinished_conversion_of_another_checkpoint(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, stop_at(ITEMS[2], True))
    before = sorted(p.name for p in out.iterdir())
    make_checkpoint(tmp_path / "other", "tiny", 1, overrides=SMALL)  # the same sizes
    with pytest.raises(CheckpointError, match=r"another checkpoint.*source_sample"):
        convert(Checkpoint.open(tmp_path / "other" / "target"), out)
    assert sorted(p.name for p in out.iterdir()) == before


def test_a_full_disk_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(converting.os, "statvfs", lambda path: Full)
    with pytest.raises(
        CheckpointError, match=r"40,960 bytes are free.*short\. Nothing was written"
    ):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_at_once(source, tmp_path):
    out = tmp_path / "out"

    def second(item, size):
        with pytest.raises(CheckpointError, match="another conversion is writing here"):
            convert(source, out)
        raise Stop

    with pytest.raises(Stop):
        convert(source, out, second)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("1.self_attn.o_proj.weight", np.nan, "NaN or infinite"),
        ("2.block_sparse_moe.experts.3.w2.weight_scale", 255, "scale byte"),
    ],
)
def test_bad_values_stop_the_conversion(made, tmp_path, key, value, text):
    path = Path(shutil.copytree(made / "target", tmp_path / "bad"))
    name = "language_model.model.layers." + key
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name][2, 1] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=text):
        convert(Checkpoint.open(path), tmp_path / "out")
    refused(tmp_path / "out", "did not finish")


def test_a_released_directory_with_a_file_of_that_name(made, tmp_path):
    path = Path(shutil.copytree(made / "target", tmp_path / "x"))
    (path / MANIFEST).write_text("{}")
    assert not Checkpoint.open(path).prepared

import json
import shutil
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jax_impl import loader
from jax_impl.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.loader import load_weights
from jax_impl.make_tiny import make_checkpoint
from jax_impl.memory import DoesNotFitError, cache_bytes
from jax_impl.sharding import ONE_DEVICE
from jax_impl.weights import checkpoint_tensors, weight_table

SOURCE = Path(__file__).parent / "golden" / "model_tiny3"
SHARDS = sorted(SOURCE.glob("model-*.safetensors"))
TENSORS = {name: tensor for file in SHARDS for name, tensor in load_file(file).items()}
LAYER = "language_model.model.layers."
A_LOG = LAYER + "1.self_attn.A_log"
SCALE = LAYER + "2.block_sparse_moe.experts.4.w2.weight_scale"


def shard_name(number, total):
    return f"model-{number:05d}-of-{total:06d}.safetensors"


def write(path, tensors=TENSORS, shards=3, *, order=None, index=None):
    """A checkpoint of these tensors, dealt out to shards in the given order of names."""
    path.mkdir(exist_ok=True)
    shutil.copy(SOURCE / "config.json", path)
    names = sorted(tensors) if order is None else order
    where = {}
    for number in range(shards):
        file, part = shard_name(number + 1, shards), names[number::shards]
        save_file({n: tensors[n] for n in part}, path / file)
        where |= dict.fromkeys(part, file)
    size = sum(t.nbytes for t in tensors.values())
    content = {"metadata": {"total_size": size}, "weight_map": where} | (index or {})
    (path / INDEX).write_text(json.dumps(content))
    return path


def refusal(path):
    """The message with which the checkpoint is refused; no device array may have been made."""
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError) as error:
        load_weights(Checkpoint.open(path))
    assert len(jax.live_arrays()) == before
    return str(error.value)


def leaves(path):
    return [np.asarray(a) for a in jax.tree.leaves(load_weights(Checkpoint.open(path)))]


@pytest.fixture(scope="module")
def original():
    return leaves(SOURCE)


def same(found, wanted):
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(found, wanted, strict=True)
    )


# ---- what a load gives ----


def test_every_tensor_lands_in_its_place():
    checkpoint = Checkpoint.open(SOURCE)
    c, weights = checkpoint.config, load_weights(checkpoint)
    for array in weight_table(c):
        stack = np.asarray(getattr(getattr(weights, array.kind), array.name))
        assert stack.shape == array.shape(c) and str(stack.dtype) == array.dtype
    moe, kda = weights.moe, weights.kda
    w1 = TENSORS[LAYER + "3.block_sparse_moe.experts.5.w1.weight_packed"]
    w3 = TENSORS[LAYER + "3.block_sparse_moe.experts.5.w3.weight_packed"]
    ordinal = c.mlp_ordinal(3)
    np.testing.assert_array_equal(moe.w13_packed[ordinal, 5], np.concatenate([w1, w3]))
    np.testing.assert_array_equal(moe.w2_scale[c.mlp_ordinal(2), 4], TENSORS[SCALE])
    conv = [TENSORS[f"{LAYER}3.self_attn.{x}_conv1d.weight"][:, 0] for x in "qkv"]
    np.testing.assert_array_equal(kda.conv1d[c.attn_ordinal(3)], np.concatenate(conv))
    np.testing.assert_array_equal(kda.A_log[1], TENSORS[A_LOG][: c.kda_num_heads])
    assert kda.A_log.dtype == np.float32


@pytest.mark.parametrize("shards", [1, 3, 96])
def test_any_number_of_shards(tmp_path, original, shards):
    assert same(leaves(write(tmp_path / "x", shards=shards)), original)


def test_any_order_inside_shards(tmp_path, original):
    order = [str(n) for n in np.random.default_rng(0).permutation(sorted(TENSORS))]
    assert same(leaves(write(tmp_path / "x", shards=5, order=order)), original)


def test_one_file_without_an_index(tmp_path, original):
    write(tmp_path / "x", shards=1)
    (tmp_path / "x" / INDEX).unlink()
    (tmp_path / "x" / shard_name(1, 1)).rename(tmp_path / "x" / SINGLE)
    assert same(leaves(tmp_path / "x"), original)


@pytest.mark.parametrize("block", [1, 3000])
def test_small_blocks_give_the_same_arrays(monkeypatch, original, block):
    monkeypatch.setattr(loader, "BLOCK_BYTES", block if block > 1 else 600)
    assert same(leaves(SOURCE), original)


def test_progress_counts_every_byte():
    seen = []
    weights = load_weights(Checkpoint.open(SOURCE), seen.append)
    assert sum(seen) == sum(a.nbytes for a in jax.tree.leaves(weights))


def test_placing_is_in_place():
    import jax.numpy as jnp

    stack, block = jnp.zeros((4, 256, 256)), np.ones((1, 64, 256), np.float32)
    start = tuple(np.int32(i) for i in (2, 64, 0))
    place = loader._placer(ONE_DEVICE, 0)
    memory = place.lower(stack, block, start).compile().memory_analysis()
    assert memory.alias_size_in_bytes == stack.nbytes and memory.temp_size_in_bytes == 0
    address = stack.unsafe_buffer_pointer()
    placed = place(stack, block, start)
    assert placed.unsafe_buffer_pointer() == address and stack.is_deleted()
    assert float(placed.sum()) == block.size and float(placed[2, 64:128].sum()) == block.size


def test_other_parts_of_the_release_are_left_out_by_rule(tmp_path, original):
    extra = {"vision_tower.patch.weight": np.ones(3, np.float16), "mm_projector.a": np.ones(2)}
    path = write(tmp_path / "x", TENSORS | extra)
    checkpoint = Checkpoint.open(path)
    assert set(checkpoint.ignored) == set(extra)
    assert same(leaves(path), original)


def test_files_that_the_index_does_not_name_are_listed(tmp_path):
    path = write(tmp_path / "x")
    save_file({"a": np.ones(2)}, path / "stray.safetensors")
    assert Checkpoint.open(path).unnamed_files == ("stray.safetensors",)


def test_windows_and_rows_of_a_tensor():
    checkpoint = Checkpoint.open(SOURCE)
    parts = {n: p for n, p, _ in checkpoint_tensors(checkpoint.config)}
    cases = {
        LAYER + "0.self_attn.o_proj.weight": lambda t: t[2:5, 8:24],
        LAYER + "0.self_attn.q_conv1d.weight": lambda t: t[8:24, 0],
        LAYER + "0.self_attn.f_a_proj.weight": lambda t: t[2:5],
    }
    with checkpoint.reader() as reader:
        for name, cut in cases.items():
            found = reader.read(name, parts[name], (8, 24), rows=(2, 5))
            np.testing.assert_array_equal(found, cut(TENSORS[name]))


# ---- a load that cannot fit ----


def test_what_does_not_fit_is_refused_before_reading(monkeypatch):
    checkpoint, run = Checkpoint.open(SOURCE), RunConfig()
    size = sum(a.nbytes for a in jax.tree.leaves(load_weights(checkpoint)))
    free = size + cache_bytes(checkpoint.config, run) - 10
    monkeypatch.setattr(loader, "free_device_bytes", lambda: free)
    load_weights(checkpoint)
    monkeypatch.setattr(type(checkpoint), "reader", None)
    before = len(jax.live_arrays())
    with pytest.raises(DoesNotFitError, match=rf"{free:,} bytes\) are free.*\(10 bytes\) short"):
        load_weights(checkpoint, run=run)
    assert len(jax.live_arrays()) == before


def test_free_memory_of_the_device():
    class Device:
        platform = "gpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert loader.free_device_bytes(Device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert loader.free_device_bytes(Device(None)) is None
    cpu = loader.free_device_bytes()
    assert cpu is None or cpu > 1 << 20


# ---- A_log ----


def with_a_log(path, values):
    return write(path, TENSORS | {A_LOG: np.asarray(values, np.float32)})


@pytest.mark.parametrize("length", [4, 16, 128])
def test_padded_a_log(tmp_path, length):
    heads = [0.01, 0.02, 0.03, 0.04]
    path = with_a_log(tmp_path / "x", heads + [0.0] * (length - 4))
    found = np.asarray(load_weights(Checkpoint.open(path)).kda.A_log[1])
    np.testing.assert_array_equal(found, np.float32(heads))


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_a_padding_that_is_not_zero_is_refused(tmp_path, value):
    values = np.zeros(16)
    values[11] = value
    text = refusal(with_a_log(tmp_path / "x", values))
    assert A_LOG in text and "entry 11" in text and "expected zeros from entry 4" in text


@pytest.mark.parametrize("length", [3, 5, 15, 17, 127, 129])
def test_other_lengths_of_a_log_are_refused(tmp_path, length):
    text = refusal(with_a_log(tmp_path / "x", np.zeros(length)))
    assert A_LOG in text and f"[{length}]" in text and "[4]" in text and "[16]" in text


def test_ranks_get_their_heads_and_never_a_padding_entry(tmp_path):
    """Known from others: an even split of 128 entries gives rank 1 of 16 the value 0.08."""
    over = {"linear_attn_config": {"num_heads": 96, "head_dim": 8}}
    make_checkpoint(tmp_path / "m", "tiny", overrides=over, shards=1)
    path = tmp_path / "m" / "target"
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = LAYER + "0.self_attn.A_log"
    assert tensors[name].shape == (128,)
    tensors[name] = np.float32([*(0.01 * i for i in range(96)), *[0.0] * 32])
    save_file(tensors, file)
    checkpoint = Checkpoint.open(path)
    part = next(p for n, p, _ in checkpoint_tensors(checkpoint.config) if n == name)
    with checkpoint.reader() as reader:
        ranks = [reader.read(name, part, (6 * r, 6 * r + 6)) for r in range(16)]
    np.testing.assert_array_equal(np.concatenate(ranks), tensors[name][:96])
    assert ranks[1][0] == np.float32(0.06) and ranks[15][-1] == np.float32(0.95)
    tensors[name][100] = 1.0
    save_file(tensors, file)
    assert "entry 100 is 1, expected zeros from entry 96" in refusal(path)
    save_file(tensors | {name: np.zeros(97, np.float32)}, file)
    index = json.loads((path / INDEX).read_text())
    index["metadata"]["total_size"] -= 31 * 4
    (path / INDEX).write_text(json.dumps(index))
    assert "shape [97], expected [96]" in refusal(path)


# ---- files ----


@pytest.mark.parametrize("lost", [[2], [1, 3]])
def test_missing_shards_are_all_named(tmp_path, lost):
    path = write(tmp_path / "x")
    for number in lost:
        (path / shard_name(number, 3)).unlink()
    text = refusal(path)
    assert f"{3 - len(lost)} of 3 shards found" in text and "download looks incomplete" in text
    for number in range(1, 4):
        assert (shard_name(number, 3) in text) == (number in lost)


def test_no_directory_no_index_no_config(tmp_path):
    assert "not a directory" in refusal(tmp_path / "none")
    path = write(tmp_path / "x")
    (path / INDEX).unlink()
    text = refusal(path)
    assert "3 other safetensors file(s)" in text and "download looks incomplete" in text
    (path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "content",
    [
        b"{", b"\xff", b"", b"[]", b"null", b"{}", b'{"weight_map": 3}', b'{"weight_map": null}',
        b'{"weight_map": {}, "metadata": 3}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_index_that_is_none(tmp_path, content):
    path = write(tmp_path / "x")
    (path / INDEX).write_bytes(content)
    text = refusal(path)
    assert INDEX in text and ("not an index" in text or "missing" in text)


@pytest.mark.parametrize("file", ["../a", "/etc/passwd", "", "..", 3, None, ["a"], "a/b"])
def test_shard_names_that_leave_the_directory(tmp_path, file):
    path = write(tmp_path / "x", index={"weight_map": {"a": file}})
    text = refusal(path)
    assert repr(file) in text and "plain file names" in text


@pytest.mark.parametrize("total", ["12", 1.5, [], True])
def test_total_size_of_another_type(tmp_path, total):
    path = write(tmp_path / "x", index={"metadata": {"total_size": total}})
    assert f"total_size {total!r}" in refusal(path)


def test_total_size_that_differs(tmp_path):
    path = write(tmp_path / "x", index={"metadata": {"total_size": 12_345}})
    found = sum(t.nbytes for t in TENSORS.values())
    text = refusal(path)
    assert "12,345" in text and f"{found:,}" in text


def test_total_size_may_be_absent(tmp_path, original):
    assert same(leaves(write(tmp_path / "x", index={"metadata": {}})), original)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 20_000, -1])
def test_truncated_shards(tmp_path, keep):
    path = write(tmp_path / "x")
    file = path / shard_name(2, 3)
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    text = refusal(path)
    assert file.name in text and "damaged or cut short" in text
    assert f"{len(data[:keep]):,} bytes on disk" in text
    assert "missing" not in text  # what the shard should hold is not reported a second time


def test_a_shard_that_changes_after_the_check(tmp_path):
    path = write(tmp_path / "x")
    checkpoint = Checkpoint.open(path)
    file = path / shard_name(2, 3)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read any more"):
        load_weights(checkpoint)


# ---- tensors ----


def test_a_renamed_tensor(tmp_path):
    tensors = dict(TENSORS)
    tensors[A_LOG + "arithm"] = tensors.pop(A_LOG)
    text = refusal(write(tmp_path / "x", tensors))
    assert f"{A_LOG}: missing, expected float32 [4]" in text
    assert f"{A_LOG}arithm: left over (float32 [16])" in text


def test_a_left_over_tensor_outside_the_ignored_roots(tmp_path):
    text = refusal(write(tmp_path / "x", TENSORS | {"draft.a": np.ones((2, 3), np.int64)}))
    assert "draft.a: left over (I64 [2, 3])" in text


def test_a_tensor_that_the_index_lacks_or_misplaces(tmp_path):
    path = write(tmp_path / "x")
    index = json.loads((path / INDEX).read_text())
    held = index["weight_map"].pop(A_LOG)
    names = [shard_name(n, 3) for n in (1, 2, 3)]
    other = next(n for n in names if index["weight_map"][SCALE] != n)
    index["weight_map"][SCALE] = other
    (path / INDEX).write_text(json.dumps(index))
    text = refusal(path)
    assert f"{A_LOG}: in {held}, but not in the index" in text
    assert f"{SCALE}: the index places it in {other}, which lacks it" in text


def test_many_problems_are_reported_at_once(tmp_path):
    norm, proj = LAYER + "0.input_layernorm.weight", LAYER + "4.self_attn.o_proj.weight"
    tensors = dict(TENSORS)
    del tensors[LAYER + "3.mlp_res_proj.weight"]
    tensors |= {
        norm: TENSORS[norm].astype(np.float32),
        proj: np.ascontiguousarray(TENSORS[proj].T),
        A_LOG: TENSORS[A_LOG].astype(ml_dtypes.bfloat16),
        "stray": np.ones(3),
    }
    path = write(tmp_path / "x", tensors, index={"metadata": {"total_size": 1}})
    text = refusal(path)
    shape = list(TENSORS[proj].shape)
    for line in (
        "6 problem(s)",
        f"{norm}: dtype float32, expected bfloat16",
        f"{proj}: shape {shape[::-1]}, expected {shape}",
        f"{A_LOG}: dtype bfloat16, expected float32",
        "3.mlp_res_proj.weight: missing, expected bfloat16 [1, 64]",
        "stray: left over (F64 [3])",
    ):
        assert line in text
    assert "total_size is 1 bytes" in text


def test_a_damaged_shard_does_not_hide_other_problems(tmp_path):
    path = write(tmp_path / "x", TENSORS | {"stray": np.ones(3)})
    index = json.loads((path / INDEX).read_text())["weight_map"]
    bad = next(f for f in sorted(set(index.values())) if f != index["stray"])
    (path / bad).write_bytes(b"short")
    text = refusal(path)
    assert "2 problem(s)" in text and bad in text and "stray: left over" in text


def test_very_many_problems_are_counted(tmp_path):
    text = refusal(write(tmp_path / "x", {"a": np.ones(2)}, shards=1))
    assert "... and " in text and text.count("missing") <= 20


def test_a_nan_scale_is_refused(tmp_path):
    scale = TENSORS[SCALE].copy()
    scale[7, 0] = 255
    path = write(tmp_path / "x", TENSORS | {SCALE: scale})
    with pytest.raises(CheckpointError) as error:
        load_weights(Checkpoint.open(path))
    text = str(error.value)
    assert SCALE in text and "row 7, group 0" in text and "expected 0..254" in text


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        (
            "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
            np.nan,
            "[3]",
        ),
        ("language_model.model.layers.0.self_attn.o_proj.weight", np.inf, "[3, 5]"),
        ("language_model.model.layers.0.self_attn.A_log", -np.inf, "[3]"),
    ],
)
def test_values_that_are_not_finite_are_refused(tmp_path, name, value, place):
    tensor = TENSORS[name].copy()
    tensor[(3, 5)[: tensor.ndim]] = value
    path = write(tmp_path / "x", TENSORS | {name: tensor})
    with pytest.raises(CheckpointError) as error:
        load_weights(Checkpoint.open(path))
    text = str(error.value)
    assert name in text and f"first at {place}" in text and "expected finite" in text


# ---- any damage ----


@pytest.fixture(scope="module")
def shard():
    """The smaller recorded shard: name, bytes, length of its header with the length field."""
    file = min(SHARDS, key=lambda f: f.stat().st_size)
    data = file.read_bytes()
    return file.name, data, 8 + int.from_bytes(data[:8], "little")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_damage_goes_unseen(data, shard, original):
    name, content, header = shard
    damaged = bytearray(content)
    kind = data.draw(st.sampled_from(["length", "header", "body", "cut"]))
    low, high = {"length": (0, 7), "header": (8, header - 1)}.get(kind, (header, len(content) - 1))
    if kind == "cut":
        del damaged[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(low, high))] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        for file in SOURCE.iterdir():
            if not file.name.startswith("golden") and file.name != name:
                (path / file.name).symlink_to(file)
        (path / name).write_bytes(damaged)
        try:
            found = leaves(path)
        except (CheckpointError, ConfigError):
            return
    assert kind != "cut" or bytes(damaged) == content
    flips = sum(a != b for a, b in zip(damaged, content, strict=True)) if kind == "body" else 0
    differing = 0
    for a, b in zip(found, original, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        differing += int((a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)).sum())
    assert differing <= flips


def test_the_recorded_models_open():
    for name in ("model_tiny3", "model_tiny16", "model_realdims"):
        checkpoint = Checkpoint.open(SOURCE.parent / name)
        assert checkpoint.config == ModelConfig.load(SOURCE.parent / name)
        assert not checkpoint.ignored and checkpoint.unnamed_files == ("golden.safetensors",)

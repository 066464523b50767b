"""The maker of small checkpoints: stored hashes, names and shapes of the format, safe writing.

The expected names and shapes are typed here from the tables of the released checkpoint, apart from
the maker's own tables. What this does not show: that the models compute anything sensible.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from jax_impl import make_tiny
from jax_impl.make_tiny import (
    PRESETS,
    describe,
    draft_tensors,
    make_checkpoint,
    plan,
    target_tensors,
)
from jax_impl.tiny_presets import DraftSizes, TargetSizes, draft_config, text_config

HASHES = Path(__file__).parent / "golden" / "synthetic_seed7_hashes.json"
RELEASED = TargetSizes(
    layers=93, hidden=7168, vocab=163841, dense=33792, block=12, kda_heads=96, kda_dim=128,
    mla_heads=96, q_lora=1536, kv_lora=512, nope=128, rope=64, v=128,
    experts=896, top_k=16, latent=3584, moe=3072)  # fmt: skip
RELEASED_DRAFT = DraftSizes(
    layers=5, heads=64, q_lora=1536, kv_lora=512, nope=128, rope=64, v=128, dense=14336,
    taps=(2, 23, 47, 71, 89), rank=256)  # fmt: skip


def expected_target(c):
    """Name to (dtype, shape) of every target tensor, for the text config `c`."""
    d, vocab, root = c["hidden_size"], c["vocab_size"], "language_model.model."
    out = {root + "embed_tokens": (vocab, d), "language_model.lm_head": (vocab, d)}
    out |= {root + "norm": (d,), root + "output_attn_res_norm": (d,)}
    out |= {root + "output_attn_res_proj": (1, d)}
    for layer in range(c["num_hidden_layers"]):
        rows = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
        rows |= {"self_attention_res_norm": (d,), "mlp_res_norm": (d,)}
        rows |= {"self_attention_res_proj": (1, d), "mlp_res_proj": (1, d)}
        kda = (layer + 1) % 4 and layer != c["num_hidden_layers"] - 1
        rows |= expected_kda(c) if kda else expected_mla(c, gate=True)
        rows |= expected_moe(c) if layer else expected_mlp("mlp.", d, c["intermediate_size"])
        out |= {f"{root}layers.{layer}.{name}": shape for name, shape in rows.items()}
    bare = ("A_log", "dt_bias", "e_score_correction_bias", "weight_packed", "weight_scale")
    out = {n if n.endswith(bare) else f"{n}.weight": shape for n, shape in out.items()}
    return {name: (expected_dtype(name), shape) for name, shape in out.items()}


def expected_kda(c):
    d, heads = c["hidden_size"], c["linear_attn_config"]["num_heads"]
    dim = c["linear_attn_config"]["head_dim"]
    rows = {f"{n}_proj": (heads * dim, d) for n in "qkvg"} | {"o_proj": (d, heads * dim)}
    rows |= {"f_a_proj": (dim, d), "f_b_proj": (heads * dim, dim), "b_proj": (heads, d)}
    rows |= {f"{n}_conv1d": (heads * dim, 1, 4) for n in "qkv"}
    rows |= {"A_log": (128,), "dt_bias": (heads * dim,), "o_norm": (dim,)}
    return {f"self_attn.{n}": shape for n, shape in rows.items()}


def expected_mla(c, gate):
    d, heads, q, kv = (
        c[n] for n in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, v = (c[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rows = {"q_a_proj": (q, d), "q_a_layernorm": (q,), "q_b_proj": (heads * (nope + rope), q)}
    rows |= {"kv_a_proj_with_mqa": (kv + rope, d), "kv_a_layernorm": (kv,)}
    rows |= {"kv_b_proj": (heads * (nope + v), kv), "o_proj": (d, heads * v)}
    rows |= {"g_proj": (heads * v, d)} if gate else {}
    return {f"self_attn.{n}": shape for n, shape in rows.items()}


def expected_mlp(prefix, d, width):
    rows = {"gate_proj": (width, d), "up_proj": (width, d), "down_proj": (d, width)}
    return {prefix + n: shape for n, shape in rows.items()}


def expected_moe(c):
    d, latent, width, experts = (
        c[n]
        for n in (
            "hidden_size",
            "routed_expert_hidden_size",
            "moe_intermediate_size",
            "num_experts",
        )
    )
    rows = {"gate": (experts, d), "gate.e_score_correction_bias": (experts,)}
    rows |= {"routed_expert_down_proj": (latent, d), "routed_expert_up_proj": (d, latent)}
    rows |= {"routed_expert_norm": (latent,)}
    rows |= expected_mlp("shared_experts.", d, width * c["num_shared_experts"])
    for expert in range(experts):
        for name in ("w1", "w2", "w3"):
            o, i = (latent, width) if name == "w2" else (width, latent)
            rows[f"experts.{expert}.{name}.weight_packed"] = (o, i // 2)
            rows[f"experts.{expert}.{name}.weight_scale"] = (o, i // 32)
    return {f"block_sparse_moe.{n}": shape for n, shape in rows.items()}


def expected_dtype(name):
    if name.endswith(("weight_packed", "weight_scale")):
        return "uint8"
    f32 = r"(A_log|dt_bias|conv1d\.weight|self_attn\.o_norm\.weight|e_score_correction_bias)$"
    return "float32" if re.search(f32, name) else "bfloat16"


def expected_draft(c, embed_copy):
    """Name to (dtype, shape) of every drafter tensor, for its config `c`; all are BF16."""
    d, vocab, rank = c["hidden_size"], c["vocab_size"], c["markov_rank"]
    out = {"context_proj": (d, d * len(c["target_layer_ids"])), "context_norm": (d,)}
    for layer in range(c["num_hidden_layers"]):
        rows = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
        rows |= expected_mla(c, gate=False) | expected_mlp("mlp.", d, c["intermediate_size"])
        out |= {f"layers.{layer}.{name}": shape for name, shape in rows.items()}
    out |= {"markov_head.markov_w1": (vocab, rank), "markov_head.markov_w2": (vocab, rank)}
    out |= {"final_norm": (d,), "confidence_head.proj": (1, d + rank)}
    out |= {"embed_tokens": (vocab, d)} if embed_copy else {}
    out = {f"{name}.weight": shape for name, shape in out.items()}
    out["confidence_head.proj.bias"] = (1,)
    return {name: ("bfloat16", shape) for name, shape in out.items()}


def table(tensors):
    """Name to (dtype, shape), refusing a name that occurs twice."""
    out = {t.name: (t.dtype.name, t.shape) for t in tensors}
    assert len(out) == len(tensors)
    return out


def digest(name, array):
    """The first 16 hex digits of the hash of a tensor's name, dtype, shape and bytes."""
    text = f"{name} {array.dtype.name} {array.shape} ".encode()
    return hashlib.sha256(text + array.tobytes()).hexdigest()[:16]


def read(path):
    """Every tensor of a safetensors file."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_target(path):
    """Every tensor of a target, found through the index, which must agree with the files."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shards = {file.name: read(file) for file in sorted(path.glob("*.safetensors"))}
    assert {n: f for f, part in shards.items() for n in part} == index["weight_map"]
    found = {name: array for part in shards.values() for name, array in part.items()}
    assert sum(array.nbytes for array in found.values()) == index["metadata"]["total_size"]
    return found


def test_synthetic_values_are_those_of_the_recipe_bit_for_bit():
    stored = json.loads(HASHES.read_text())
    made = plan("synthetic")
    for part, tensors in (("target", made.target), ("draft", made.draft)):
        assert {t.name: digest(t.name, t.fill(7)) for t in tensors} == stored[part]
    for part, config in (("target", made.target_config), ("draft", made.draft_config)):
        text = json.dumps(config, sort_keys=True).encode()
        assert hashlib.sha256(text).hexdigest()[:16] == stored["config"][part]


@pytest.mark.parametrize("preset", PRESETS)
def test_names_shapes_and_dtypes_of_a_preset_are_those_of_the_format(preset):
    made = plan(preset)
    text = made.target_config["text_config"]
    assert table(made.target) == expected_target(text)
    assert table(made.draft) == expected_draft(made.draft_config, PRESETS[preset].draft.embed_copy)
    assert max(made.draft_config["target_layer_ids"]) < text["num_hidden_layers"]
    assert len(made.shards) == PRESETS[preset].shards and all(made.shards)


def test_released_sizes_give_the_tensor_count_and_bytes_of_the_released_checkpoint():
    # The released vocabulary is a multiple of 5, which a checkpoint with the bigram cannot have.
    text = text_config(RELEASED) | {"vocab_size": 163_840}
    target = target_tensors(text, RELEASED)
    # The release's 497,220 less 165 of the vision tower and 3 of the projector.
    assert len(target) == 497_052
    assert sum(t.nbytes for t in target) == 1_559_965_606_912
    assert text["linear_attn_config"]["full_attn_layers"] == [*range(4, 93, 4), 93]
    draft = draft_tensors(draft_config(RELEASED_DRAFT, text), RELEASED_DRAFT)
    assert len(draft) == 67 and sum(t.nbytes for t in draft) == 2 * 2_387_907_841


def test_tp16_cuts_into_sixteen_whole_parts():
    made = plan("tp16")
    c, draft = made.target_config["text_config"], made.draft_config
    assert c["moe_intermediate_size"] % (16 * 32) == 0
    counts = [c[n] for n in (
        "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_experts",
        "routed_expert_hidden_size", "q_lora_rank", "kv_lora_rank")]  # fmt: skip
    counts += [
        c["linear_attn_config"]["num_heads"],
        draft["num_attention_heads"],
        draft["intermediate_size"],
    ]
    assert [n % 16 for n in counts] == [0] * len(counts)


@pytest.mark.parametrize(("preset", "low", "high"), [
    ("tiny", 1, 8), ("synthetic", 90, 120), ("tp16", 50, 150), ("deep", 1, 15), ("big", 2000, 4000),
])  # fmt: skip
def test_presets_have_the_sizes_they_are_meant_to_have(preset, low, high):
    target = describe(preset)["target"]
    assert low < target["bytes"] / 1e6 < high
    assert preset != "big" or target["shards"] >= 8


def test_files_hold_the_values_and_a_second_run_writes_the_same_bytes(tmp_path):
    told = make_checkpoint(tmp_path / "a", "tiny", seed=3)
    make_checkpoint(tmp_path / "b", "tiny", seed=3)
    make_checkpoint(tmp_path / "c", "tiny", seed=4)
    made = plan("tiny")
    found = read_target(tmp_path / "a" / "target") | read(tmp_path / "a/draft/model.safetensors")
    wanted = {t.name: t for t in made.target + made.draft}
    assert {n: digest(n, x) for n, x in found.items()} == {
        n: digest(n, t.fill(3)) for n, t in wanted.items()
    }
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(files) == told["target"]["shards"] + 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert json.loads((tmp_path / "a/target/config.json").read_text()) == told["target"]["config"]
    other = read(tmp_path / "c/draft/model.safetensors")
    assert all((other[n] != found[n]).any() for n in other)


def test_the_drafter_carries_the_targets_embedding_and_most_tokens_point_to_their_successor():
    made = plan("tiny")
    target = {t.name: t for t in made.target}
    draft = {t.name: t.fill(0).astype(np.float32) for t in made.draft}
    embed = target["language_model.model.embed_tokens.weight"].fill(0).astype(np.float32)
    head = target["language_model.lm_head.weight"].fill(0).astype(np.float32)
    assert (draft["embed_tokens.weight"] == embed).all()
    successor = (5 * np.arange(len(embed)) + 7) % len(embed)
    assert ((embed @ head.T).argmax(1) == successor).mean() > 0.95
    markov = draft["markov_head.markov_w1.weight"] @ draft["markov_head.markov_w2.weight"].T
    # Neither never nor always right, so that acceptance and rejection both occur.
    assert 0.7 < (markov.argmax(1) == successor).mean() < 1.0


def test_overrides_change_what_follows_from_them():
    made = plan("tiny", shards=5, overrides={"num_hidden_layers": 3, "num_attention_heads": 2})
    text = made.target_config["text_config"]
    assert text["linear_attn_config"]["kda_layers"] == [1, 2]
    assert text["linear_attn_config"]["full_attn_layers"] == [3]
    assert text["num_key_value_heads"] == 2 and len(made.shards) == 5
    assert (
        made.draft_config["target_layer_ids"] == [1] and made.draft_config["num_target_layers"] == 1
    )
    assert table(made.target) == expected_target(text)
    assert table(made.draft) == expected_draft(made.draft_config, embed_copy=True)
    linear = plan("tiny", overrides={"linear_attn_config": {"head_dim": 16}}).target_config[
        "text_config"
    ]
    assert linear["linear_attn_config"]["head_dim"] == 16


@pytest.mark.parametrize(("overrides", "words"), [
    ({"hiden_size": 64}, ["hiden_size"]),
    ({"linear_attn_config": {"heads": 2}}, ["heads"]),
    ({"moe_intermediate_size": 40, "vocab_size": 50}, ["_size = 40", "vocab_size = 50"]),
    ({"num_experts": 2}, ["num_experts_per_token = 3", "num_experts = 2"]),
    ({"linear_attn_config": {"kda_layers": [0, 1]}}, ["counted from 1"]),
])  # fmt: skip
def test_impossible_overrides_are_refused_all_at_once(overrides, words):
    with pytest.raises(ValueError) as error:
        plan("tiny", overrides=overrides)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("arguments", [{"preset": "huge"}, {"shards": 0}, {"shards": 10**6}])
def test_unknown_preset_and_impossible_shard_counts_are_refused(arguments):
    with pytest.raises(ValueError, match="expected"):
        plan(**arguments)


@pytest.mark.parametrize("shards", [1, 2, 7, 715, 716])
def test_every_shard_holds_something_and_sizes_are_even(shards):
    parts = plan("tiny", shards=shards).shards
    sizes = [sum(t.nbytes for t in part) for part in parts]
    largest = max(t.nbytes for part in parts for t in part)
    assert len(parts) == shards and min(map(len, parts)) > 0
    assert max(sizes) <= sum(sizes) / shards + 1.5 * largest
    assert [t.name for part in parts for t in part] == sorted(
        t.name for part in parts for t in part
    )


def test_a_directory_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("kept", "file"):
        with pytest.raises(FileExistsError, match="expected an absent or empty directory"):
            make_checkpoint(tmp_path / name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "kept", "notes"]
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "empty")
    assert sorted(p.name for p in (tmp_path / "empty").iterdir()) == ["draft", "target"]


@pytest.mark.parametrize("stop_at", range(5))
def test_interrupted_writing_leaves_nothing_behind(tmp_path, monkeypatch, stop_at):
    # The write that is interrupted: three shards, the index and configs, the drafter's file.
    written = []
    for name in ("save_file", "_write_json"):
        plain = getattr(make_tiny, name)

        def stopping(*arguments, plain=plain, **settings):
            if len(written) == stop_at:
                raise KeyboardInterrupt
            written.append(arguments)
            plain(*arguments, **settings)

        monkeypatch.setattr(make_tiny, name, stopping)
    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []

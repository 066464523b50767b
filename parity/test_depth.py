"""Full depth at tiny width, and real width at little depth: JAX against PyTorch, layer by layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from jax_impl.make_tiny import make_checkpoint
from parity.driver import Driver
from parity.layerwise import build_layer
from parity.op_torch import DTYPES
from parity.pair import check_layers, reference
from parity.verdict import Where, compare
from torch_ref.model import Model
from torch_ref.numerics import Numerics

# One TP16 rank's slice of the released widths as a model of its own: 6 of 96 heads of each kind,
# 192 of 3072 expert and 384 of 6144 shared columns, all 896 experts (983 MB a layer), the whole
# router and latent projections. One KDA and one MLA layer, both with experts.
RANK_SLICE = {
    "hidden_size": 7168,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 192,
    "routed_expert_hidden_size": 3584,
    "attn_res_block_size": 12,
    "intermediate_size": 64,
    "vocab_size": 256,
    "linear_attn_config": {
        "num_heads": 6,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "full_attn_layers": [2],
        "kda_layers": [1],
    },
}


def layer_verdicts(checkpoint: Path, dtype: str, profile: str, tokens: int) -> list:
    """All injected comparisons of one checkpoint."""
    driver = Driver.open(checkpoint, dtype, profile, tokens)
    model = Model.load(checkpoint, Numerics(DTYPES[dtype], profile))
    ids = np.random.default_rng(5).integers(0, driver.config.vocab_size, tokens)
    where = Where("model", checkpoint.parent.name, "-", dtype, profile, "torch_ref")
    return list(check_layers(where, driver, model, ids, reference(model, ids)[1]))


def failures(verdicts: list) -> list[str]:
    """What did not pass, in words."""
    return [
        f"{v.where.case} {v.quantity}: {v.judged} {v.value} > {v.limit} {v.note}"
        for v in verdicts
        if not v.passed
    ]


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("deep") / "deep"
    make_checkpoint(directory, "deep", 0)
    return directory / "target"


@pytest.mark.parametrize(
    ("dtype", "profile"),
    [("float32", "H"), pytest.param("bfloat16", "V", marks=pytest.mark.slow)],  # twice the time
)
def test_93_layers_one_by_one_from_one_compiled_layer_per_kind(deep, dtype, profile):
    build_layer.cache_clear()
    verdicts = layer_verdicts(deep, dtype, profile, tokens=5)
    assert not failures(verdicts)
    assert {v.where.case for v in verdicts} >= {f"injected layer{i:02d}" for i in range(93)}
    # two callables (block start or not); the first serves dense+KDA, KDA and, twice in the
    # pattern, no MLA layer; the second KDA and MLA
    built = build_layer.cache_info()
    assert built.misses == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("dtype", "profile"), [("float32", "H"), ("bfloat16", "V")])
def test_93_layers_in_one_step_and_no_snapshot_ever_changes(deep, dtype, profile):
    ids = np.array([3, 1, 4, 1, 5])
    driver = Driver.open(deep, dtype, profile, len(ids))
    logits, _, _, record = driver.whole(ids)
    model = Model.load(deep, Numerics(DTYPES[dtype], profile))
    want, _ = reference(model, ids)
    where = Where("model", "deep", "93 layers", dtype, profile, "torch_ref")
    verdict = compare(where, "logits", logits, want, "pair_logits", logits=True)
    assert verdict.passed, failures([verdict])
    starts = [i for i in range(93) if driver.config.starts_block(i)]
    assert starts == [0, 12, 24, 36, 48, 60, 72, 84]
    for j, layer in enumerate(starts):
        assert np.array_equal(record["snapshots"][:, j], record[f"layer{layer:02d}.prefix_in"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_real_widths_of_one_tp16_rank(tmp_path):
    make_checkpoint(tmp_path / "slice", "synthetic", 0, overrides=RANK_SLICE, shards=2)
    for dtype, profile in (("float32", "H"), ("bfloat16", "H"), ("bfloat16", "V")):
        assert not failures(layer_verdicts(tmp_path / "slice" / "target", dtype, profile, tokens=4))

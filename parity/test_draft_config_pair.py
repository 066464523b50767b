"""Both implementations accept the same drafter configurations, and refuse the same."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from jax_impl.config import RELEASED_CONFIG, ConfigError, ModelConfig
from jax_impl.draft_config import DraftConfig
from parity.test_draft_config import RELEASED
from torch_ref import config as torch_config
from torch_ref import draft_config as torch_draft

ROPE = RELEASED["rope_parameters"]
# fmt: off
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "non_causal": (True, False, None, 1, "x"), "is_causal": (True, False), "causal": (True,),
    "fc_norm": (True, False, None, 0, 1), "aux_hidden_stream": ("prefix", "attn_res", None, "x"),
    "sliding_window": (None, 9, 0, -1, 2.5, True, "x"), "hidden_act": ("silu", "gelu", None),
    "block_size": (7, None), "dspark_bonus_anchor": (True, False, None, 0),
    "sample_from_anchor": (True, False, None, 1), "dspark_draft_topk": (None, 5),
    "n_predict": (None, 7), "attention_bias": (False, True, None),
    "attention_dropout": (0, 0.0, None, 0.1, False), "rope_interleave": (True, False, None),
    "initializer_range": (0.02,), "use_cache": (True,), "auto_map": ({"a": "b"},),
    "_name_or_path": ("x",), "transformers_version": ("4",), "rope_scaling": (None,),
    "dtype": ("bfloat16", "float32", None), "surprise": (1,), "mlp_bias": (False,),
    "architectures": (["Other"],), "use_qk_norm": (True,),
    "target_layer_ids": (
        [2.0, 23, 47, 71, 89], [True, 23, 47, 71, 89], "abcde", (2, 23, 47, 71, 89), [],
        [2, 2, 47, 71, 89], [2, 23, 47, 71, 93], [2, 23], [2, 23, 71, 47, 89], [0, 1, 2, 3, 92],
    ),
}
# fmt: on


def configurations() -> dict[str, dict[str, Any]]:
    """The released file, and files that differ from it in one place."""
    found = {"released": RELEASED}
    for name, value in RELEASED.items():
        found[f"{name} missing"] = {k: v for k, v in RELEASED.items() if k != name}
        others: list[Any] = [None, "x"]
        if isinstance(value, bool):
            others += [not value, int(value)]
        elif isinstance(value, int | float):
            others += [0, -1, value + 1, float(value), value + 0.5, True, 2**31, float("nan")]
        found |= {f"{name} {other!r}": RELEASED | {name: other} for other in others}
    for name, value in ROPE.items():
        kept = {k: v for k, v in ROPE.items() if k != name}
        found[f"rope_parameters.{name} missing"] = RELEASED | {"rope_parameters": kept}
        others = [None, "x", 0, -1, True, 1, float("inf")]
        others += [] if isinstance(value, str) else [value + 0.5]
        for other in others:
            rope = {"rope_parameters": ROPE | {name: other}}
            found[f"rope_parameters.{name} {other!r}"] = RELEASED | rope
    plain = {"rope_type": "default", "rope_theta": 50000}
    found["plain rotation"] = RELEASED | {"rope_parameters": plain}
    found["unknown in rope"] = RELEASED | {"rope_parameters": ROPE | {"truncate": True}}
    theta = {"rope_theta": 1, "rope_parameters": ROPE | {"rope_theta": 1}}
    found["theta 1"] = RELEASED | theta
    found["odd rotated width"] = RELEASED | {"qk_rope_head_dim": 63}
    for name, values in OTHER_VALUES.items():
        found |= {f"{name} {value!r}": RELEASED | {name: value} for value in values}
    return found


@pytest.fixture(scope="module")
def targets(golden_dir):
    file = RELEASED_CONFIG
    return ModelConfig.load(file), torch_config.Config.load(file)


CONFIGURATIONS = configurations()
ACCEPTED = {
    "released", "non_causal True", "non_causal False", "fc_norm False", "fc_norm None",
    "aux_hidden_stream 'prefix'", "sliding_window 9", "max_position_embeddings 1048577",
    "target_layer_ids [0, 1, 2, 3, 92]", "rope_interleave True", "q_lora_rank 1537",
}  # fmt: skip
PARTNERS = {
    "num_attention_heads 65": "num_key_value_heads",
    "target_layer_ids [2, 23]": "num_target_layers",
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_both_accept_or_both_refuse(targets, name):
    said = []
    try:
        found = DraftConfig.from_dict(CONFIGURATIONS[name])
        found.require_target(targets[0])
    except ConfigError as error:
        said.append(str(error))
    try:
        torch_draft.DraftConfig.from_dict(CONFIGURATIONS[name], targets[1])
    except ValueError as error:
        said.append(str(error))
    assert len(said) in (0, 2), said
    if name in ACCEPTED:
        assert not said
    # the place is named on both sides, or the key that has to agree with it
    place = name.split()[0].removeprefix("rope_parameters.")
    place = PARTNERS.get(name, place)
    if said and place in {*RELEASED, *ROPE, *OTHER_VALUES}:
        assert all(place in text for text in said), said


def test_both_read_the_same(targets):
    """Everything that both keep under one name, from a file that differs from the defaults."""
    data = RELEASED | {"non_causal": False, "sliding_window": 77, "enable_confidence_head": False}
    ours = DraftConfig.from_dict(data)
    theirs = torch_draft.DraftConfig.from_dict(data, targets[1])
    shared = [n for n in vars(ours) if n in vars(theirs) and n != "rope"]
    assert len(shared) >= 20 and {"non_causal", "sliding_window"} <= set(shared)
    for name in shared:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert vars(ours.rope) == {k: v for k, v in theirs.rope.items() if k != "rope_type"}


def test_the_accepted_are_among_the_configurations():
    assert set(CONFIGURATIONS) >= ACCEPTED

"""Write small random Kimi K3 checkpoints, target and DSpark drafter, in the released layout.

Nothing here is trained. Every value is a pure function of the seed and the tensor's name, so a
checkpoint never has to be shipped: the same seed gives the same values on every machine.

    key   = the first 8 bytes of sha256("{seed}:{name}"), little endian
            (the names of the drafter's tensors are preceded by "draft.")
    u     = numpy.random.Generator(PCG64(key)).integers(0, 65536, size, dtype=uint16)
    value = (u / 65535 * 2 - 1) * scale + offset
            in float64, rounded to float32, then to the stored dtype

Expert codes are the low bytes of u; expert scale bytes are u % 3 plus a centre. Two tables get an
addend that makes the model predictable: `lm_head` follows the bigram t -> (5 t + 7) mod vocabulary,
which gives greedy decoding wide margins, and the drafter's Markov head follows the same bigram, so
that some drafts are right. How strongly is a property of the preset.

Needs NumPy, ml_dtypes and safetensors only; importing it does nothing.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from jax_impl.problems import inside_input
from jax_impl.tiny_presets import (
    PRESETS,
    DraftSizes,
    TargetSizes,
    draft_config,
    release_config,
    text_config,
)
from jax_impl.tiny_values import (
    BF16,
    F32,
    GROUP,
    U8,
    Range,
    codes,
    follow_bigram,
    scale_bytes,
    uniform,
)

ROOT = "language_model.model."
EMBED = ROOT + "embed_tokens.weight"

Fill = Callable[[int], np.ndarray]  # seed to values


class Tensor(NamedTuple):
    """One tensor to be written: what it is, and how to make its values from the seed."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Fill

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


# --- tensor tables ------------------------------------------------------------------------------


class _Table(list[Tensor]):
    """The tensors of one checkpoint; `prefix` sets the drafter's random numbers apart."""

    def __init__(self, prefix: str = ""):
        super().__init__()
        self.prefix = prefix

    def add(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fill) -> None:
        self.append(Tensor(name, shape, dtype, fill))

    def flat(self, name: str, shape: tuple[int, ...], recipe: Range) -> None:
        key = self.prefix + name
        self.add(name, shape, recipe.dtype, lambda seed: uniform(seed, key, shape, recipe))

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        self.flat(name, (rows, columns), Range(gain * math.sqrt(3.0 / columns)))

    def norm(self, name: str, size: int, gain: float = 1.0, dtype: np.dtype = BF16) -> None:
        self.flat(name, (size,), Range(0.25 * gain, gain, dtype))

    def packed(self, name: str, rows: int, columns: int) -> None:
        key, shape, groups = self.prefix + name, (rows, columns // 2), (rows, columns // GROUP)
        self.add(name + "_packed", shape, U8, lambda seed: codes(seed, key + "_packed", shape))
        self.add(
            name + "_scale", groups, U8, lambda seed: scale_bytes(seed, key + "_scale", groups)
        )


def target_tensors(config: dict[str, Any], sizes: TargetSizes) -> list[Tensor]:
    """All tensors of the target of this text config; only the gains come from `sizes`."""
    t, hidden, vocab = _Table(), config["hidden_size"], config["vocab_size"]
    t.flat(EMBED, (vocab, hidden), Range(sizes.embed))
    t.matrix("language_model.lm_head.weight", vocab, hidden)
    embed, head = t[0], t.pop()

    def head_values(seed: int) -> np.ndarray:
        return follow_bigram(head.fill(seed), embed.fill(seed), sizes.bigram, math.sqrt(hidden))

    t.add(head.name, head.shape, BF16, head_values)
    t.norm(ROOT + "norm.weight", hidden)
    t.norm(ROOT + "output_attn_res_norm.weight", hidden)
    t.matrix(ROOT + "output_attn_res_proj.weight", 1, hidden, sizes.mix)
    for layer in range(config["num_hidden_layers"]):
        p = f"{ROOT}layers.{layer}."
        t.norm(p + "input_layernorm.weight", hidden)
        t.norm(p + "post_attention_layernorm.weight", hidden)
        for name in ("self_attention_res", "mlp_res"):
            t.norm(f"{p}{name}_norm.weight", hidden)
            t.matrix(f"{p}{name}_proj.weight", 1, hidden, sizes.mix)
        # The lists in config.json count layers from 1.
        kda = layer + 1 in config["linear_attn_config"]["kda_layers"]
        (_kda if kda else _target_mla)(t, p + "self_attn.", config)
        if layer < config["first_k_dense_replace"]:
            _mlp(t, p + "mlp.", hidden, config["intermediate_size"])
        else:
            _moe(t, p + "block_sparse_moe.", config)
    return list(t)


def _kda(t: _Table, a: str, config: dict[str, Any]) -> None:
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        t.matrix(f"{a}{name}.weight", heads * dim, hidden)
    t.matrix(a + "o_proj.weight", hidden, heads * dim)
    t.matrix(a + "f_a_proj.weight", dim, hidden)
    t.matrix(a + "f_b_proj.weight", heads * dim, dim)
    t.matrix(a + "b_proj.weight", heads, hidden)
    conv = (heads * dim, 1, linear["short_conv_kernel_size"])
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        t.flat(f"{a}{name}.weight", conv, Range(0.9, 0.0, F32))
    t.flat(a + "A_log", (heads,), Range(1.0, 0.0, F32))
    # Stored longer than the head count, as in the release: readers take the first `heads` entries.
    decay, zeros = t.pop(), max(0, 128 - heads)
    t.add(decay.name, (heads + zeros,), F32, lambda seed: np.pad(decay.fill(seed), (0, zeros)))
    t.flat(a + "dt_bias", (heads * dim,), Range(2.0, -2.0, F32))
    t.norm(a + "o_norm.weight", dim, dtype=F32)


def _mla(t: _Table, a: str, config: dict[str, Any]) -> None:
    """What target and drafter have in common: all but the output gate."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    t.matrix(a + "q_a_proj.weight", q_lora, hidden)
    t.norm(a + "q_a_layernorm.weight", q_lora)
    t.matrix(a + "q_b_proj.weight", heads * (nope + rope), q_lora, 2.0)
    t.matrix(a + "kv_a_proj_with_mqa.weight", kv_lora + rope, hidden)
    t.norm(a + "kv_a_layernorm.weight", kv_lora)
    t.matrix(a + "kv_b_proj.weight", heads * (nope + v), kv_lora)
    t.matrix(a + "o_proj.weight", hidden, heads * v)


def _target_mla(t: _Table, a: str, config: dict[str, Any]) -> None:
    _mla(t, a, config)
    gates = config["num_attention_heads"] * config["v_head_dim"]
    t.matrix(a + "g_proj.weight", gates, config["hidden_size"])


def _mlp(t: _Table, p: str, hidden: int, width: int) -> None:
    t.matrix(p + "gate_proj.weight", width, hidden)
    t.matrix(p + "up_proj.weight", width, hidden)
    t.matrix(p + "down_proj.weight", hidden, width)


def _moe(t: _Table, m: str, config: dict[str, Any]) -> None:
    hidden, experts = config["hidden_size"], config["num_experts"]
    latent, width = config["routed_expert_hidden_size"], config["moe_intermediate_size"]
    t.matrix(m + "gate.weight", experts, hidden, 2.0)
    t.flat(m + "gate.e_score_correction_bias", (experts,), Range(0.2, 0.0, F32))
    t.matrix(m + "routed_expert_down_proj.weight", latent, hidden)
    t.norm(m + "routed_expert_norm.weight", latent)
    t.matrix(m + "routed_expert_up_proj.weight", hidden, latent, 0.3)
    _mlp(t, m + "shared_experts.", hidden, width * config["num_shared_experts"])
    for expert in range(experts):
        t.packed(f"{m}experts.{expert}.w1.weight", width, latent)
        t.packed(f"{m}experts.{expert}.w3.weight", width, latent)
        t.packed(f"{m}experts.{expert}.w2.weight", latent, width)


def draft_tensors(config: dict[str, Any], sizes: DraftSizes) -> list[Tensor]:
    """All tensors of the drafter of this k3_dspark config; only the gains come from `sizes`."""
    t, hidden, vocab = _Table("draft."), config["hidden_size"], config["vocab_size"]
    rank, context = (
        config["markov_rank"],
        config["num_target_layers"] * config["target_hidden_size"],
    )
    t.matrix("context_proj.weight", hidden, context)
    t.norm("context_norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}."
        t.norm(p + "input_layernorm.weight", hidden)
        t.norm(p + "post_attention_layernorm.weight", hidden)
        _mla(t, p + "self_attn.", config)
        _mlp(t, p + "mlp.", hidden, config["intermediate_size"])
    t.norm("final_norm.weight", hidden, gain=sizes.final_norm)
    t.flat("markov_head.markov_w1.weight", (vocab, rank), Range(math.sqrt(3.0)))
    t.flat("markov_head.markov_w2.weight", (vocab, rank), Range(0.02, 0.0, F32))
    noise, previous, gain = t.pop(), t[-1], sizes.markov / rank

    def successor_values(seed: int) -> np.ndarray:
        return follow_bigram(noise.fill(seed), previous.fill(seed), gain, 1.0)

    t.add(noise.name, noise.shape, BF16, successor_values)
    t.matrix("confidence_head.proj.weight", 1, hidden + rank)
    t.flat("confidence_head.proj.bias", (1,), Range(1.0))
    return list(t)


# --- writing ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a checkpoint will hold: configurations as written, and the shards of the target."""

    target_config: dict[str, Any]
    draft_config: dict[str, Any]
    shards: list[list[Tensor]]
    draft: list[Tensor]

    @property
    def target(self) -> list[Tensor]:
        """The tensors of all shards."""
        return [t for part in self.shards for t in part]


def plan(
    preset: str = "tiny", *, shards: int | None = None, overrides: dict[str, Any] | None = None
) -> Plan:
    """The whole checkpoint without its values: cheap, touches no file."""
    if preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(f"preset {preset!r} is not known; expected one of {known}; choose one")
    chosen = PRESETS[preset]
    text = text_config(chosen.target, overrides)
    target = target_tensors(text, chosen.target)
    parts = _partition(target, chosen.shards if shards is None else shards)
    config = draft_config(chosen.draft, text)
    draft = draft_tensors(config, chosen.draft)
    if chosen.draft.embed_copy:
        embed = next(t for t in target if t.name == EMBED)
        draft.append(embed._replace(name="embed_tokens.weight"))
    return Plan(release_config(text), config, parts, draft)


def _partition(tensors: list[Tensor], shards: int) -> list[list[Tensor]]:
    """Cuts the tensors, in the order of their names, into shards of about equal size."""
    if not 1 <= shards <= len(tensors):
        raise ValueError(
            f"shards = {shards}; expected 1 to {len(tensors)}, the number of tensors; choose "
            "another"
        )
    left, size = sum(t.nbytes for t in tensors), 0
    parts: list[list[Tensor]] = [[]]
    for position, tensor in enumerate(sorted(tensors, key=lambda t: t.name)):
        missing = shards - len(parts)
        enough = size + tensor.nbytes / 2 > left / (missing + 1)
        if parts[-1] and missing and (enough or len(tensors) - position <= missing):
            left, size = left - size, 0
            parts.append([])
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts


def describe(
    preset: str = "tiny", *, shards: int | None = None, overrides: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Sizes of what `make_checkpoint` would write with the same arguments, as plain data."""
    return _describe(preset, plan(preset, shards=shards, overrides=overrides))


def _describe(preset: str, made: Plan) -> dict[str, Any]:
    def count(config: dict[str, Any], tensors: list[Tensor], shards: int) -> dict[str, Any]:
        size = sum(t.nbytes for t in tensors)
        return {"tensors": len(tensors), "bytes": size, "shards": shards, "config": config}

    return {
        "preset": preset,
        "purpose": PRESETS[preset].purpose,
        "target": count(made.target_config, made.target, len(made.shards)),
        "draft": count(made.draft_config, made.draft, 1),
    }


def make_checkpoint(
    directory: str | os.PathLike[str],
    preset: str = "tiny",
    seed: int = 0,
    *,
    shards: int | None = None,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes `directory`/target and `directory`/draft and returns what `describe` returns.

    The directory must be absent or empty. It appears under its name only when complete, and no
    more than one shard is held in memory. `overrides` are fields of the target's text config.

    Raises:
        ValueError: `seed` is not in 0..2^32-1, or the preset, the overrides or the place do not do.
        FileExistsError: there is something at `directory`.
    """
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed!r}: expected 0..{2**32 - 1}; choose one of these")
    directory = Path(directory)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        what = "a directory that is not empty" if directory.is_dir() else "a file"
        raise FileExistsError(
            f"{directory} is {what}; expected an absent or empty directory; "
            "remove it or choose another place"
        )
    if problem := inside_input(directory):
        raise ValueError(f"{problem}; choose another place")
    made = plan(preset, shards=shards, overrides=overrides)
    parent = directory.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=f".{directory.name}.partial-", dir=parent)
    except OSError as error:
        raise ValueError(
            f"{directory}: found {parent}, where no directory can be made ({error.strerror}); "
            "expected a place for one; choose another"
        ) from None
    with place as scratch:
        new = Path(scratch) / "new"
        _write_target(new / "target", made, seed)
        _write_shard(new / "draft" / "model.safetensors", made.draft, seed)
        _write_json(new / "draft" / "config.json", made.draft_config)
        new.rename(directory)
    return {"directory": str(directory), "seed": seed, **_describe(preset, made)}


def _write_target(path: Path, made: Plan, seed: int) -> None:
    total, where = len(made.shards), {}
    for number, part in enumerate(made.shards, start=1):
        file = f"model-{number:05d}-of-{total:05d}.safetensors"
        _write_shard(path / file, part, seed)
        where |= {t.name: file for t in part}
    size = sum(t.nbytes for t in made.target)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    _write_json(path / "model.safetensors.index.json", index)
    _write_json(path / "config.json", made.target_config)


def _write_shard(path: Path, tensors: list[Tensor], seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({t.name: t.fill(seed) for t in tensors}, path, metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")

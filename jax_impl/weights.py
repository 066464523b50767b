"""The table of weight arrays: tensors, shapes, dtypes and cuts over ranks; no JAX import.

Everything that needs to know a weight derives it from here: the loader's reads, the memory
estimate, random weights and the partition specs. An array stacks the layers of one kind on its
leading axis; where several checkpoint tensors feed the same product they are joined along their
rows, rank by rank, so that one matrix product serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

from jax_impl.config import GROUP, ModelConfig
from jax_impl.draft_config import DraftConfig

BF16, F32, U8 = "bfloat16", "float32", "uint8"
BYTES = {BF16: 2, F32: 4, U8: 1}
AnyConfig = ModelConfig | DraftConfig
Experts = Literal["tp", "ep"]  # every expert's width cut over the ranks, or whole experts per rank


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor per layer (per expert where the array says so).

    Attributes:
        key: name behind the layer prefix; `{e}` stands for the expert number.
        shape: shape as used, before any cut.
        cut: axis that is cut over the ranks, or None for a copy on every rank.
        stored: shape in the file where it differs (the convolution's extra axis).
        padded: the file may hold more entries than `shape`, all zero (`A_log`).
        group: inputs that share one entry of the cut axis (1, or `GROUP` for scales). Where a rank
            has fewer inputs than a group, or ends within one, ranks share the entry and each keeps
            a copy.
    """

    key: str
    shape: tuple[int, ...]
    cut: int | None = None
    stored: tuple[int, ...] | None = None
    padded: bool = False
    group: int = 1


@dataclass(frozen=True)
class WeightArray:
    """One device array: `parts` joined along axis 0, stacked over `layers` (and experts).

    Over several ranks the whole array is the ranks' arrays one behind the other along `cut_axis`.
    """

    kind: str
    name: str
    dtype: str
    parts: tuple[Part, ...]
    per_expert: bool = False

    def shape(self, c: AnyConfig, ranks: int = 1, experts: Experts = "tp") -> tuple[int, ...]:
        """Shape of one rank's array, with the leading layer (and expert) axes.

        Raises:
            ValueError: something does not divide by `ranks`; `indivisible` lists all of it.
        """
        whole = self.per_expert and experts == "ep"
        locals_ = [local_shape(p, 1 if whole else ranks) for p in self.parts]
        joined = (sum(s[0] for s in locals_), *locals_[0][1:])
        lead = () if self.kind == "root" else (len(layers_of(c, self.kind)),)
        if self.per_expert:
            lead = (*lead, c.num_experts // ranks if whole else c.num_experts)
        return (*lead, *joined)

    def cut_axis(self, experts: Experts = "tp") -> int | None:
        """Axis along which the ranks' arrays stand one behind the other; None: all are equal."""
        if self.per_expert and experts == "ep":
            return 1
        cuts = {p.cut for p in self.parts} - {None}
        if not cuts:
            return None
        (cut,) = cuts
        return cut + (self.kind != "root") + self.per_expert


def local_shape(part: Part, ranks: int) -> tuple[int, ...]:
    """Shape of one rank's share of `part`.

    Raises:
        ValueError: the cut axis does not divide by `ranks`.
    """
    if part.cut is None or ranks == 1:
        return part.shape
    size = part.shape[part.cut] * part.group
    if size % ranks:
        raise ValueError(f"{part.key}: {size} does not divide by {ranks} ranks")
    share = size // ranks
    local = share // gcd(share, part.group)
    return (*part.shape[: part.cut], local, *part.shape[part.cut + 1 :])


def rank_entries(part: Part, ranks: int, rank: int) -> list[int]:
    """Entries of the cut axis that rank `rank` holds, in order; an entry may stand twice."""
    if part.cut is None:
        raise ValueError(f"{part.key} is not cut")
    share = part.shape[part.cut] * part.group // ranks
    step = gcd(share, part.group)
    return [i // part.group for i in range(rank * share, (rank + 1) * share, step)]


def indivisible(
    c: AnyConfig,
    table: tuple[WeightArray, ...],
    ranks: int,
    experts: Experts = "tp",
    copied: tuple[str, ...] = (),
) -> list[str]:
    """What of the arrays in `table` does not divide by `ranks`, each with its numbers.

    `copied` names arrays that every rank is to hold whole.
    """
    heads = ("kda_num_heads", "num_attention_heads") if isinstance(c, ModelConfig) else ()
    problems = [  # a width may divide where it would cut through a head
        f"{name} {getattr(c, name)} does not divide by {ranks} ranks"
        for name in heads
        if getattr(c, name) % ranks
    ]
    for array in table:
        if array.name in copied:
            continue
        if array.per_expert and experts == "ep":
            if c.num_experts % ranks:
                problems.append(f"num_experts {c.num_experts} does not divide by {ranks} ranks")
            continue
        for part in array.parts:
            try:
                local_shape(part, ranks)
            except ValueError as error:
                problems.append(str(error))
    return list(dict.fromkeys(problems))


def choose_ranks(
    c: AnyConfig,
    table: tuple[WeightArray, ...],
    experts: Experts = "tp",
    copied: tuple[str, ...] = (),
) -> str:
    """What to do where ranks do not divide a model: the numbers up to 64 that do."""
    fitting = [n for n in range(1, 65) if not indivisible(c, table, n, experts, copied)]
    return f"Choose a number of ranks that divides all of it: {', '.join(map(str, fitting))}."


def layers_of(c: AnyConfig, kind: str) -> tuple[int, ...]:
    """0-based layer numbers that hold the arrays of `kind`, in stacking order."""
    every = range(c.num_hidden_layers)
    if kind == "layer" or isinstance(c, DraftConfig):  # a drafter's layers are all alike
        return tuple(every)
    return {
        "kda": c.kda_layers,
        "mla": c.mla_layers,
        "dense": tuple(i for i in every if c.is_dense(i)),
        "moe": tuple(i for i in every if not c.is_dense(i)),
    }[kind]


def weight_table(c: ModelConfig) -> tuple[WeightArray, ...]:
    """All weight arrays of a model, one row per array."""
    d, v = c.hidden_size, c.vocab_size
    return (
        one("root", "embed_tokens", "model.embed_tokens.weight", (v, d), 0),
        one("root", "norm", "model.norm.weight", (d,)),
        one("root", "output_attn_res_norm", "model.output_attn_res_norm.weight", (d,)),
        one("root", "output_attn_res_proj", "model.output_attn_res_proj.weight", (1, d)),
        one("root", "lm_head", "lm_head.weight", (v, d), 0),
        one("layer", "input_layernorm", "input_layernorm.weight", (d,)),
        one("layer", "post_attention_layernorm", "post_attention_layernorm.weight", (d,)),
        one("layer", "self_attention_res_norm", "self_attention_res_norm.weight", (d,)),
        one("layer", "self_attention_res_proj", "self_attention_res_proj.weight", (1, d)),
        one("layer", "mlp_res_norm", "mlp_res_norm.weight", (d,)),
        one("layer", "mlp_res_proj", "mlp_res_proj.weight", (1, d)),
        *_kda(c),
        *_mla(c),
        *gated_mlp("dense", "", "mlp", d, c.intermediate_size),
        *_moe(c),
    )


def one(
    kind: str,
    name: str,
    key: str,
    shape: tuple[int, ...],
    cut: int | None = None,
    dtype: str = BF16,
) -> WeightArray:
    """An array of one tensor per layer."""
    return WeightArray(kind, name, dtype, (Part(key, shape, cut),))


def joined(
    kind: str, name: str, prefix: str, rows: list[tuple[str, int, int | None]], cols: int
) -> WeightArray:
    """An array of several matrices with `cols` columns; `rows` are (name, rows, cut)."""
    parts = tuple(Part(f"{prefix}.{key}.weight", (o, cols), cut) for key, o, cut in rows)
    return WeightArray(kind, name, BF16, parts)


def gated_mlp(
    kind: str, name: str, prefix: str, d: int, width: int
) -> tuple[WeightArray, WeightArray]:
    """The two arrays of a gated feed-forward part."""
    gate_up: list[tuple[str, int, int | None]] = [("gate_proj", width, 0), ("up_proj", width, 0)]
    return (
        joined(kind, f"{name}gate_up_proj", prefix, gate_up, d),
        one(kind, f"{name}down_proj", f"{prefix}.down_proj.weight", (d, width), 1),
    )


def _kda(c: ModelConfig) -> tuple[WeightArray, ...]:
    d, p, hd, h, taps = (
        c.hidden_size,
        c.kda_width,
        c.kda_head_dim,
        c.kda_num_heads,
        c.short_conv_kernel_size,
    )
    conv = tuple(
        Part(f"self_attn.{x}_conv1d.weight", (p, taps), 0, stored=(p, 1, taps)) for x in "qkv"
    )
    rows: list[tuple[str, int, int | None]] = [
        *((f"{x}_proj", p, 0) for x in "qkvg"),
        ("f_a_proj", hd, None),
        ("b_proj", h, 0),
    ]
    a_log = Part("self_attn.A_log", (h,), 0, padded=True)
    return (
        joined("kda", "in_proj", "self_attn", rows, d),
        one("kda", "f_b_proj", "self_attn.f_b_proj.weight", (p, hd), 0),
        WeightArray("kda", "conv1d", F32, conv),
        WeightArray("kda", "A_log", F32, (a_log,)),
        one("kda", "dt_bias", "self_attn.dt_bias", (p,), 0, dtype=F32),
        one("kda", "o_norm", "self_attn.o_norm.weight", (hd,), dtype=F32),
        one("kda", "o_proj", "self_attn.o_proj.weight", (d, p), 1),
    )


def _mla(c: ModelConfig) -> tuple[WeightArray, ...]:
    d, n, rq, rkv = c.hidden_size, c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
    kv = n * (c.qk_nope_head_dim + c.v_head_dim)
    # the latents are equal on all ranks, the gate is cut: joining the three would hide the former
    rows: list[tuple[str, int, int | None]] = [
        ("q_a_proj", rq, None),
        ("kv_a_proj_with_mqa", c.kv_row, None),
    ]
    return (
        joined("mla", "a_proj", "self_attn", rows, d),
        one("mla", "g_proj", "self_attn.g_proj.weight", (n * c.v_head_dim, d), 0),
        one("mla", "q_a_layernorm", "self_attn.q_a_layernorm.weight", (rq,)),
        one("mla", "q_b_proj", "self_attn.q_b_proj.weight", (n * c.qk_head_dim, rq), 0),
        one("mla", "kv_a_layernorm", "self_attn.kv_a_layernorm.weight", (rkv,)),
        one("mla", "kv_b_proj", "self_attn.kv_b_proj.weight", (kv, rkv), 0),
        one("mla", "o_proj", "self_attn.o_proj.weight", (d, n * c.v_head_dim), 1),
    )


def _moe(c: ModelConfig) -> tuple[WeightArray, ...]:
    d, e, z, m = (
        c.hidden_size,
        c.num_experts,
        c.routed_expert_hidden_size,
        c.moe_intermediate_size,
    )
    moe = "block_sparse_moe"

    def expert(
        name: str, keys: tuple[str, ...], suffix: str, shape: tuple[int, int], cut: int, group=1
    ) -> WeightArray:
        key = f"{moe}.experts.{{e}}.{{k}}.weight_{suffix}"
        parts = tuple(Part(key.replace("{k}", k), shape, cut, group=group) for k in keys)
        return WeightArray("moe", name, U8, parts, per_expert=True)

    down, up = f"{moe}.routed_expert_down_proj.weight", f"{moe}.routed_expert_up_proj.weight"
    return (
        one("moe", "gate", f"{moe}.gate.weight", (e, d), 0),
        one(
            "moe",
            "e_score_correction_bias",
            f"{moe}.gate.e_score_correction_bias",
            (e,),
            dtype=F32,
        ),
        one("moe", "routed_expert_down_proj", down, (z, d), 0),
        one("moe", "routed_expert_norm", f"{moe}.routed_expert_norm.weight", (z,)),
        one("moe", "routed_expert_up_proj", up, (d, z), 0),
        *gated_mlp("moe", "shared_", f"{moe}.shared_experts", d, c.shared_intermediate_size),
        expert("w13_packed", ("w1", "w3"), "packed", (m, z // 2), 0),
        expert("w13_scale", ("w1", "w3"), "scale", (m, z // GROUP), 0),
        expert("w2_packed", ("w2",), "packed", (z, m // 2), 1),
        expert("w2_scale", ("w2",), "scale", (z, m // GROUP), 1, GROUP),
    )


def padded_lengths(c: ModelConfig) -> tuple[int, ...]:
    """Lengths a padded `A_log` may have, the usual one first.

    The release stores 128 entries for 96 heads of width 128; whether 128 is the head width or a
    constant cannot be told from it, and small models of both kinds exist.
    """
    return max(c.kda_num_heads, c.kda_head_dim), max(c.kda_num_heads, 128)


def layer_prefix(c: AnyConfig, kind: str, layer: int) -> str:
    """What stands before a part's key in the checkpoint."""
    return c.weights_prefix + ("" if kind == "root" else f"{c.layers_prefix}{layer}.")


def checkpoint_tensors(
    c: AnyConfig, table: tuple[WeightArray, ...] | None = None
) -> Iterator[tuple[str, Part, str]]:
    """Every tensor that the arrays of `table` consume: (full name, part, dtype), in loading order.

    None takes the text model's table.
    """
    for array in weight_table(c) if table is None else table:
        for layer in (0,) if array.kind == "root" else layers_of(c, array.kind):
            prefix = layer_prefix(c, array.kind, layer)
            for part in array.parts:
                experts = range(c.num_experts) if array.per_expert else (0,)
                for e in experts:
                    yield prefix + part.key.format(e=e), part, array.dtype

"""Bytes that a decode step must move on one rank, from weights table and cache shapes alone.

Counted once each: every weight that the step uses, of the routed experts those that some row
chooses; recurrent state and windows read and written; latent rows of the context read, new ones
written; records of a verification written and read. Activations and exchanges are left out: they
stay in the chip's caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from jax_impl.config import ModelConfig
from jax_impl.memory import MemorySettings
from jax_impl.step_memory import ITEM, state_bytes
from jax_impl.weights import BYTES, WeightArray, layers_of, weight_table

KINDS = ("dense", "kda", "mla")


@dataclass(frozen=True)
class Work:
    """What one step does.

    Attributes:
        sequences: B.
        rows_each: tokens per sequence, 1 or 1 + drafts.
        context: tokens per sequence in the cache.
        distinct: distinct experts of a layer over all rows; None: the mean under random routing.
    """

    sequences: int = 1
    rows_each: int = 1
    context: int = 1
    distinct: float | None = None

    @property
    def rows(self) -> int:
        """N."""
        return self.sequences * self.rows_each


def mean_distinct(config: ModelConfig, rows: int) -> float:
    """Mean number of distinct experts of `rows` rows that choose at random and independently."""
    missed = (1 - config.num_experts_per_token / config.num_experts) ** rows
    return config.num_experts * (1 - missed)


def _array_bytes(config: ModelConfig, array: WeightArray, s: MemorySettings) -> int:
    """Bytes of one layer's array on one rank; of one expert where it has experts."""
    experts = "ep" if s.experts == "ep" else "tp"
    shape = array.shape(config, s.ranks, experts)
    lead = 0 if array.kind == "root" else 1
    return prod(shape[lead + array.per_expert :]) * BYTES[array.dtype]


def weight_bytes(config: ModelConfig, s: MemorySettings, work: Work) -> dict[str, float]:
    """Bytes of weights that one layer's part of a kind reads on one rank, by kind; `root` once.

    A rank with whole experts (`ep`) reads its share of the distinct ones, on average.
    """
    distinct = mean_distinct(config, work.rows) if work.distinct is None else work.distinct
    share = distinct / s.ranks if s.experts == "ep" else distinct
    found: dict[str, float] = {}
    for array in weight_table(config):
        size = float(_array_bytes(config, array, s))
        if array.per_expert:
            size *= share
        elif array.name == "embed_tokens":
            size = work.rows * config.hidden_size * BYTES[array.dtype] / s.ranks
        found[array.kind] = found.get(array.kind, 0.0) + size
    return found


def layer_bytes(config: ModelConfig, s: MemorySettings, work: Work) -> dict[str, dict[str, float]]:
    """Bytes of one layer on one rank, by layer kind (`dense`, `kda`, `mla`) and purpose.

    `dense` is a KDA layer with the dense feed-forward part, the other two have experts.
    """
    weights = weight_bytes(config, s, work)
    state, window = state_bytes(config, s.ranks, s.compute)
    layers = max(1, len(config.kda_layers))
    heads, width = config.kda_num_heads // s.ranks, config.kda_head_dim
    # update vector, key and log decay of each row, written by the verification, read by the commit
    records = 2 * work.rows * heads * 3 * width * 4 if work.rows_each > 1 else 0
    passes = 3 if work.rows_each > 1 else 2  # read; read again and written by the commit
    kda = {
        "attention weights": weights["kda"],
        "state": work.sequences * (passes * state + 2 * window) / layers + records,
    }
    row = config.kv_row * ITEM[s.kv_dtype]
    mla = {
        "attention weights": weights["mla"],
        "latent cache": (work.sequences * work.context / s.dcp + work.rows) * row,
    }
    mixture = {"norms": weights["layer"], "feed-forward weights": weights["moe"]}
    return {
        "dense": kda | {"norms": weights["layer"], "feed-forward weights": weights["dense"]},
        "kda": kda | mixture,
        "mla": mla | mixture,
    }


def kind_of(config: ModelConfig, layer: int) -> str:
    """Layer kind as in `layer_bytes`."""
    if config.is_dense(layer):
        return "dense"
    return "mla" if config.is_mla(layer) else "kda"


def step_bytes(config: ModelConfig, s: MemorySettings, work: Work) -> dict[str, float]:
    """Bytes of a whole step on one rank: per layer kind all its layers together, and the root."""
    by_layer = {k: sum(v.values()) for k, v in layer_bytes(config, s, work).items()}
    found = {
        kind: sum(kind_of(config, i) == kind for i in layers_of(config, "layer")) * by_layer[kind]
        for kind in KINDS
    }
    return found | {"embedding, head": weight_bytes(config, s, work)["root"]}

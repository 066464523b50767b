"""How much device memory a model needs, from its configuration alone; no JAX import.

    total = weights + recurrent state + latent cache + draft + temporaries + reserve

All per rank and in bytes. Weights follow `weights.weight_table` and its `cut` column. Only the MLA
layers (24 of 93 in the release) have a growing cache, and every rank holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Literal

from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.problems import listed
from jax_impl.step_memory import (
    ITEM,
    attention_buffer_bytes,
    commit_buffer_bytes,
    state_bytes,
    temporary_bytes,
)
from jax_impl.weights import (
    BYTES,
    F32,
    Experts,
    Part,
    WeightArray,
    checkpoint_tensors,
    choose_ranks,
    indivisible,
    layers_of,
    local_shape,
    padded_lengths,
    weight_table,
)

GIB = 1 << 30
# What the release holds beside the text model: 165 vision tensors and 3 of the projector.
VISION_BYTES, VISION_TENSORS = 894_717_952, 168
MIN_EXPERT_WIDTH = 256  # columns per rank that vLLM's expert kernels ask for
_LATENT_PROJECTIONS = ("gate", "routed_expert_down_proj", "routed_expert_up_proj")


class DoesNotFitError(ValueError):
    """What was asked for needs more memory than there is; the message has the numbers."""


@dataclass(frozen=True)
class MemorySettings:
    """What to estimate for.

    Attributes:
        ranks: tensor-parallel ranks; the heads, the vocabulary and all widths are cut over them.
        batch: sequences at the same time.
        context: tokens per sequence, prompt and output together.
        tokens: tokens per sequence in one step: 1 plus the drafts.
        state_copies: recurrent states kept per sequence. 1 is this project's way (rejected tokens
            are never committed); engines that keep one state per draft position need 1 + drafts.
        kv_dtype: dtype of the latent cache.
        compute: dtype of activations and convolution windows.
        router: `cut` divides router and latent projections over the ranks (this project's layout),
            `copied` keeps all of them on every rank (vLLM's).
        experts: `tp` cuts every routed expert's width, `ep` gives whole experts to ranks, `padded`
            cuts the width and pads each rank's part to at least 256 columns (vLLM's).
        attention: `gathered` copies one layer's latent rows together before attention (the standard
            path), `paged` reads them in place.
        dcp: ranks that share the rows of the latent cache between them: 1 or all.
        page_size: rows of a cache page on one rank; contexts are rounded up to whole pages.
        commit: what a verification keeps of its rows until they are judged: `replay` the records
            of the updates, `snapshots` the state after each row.
        draft_weights: bytes of draft model weights on this rank.
        draft_token_bytes: bytes of draft cache per token of context on this rank.
        reserve: bytes left free for the runtime, compiled programs, buffers of the collectives
            and fragmentation.
    """

    ranks: int = 1
    batch: int = 1
    context: int = 4096
    tokens: int = 1
    state_copies: int = 1
    kv_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] = "bfloat16"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    router: Literal["cut", "copied"] = "cut"
    experts: Literal["tp", "ep", "padded"] = "tp"
    attention: Literal["gathered", "paged"] = "gathered"
    dcp: int = 1
    page_size: int = 16
    commit: Literal["replay", "snapshots"] = "replay"
    draft_weights: int = 0
    draft_token_bytes: int = 0
    reserve: int = 4 * GIB

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: listing every value that is out of range.
        """
        problems = []
        for field in fields(self):
            value, least = getattr(self, field.name), 1
            if field.name in ("draft_weights", "draft_token_bytes", "reserve"):
                least = 0
            choices = _CHOICES.get(field.name)
            if choices and value not in choices:
                problems.append(f"{field.name}: found {value!r}, expected one of {choices}")
            elif not choices and (type(value) is not int or value < least):
                problems.append(f"{field.name}: found {value!r}, expected an integer >= {least}")
        if not problems and self.dcp not in (1, self.ranks):
            problems.append(f"dcp: found {self.dcp}, expected 1 or the ranks, {self.ranks}")
        if problems:
            raise ConfigError(listed("memory settings", problems, "Change these settings."))

    @property
    def stored_context(self) -> int:
        """Tokens per sequence that the cache has room for: the context in whole pages."""
        return self.held_rows * self.dcp

    @property
    def held_rows(self) -> int:
        """Rows per sequence of the latent cache on one rank."""
        return -(-self.context // (self.page_size * self.dcp)) * self.page_size


_CHOICES: dict[str, tuple[str, ...]] = {
    "kv_dtype": ("bfloat16", "float32", "float8_e4m3fn"),
    "compute": ("bfloat16", "float32"),
    "router": ("cut", "copied"),
    "experts": ("tp", "ep", "padded"),
    "attention": ("gathered", "paged"),
    "commit": ("replay", "snapshots"),
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by purpose."""

    settings: MemorySettings
    routed_experts: int
    other_weights: int
    kda_state: int
    conv_windows: int
    latent_cache: int
    attention_buffers: int
    commit_buffers: int
    draft_weights: int
    draft_cache: int
    temporaries: int
    reserve: int

    @property
    def weights(self) -> int:
        """Weights of the text model."""
        return self.routed_experts + self.other_weights

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "settings")

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, how it comes about), the total last."""
        s = self.settings
        batch, copies = f"{s.batch} sequence(s)", f" x {s.state_copies} kept states"
        held = batch + (copies if s.state_copies > 1 else "")
        tokens = f"{batch} x {s.stored_context:,} tokens"
        spread = "whole on every rank" if s.dcp == 1 else f"spread over {s.dcp} ranks"
        layout = {
            "tp": f"every expert's width cut over {s.ranks} rank(s)",
            "ep": f"whole experts, 1/{s.ranks} of them",
            "padded": f"width cut over {s.ranks} rank(s), at least {MIN_EXPERT_WIDTH} columns each",
        }[s.experts]
        router = {"cut": "cut", "copied": "whole on every rank"}[s.router]
        read = {
            "gathered": "latent rows of one layer and their scores, for a step",
            "paged": "none: the cache is read in place",
        }[s.attention]
        kept = f"{s.commit}, {batch} x {s.tokens} rows, until they are judged"
        kept = "none: one token needs no verdict" if s.tokens == 1 else kept
        return [
            ("routed experts", self.routed_experts, layout),
            ("other weights", self.other_weights, f"router and latent projections {router}"),
            ("recurrent state", self.kda_state, held),
            ("convolution windows", self.conv_windows, held),
            ("latent cache", self.latent_cache, f"{tokens} ({s.kv_dtype}), {spread}"),
            ("attention buffers", self.attention_buffers, read),
            ("commit buffers", self.commit_buffers, kept),
            (
                "draft weights",
                self.draft_weights,
                "none" if not self.draft_weights else "as cut over ranks",
            ),
            ("draft cache", self.draft_cache, "none" if not self.draft_cache else tokens),
            ("step temporaries", self.temporaries, f"{s.batch * s.tokens} row(s) in a step"),
            ("reserve", self.reserve, "runtime, programs, collectives, fragmentation"),
            ("total", self.total, "per rank"),
        ]


def checkpoint_size(config: ModelConfig) -> tuple[int, int]:
    """(bytes, number) of the text model's tensors as the release stores them, padding included."""
    size = count = 0
    for _, part, dtype in checkpoint_tensors(config):
        stored = padded_lengths(config)[:1] if part.padded else part.shape
        size += prod(stored) * BYTES[dtype]
        count += 1
    return size, count


def weight_bytes(config: ModelConfig, settings: MemorySettings) -> tuple[int, int]:
    """(routed experts, all other weights) on one rank, in bytes.

    Raises:
        ConfigError: listing every weight that does not divide by the ranks.
    """
    table, layout = weight_table(config), "ep" if settings.experts == "ep" else "tp"
    copied = _LATENT_PROJECTIONS if settings.router == "copied" else ()
    problems = indivisible(config, table, settings.ranks, layout, copied)
    if problems:
        do = choose_ranks(config, table, layout, copied)
        raise ConfigError(listed(f"{settings.ranks} ranks do not divide this model", problems, do))
    experts = others = 0
    for array in table:
        layers = 1 if array.kind == "root" else len(layers_of(config, array.kind))
        for part in array.parts:
            size = layers * _numbers(config, settings, array, part) * BYTES[array.dtype]
            if array.per_expert:
                experts += size
            else:
                others += size
    return experts, others


def _numbers(c: ModelConfig, s: MemorySettings, array: WeightArray, part: Part) -> int:
    """Entries of one layer's `part` on one rank, over all of the rank's experts."""
    if array.per_expert and s.experts == "ep":
        return c.num_experts // s.ranks * prod(part.shape)
    if array.name in _LATENT_PROJECTIONS and s.router == "copied":
        return prod(part.shape)
    local = prod(local_shape(part, s.ranks))
    if not array.per_expert:
        return local
    width = c.moe_intermediate_size // s.ranks
    if s.experts == "padded":
        local = local * max(width, MIN_EXPERT_WIDTH) // width
    return c.num_experts * local


def latent_token_bytes(config: ModelConfig, kv_dtype: str = "bfloat16") -> int:
    """Latent cache of one token, in bytes; the same on every rank, whatever their number."""
    return len(config.mla_layers) * config.kv_row * ITEM[kv_dtype]


def estimate(config: ModelConfig, settings: MemorySettings = MemorySettings()) -> MemoryEstimate:
    """Bytes per rank.

    Raises:
        ConfigError: the model does not divide by the ranks, or the context exceeds the model's.
    """
    s = settings
    if s.context > config.max_position_embeddings:
        raise ConfigError(
            f"context: found {s.context:,}, the model allows at most "
            f"{config.max_position_embeddings:,} tokens; ask for fewer"
        )
    experts, others = weight_bytes(config, s)
    state, window = state_bytes(config, s.ranks, s.compute)
    cached = s.batch * s.stored_context
    return MemoryEstimate(
        settings=s,
        routed_experts=experts,
        other_weights=others,
        kda_state=s.batch * s.state_copies * state,
        conv_windows=s.batch * s.state_copies * window,
        latent_cache=s.batch * s.held_rows * latent_token_bytes(config, s.kv_dtype),
        attention_buffers=attention_buffer_bytes(config, s),
        commit_buffers=commit_buffer_bytes(config, s),
        draft_weights=s.draft_weights,
        draft_cache=cached * s.draft_token_bytes,
        temporaries=temporary_bytes(config, s),
        reserve=s.reserve,
    )


def largest_batch(config: ModelConfig, settings: MemorySettings, device_bytes: int) -> int:
    """Most sequences of the asked context on devices of this memory; 0 if not even one fits."""
    total = lambda n: estimate(config, replace(settings, batch=n)).total  # noqa: E731
    return _largest(lambda n: total(n) <= device_bytes, 1 << 20)


def largest_context(config: ModelConfig, settings: MemorySettings, device_bytes: int) -> int:
    """Longest context of the asked batch on devices of this memory; 0 if none fits."""
    return _largest(
        lambda n: estimate(config, replace(settings, context=n)).total <= device_bytes,
        config.max_position_embeddings,
    )


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Largest n in 0..limit with fits(n), where fits is true up to some n and false beyond."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def require_fit(config: ModelConfig, settings: MemorySettings, device_bytes: int) -> MemoryEstimate:
    """The estimate, if it fits on devices of `device_bytes` each.

    Raises:
        DoesNotFitError: with all parts, the shortfall, and the largest batch and context that fit.
        ConfigError: as `estimate`.
    """
    found = estimate(config, settings)
    if found.total <= device_bytes:
        return found
    batch = largest_batch(config, settings, device_bytes)
    context = largest_context(config, settings, device_bytes)
    parts = "".join(f"\n  {what}: {_gb(size)} ({why})" for what, size, why in found.rows() if size)
    raise DoesNotFitError(
        f"batch {settings.batch} at context {settings.context:,} on {settings.ranks} rank(s) needs "
        f"{_gb(found.total)} per rank, but a device has {_gb(device_bytes)}: "
        f"{_gb(found.total - device_bytes)} too much.{parts}\n"
        f"Largest batch at this context: {batch}. Largest context at this batch: {context:,}. "
        + ("" if batch or context else "The weights need more ranks or larger devices.")
    )


def cache_bytes(config: ModelConfig, run: RunConfig, ranks: int = 1) -> int:
    """Bytes of one rank's cache for these run settings (`cache.make_cache`)."""
    state, window = state_bytes(config, ranks, run.compute)
    latent = run.pages * run.page_size * latent_token_bytes(config, run.kv_cache_dtype)
    return run.slots * (state + window) + latent + (BYTES[F32] if run.fp8 else 0)


def require_room(
    config: ModelConfig,
    free_bytes: int,
    run: RunConfig | None = None,
    ranks: int = 1,
    experts: Experts = "tp",
) -> int:
    """Bytes that weights and cache will take on one rank, if they are free; asked before a load.

    Args:
        config: the model.
        free_bytes: free memory of one device.
        run: run settings for the cache; None counts the weights alone.
        ranks: number of ranks the weights are cut over.
        experts: how routed experts are cut.

    Raises:
        ConfigError: the model does not divide by the ranks.
        DoesNotFitError: with both sizes and the shortfall.
    """
    weights = sum(weight_bytes(config, MemorySettings(ranks=ranks, experts=experts)))
    cache = 0 if run is None else cache_bytes(config, run, ranks)
    if weights + cache > free_bytes:
        raise DoesNotFitError(
            f"not loaded: weights need {_gb(weights)} and the cache {_gb(cache)} per rank, but "
            f"{_gb(free_bytes)} are free: {_gb(weights + cache - free_bytes)} short. Use more "
            "ranks, a larger device, or fewer slots and pages."
        )
    return weights + cache


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB ({size:,} bytes)"

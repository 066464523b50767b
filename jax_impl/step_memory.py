"""What a step needs beside weights and caches, and the sizes of the KDA state; no JAX import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_impl.config import ConfigError, ModelConfig
from jax_impl.weights import BYTES, F32

if TYPE_CHECKING:
    from jax_impl.memory import MemorySettings

# As in ops/experts.py: so many (row, expert) pairs at a time copy their experts; steps of more than
# DECODE_PAIRS go through them one expert at a time.
GATHER_PAIRS = 256
DECODE_PAIRS = 1024
ITEM = {**BYTES, "float8_e4m3fn": 1}


def state_bytes(config: ModelConfig, ranks: int, compute: str = "bfloat16") -> tuple[int, int]:
    """(recurrent state, convolution windows) of one sequence on one rank, in bytes."""
    if config.kda_num_heads % ranks:
        raise ConfigError(f"kda_num_heads {config.kda_num_heads} does not divide by {ranks} ranks")
    heads, width, layers = config.kda_num_heads // ranks, config.kda_head_dim, config.kda_layers
    window = (config.short_conv_kernel_size - 1) * 3 * heads * width * ITEM[compute]
    return len(layers) * heads * width * width * BYTES[F32], len(layers) * window


def attention_buffer_bytes(config: ModelConfig, settings: MemorySettings) -> int:
    """What one MLA layer of the standard path gathers during a step, in bytes.

    Per row of context on the rank: its latent row in the compute dtype, the latent part once more
    in f32, and per head and new token a score and a share in f32; heads are this rank's, or with
    context parallelism all. (Profile V; the keys and values that profile H expands for comparisons
    with the published code are not counted.)
    """
    if settings.attention == "paged":
        return 0
    heads = -(-config.num_attention_heads // (settings.ranks if settings.dcp == 1 else 1))
    row = config.kv_row * ITEM[settings.compute] + config.kv_lora_rank * BYTES[F32]
    scores = 2 * settings.tokens * heads * BYTES[F32]
    return settings.batch * settings.held_rows * (row + scores)


def temporary_bytes(config: ModelConfig, settings: MemorySettings) -> int:
    """Upper bound of a step's other temporaries, in bytes: the stream and the widest stage.

    N rows, a bytes per activation. Stream: N (snapshots + 6) hidden a. Stages, of which the largest
    counts: KDA (two f32 states of the batch, the projections in f32), feed-forward (dense width in
    f32 and a), experts (each (row, expert) pair's weights packed and as bf16, at most
    `GATHER_PAIRS` pairs; beyond `DECODE_PAIRS` one expert at a time), logits (twice f32, whole
    vocabulary).
    """
    c, s = config, settings
    rows, a = s.batch * s.tokens, ITEM[s.compute]
    stream = rows * (c.num_snapshots + 6) * c.hidden_size * a
    state, _ = state_bytes(c, s.ranks)
    state = state // max(1, len(c.kda_layers))
    kda_width = c.kda_width // s.ranks
    kda = 2 * s.batch * state + rows * 10 * kda_width * BYTES[F32]
    widest = max(c.intermediate_size, c.shared_intermediate_size) // s.ranks
    feed_forward = rows * 3 * widest * (BYTES[F32] + a)
    pairs = rows * c.num_experts_per_token
    width = c.moe_intermediate_size // (1 if s.experts == "ep" else s.ranks)
    packed = 3 * width * c.routed_expert_hidden_size * 17 // 32
    one = packed + 2 * width * c.routed_expert_hidden_size * BYTES["bfloat16"]
    experts = (min(pairs, GATHER_PAIRS) if pairs <= DECODE_PAIRS else 1) * one
    experts += pairs * (2 * width + c.routed_expert_hidden_size) * (BYTES[F32] + a)
    logits = rows * c.vocab_size * 2 * BYTES[F32]
    return stream + max(kda, feed_forward, experts, logits)


def commit_buffer_bytes(config: ModelConfig, settings: MemorySettings) -> int:
    """What all KDA layers keep of a verification until its rows are judged, in bytes.

    Both forms keep the T rows' raw projections in the compute dtype, from which the convolution
    window is cut. Per row and head, V values and K keys wide, `replay` adds the update vector, the
    key and the log decay in f32 (V + 2K numbers), `snapshots` the state (V K numbers). Steps of one
    token commit at once and keep nothing.
    """
    c, s = config, settings
    if s.tokens == 1:
        return 0
    heads, width = c.kda_num_heads // s.ranks, c.kda_head_dim
    numbers = 3 * width if s.commit == "replay" else width * width
    row = heads * (numbers * BYTES[F32] + 3 * width * ITEM[s.compute])
    return len(c.kda_layers) * s.batch * s.tokens * row


def commit_traffic_bytes(config: ModelConfig, settings: MemorySettings) -> int:
    """Bytes that verification and commit move between memory and one rank's processors.

    With S the state of all layers and sequences and T rows: `replay` reads S, writes the records,
    reads both and writes S; `snapshots` reads S, writes T states, reads one of them per sequence
    and writes S. Raw projections and windows are the same in both forms and not counted.
    """
    c, s = config, settings
    state = s.batch * state_bytes(c, s.ranks)[0]
    if s.commit == "snapshots":
        return (s.tokens + 3) * state
    records = s.batch * s.tokens * len(c.kda_layers) * c.kda_num_heads // s.ranks
    return 3 * state + 2 * records * 3 * c.kda_head_dim * BYTES[F32]

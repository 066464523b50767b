"""State and window of all KDA layers after the accepted tokens of a verification; in place.

    update, key, g f32 [L, B, T, H, K] as `kda.kda` records them; raw bf16 [L, B, T, 3P]
    state f32 [L', S, H, V, K] and window bf16 [L', S, taps - 1, 3P], the whole stacks, L' >= L

For each live sequence its first `count` tokens, 0..T: S <- S exp(g) + update key^T, all f32, and
the window becomes the last taps - 1 raw projections up to there. Count 0 leaves both as they are
(of a sequence without history: zeros). Pad rows (slot < 0) and layers beyond L are left alone.

One CTA per layer, sequence and head; its warpgroups take 64 rows of the state each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common
from pallas_kernels.kda import GROUPS, MAX_TOKENS, ROWS, WIDTH, Rows


def limits(
    update: jax.Array,
    key: jax.Array,
    g: jax.Array,
    raw: jax.Array,
    state: jax.Array,
    window: jax.Array,
    rows: Rows,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    layers, batch, tokens, heads, _ = update.shape
    common.expect(out, "tokens", tokens, f"1..{MAX_TOKENS}", 1 <= tokens <= MAX_TOKENS)
    wanted = (layers, batch, tokens, heads, WIDTH)
    for name, array in (("update", update), ("key", key), ("g", g)):
        common.expect(out, f"shape of {name}", array.shape, wanted, array.shape == wanted)
    wanted = (layers, batch, tokens, 3 * heads * WIDTH)
    common.expect(out, "shape of raw", raw.shape, wanted, raw.shape == wanted)
    held = state.shape[0]
    wanted = (held, state.shape[1], heads, WIDTH, WIDTH)
    common.expect(out, "shape of state", state.shape, wanted, state.shape == wanted)
    common.expect(out, "layers of state", held, f"at least {layers}", held >= layers)
    common.expect(out, "layers of window", window.shape[0], held, window.shape[0] == held)
    same = raw.dtype == window.dtype == jnp.bfloat16
    common.expect(out, "dtypes of raw, window", (raw.dtype, window.dtype), "bfloat16", same)
    return out


def reference(
    update: jax.Array,
    key: jax.Array,
    g: jax.Array,
    raw: jax.Array,
    state: jax.Array,
    window: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain jnp."""
    past = (rows.slot >= 0) & (rows.position > 0)
    slot = jnp.maximum(rows.slot, 0)
    layers = update.shape[0]
    s = jnp.where(past[None, :, None, None, None], state[:layers, slot], 0.0)
    for t in range(update.shape[2]):
        new = s * jnp.exp(g[:, :, t])[:, :, :, None]
        new = new + update[:, :, t, :, :, None] * key[:, :, t, :, None]
        s = jnp.where((t < rows.count)[None, :, None, None, None], new, s)
    before = jnp.where(past[None, :, None, None], window[:layers, slot], 0)
    history = jnp.concatenate([before, raw], axis=2)
    at = rows.count[:, None] + jnp.arange(window.shape[2])
    kept = jnp.take_along_axis(history, at[None, :, :, None], axis=2)
    target = jnp.where(rows.slot >= 0, rows.slot, state.shape[1])
    return (
        state.at[:layers, target].set(s, mode="drop"),
        window.at[:layers, target].set(kept, mode="drop"),
    )


def kda_commit(
    update: jax.Array,
    key: jax.Array,
    g: jax.Array,
    raw: jax.Array,
    state: jax.Array,
    window: jax.Array,
    rows: Rows,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(state, window), see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    common.require(limits(update, key, g, raw, state, window, rows), "kda_commit")
    layers, batch, tokens, heads, _ = update.shape
    before = window.shape[2]
    f32, bf16 = jnp.float32, jnp.bfloat16
    call = common.kernel(
        _body(tokens, before),
        "k3_kda_commit",
        interpret=interpret,
        out_type=[],
        grid=(layers, batch, heads),
        grid_names=("layer", "sequence", "head"),
        num_threads=GROUPS,
        thread_name="wg",
        scratch_types=dict(
            states=plgpu.SMEM((GROUPS, ROWS, WIDTH), f32, transforms=common.tiled(f32, WIDTH)),
            records=plgpu.SMEM((3, tokens, WIDTH), f32),
            past=plgpu.SMEM((3, before + tokens, WIDTH), bf16),
            loaded=plgpu.Barrier(num_barriers=GROUPS),
            small=plgpu.Barrier(num_barriers=1, num_arrivals=9),
        ),
    )
    held = jax.new_ref(state), jax.new_ref(window)
    call(update, key, g, raw, *held, *rows)
    return jax.freeze(held[0]), jax.freeze(held[1])


def _body(tokens: int, before: int) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(
        update,  # f32 [L, B, T, H, V]
        key,  # f32 [L, B, T, H, K]
        g,  # f32 [L, B, T, H, K]
        raw,  # bf16 [L, B, T, 3P]
        state,  # f32 [L, S, H, V, K]
        window,  # bf16 [L, S, taps - 1, 3P]
        slots,  # i32 [B]
        positions,  # i32 [B]
        counts,  # i32 [B]
        *,
        states,
        records,
        past,
        loaded,
        small,
    ):
        layer, sequence, head, wg = (lax.axis_index(n) for n in ("layer", "sequence", "head", "wg"))
        slot, count, history = slots[sequence], counts[sequence], positions[sequence] > 0
        here = jnp.maximum(slot, 0)
        mine, heads = state.at[layer, here, head, pl.ds(wg * ROWS, ROWS)], state.shape[2]

        def channels(part):
            return pl.ds((part * heads + head) * WIDTH, WIDTH)

        def load():
            for i, record in enumerate((update, key, g)):
                source = record.at[layer, sequence, :, head]
                plgpu.copy_gmem_to_smem(source, records.at[i], small.at[0])
            for part in range(3):
                old = window.at[layer, here, :, channels(part)]
                plgpu.copy_gmem_to_smem(old, past.at[part, pl.ds(0, before)], small.at[0])
                new = raw.at[layer, sequence, :, channels(part)]
                plgpu.copy_gmem_to_smem(new, past.at[part, pl.ds(before, tokens)], small.at[0])

        def forget():
            for part in range(3):
                for i in range(before):
                    past[part, i] = jnp.zeros((WIDTH,), jnp.bfloat16)

        def row(kind, t):
            return lax.broadcast_in_dim(records[kind, t], (ROWS, WIDTH), (1,))

        def token(t, s):
            u = records[0, t, pl.ds(wg * ROWS, ROWS)]
            return s * jnp.exp(row(2, t)) + lax.broadcast_in_dim(u, s.shape, (0,)) * row(1, t)

        def keep_window():
            pl.when(jnp.logical_not(history))(forget)
            plgpu.commit_smem()
            for part in range(3):
                source = past.at[part, pl.ds(count, before)]
                plgpu.copy_smem_to_gmem(source, window.at[layer, here, :, channels(part)])

        def work():
            pl.when(wg == 0)(load)
            plgpu.copy_gmem_to_smem(mine, states.at[wg], loaded.at[wg])
            plgpu.barrier_wait(small.at[0])
            plgpu.barrier_wait(loaded.at[wg])
            old = states[wg]
            old = jnp.where(lax.broadcast_in_dim(history, old.shape, ()), old, 0.0)
            states[wg] = lax.fori_loop(0, count, token, old)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(states.at[wg], mine)
            pl.when(wg == 0)(keep_window)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(slot >= 0)(work)

    return body

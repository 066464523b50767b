"""What a state holds and what a recorded pass mixed, as NumPy arrays by layer or place."""

# pyright: reportUnknownMemberType=false
# JAX types some of its own functions in part.
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.numerics import Numerics
from jax_impl.ops.attn_res import mixture
from jax_impl.session import (
    Floats,
    Pass,
    Session,
    SessionError,
    State,
    require_recorded,
    require_session,
    require_state,
)


def kda_state(session: Session, state: State, layer: int) -> Floats:
    """The recurrent state of a KDA layer (0-based), f32 [H, V, K].

    Raises:
        SessionError: not a KDA layer, or arguments of other types.
    """
    require_state(session, state)
    layers = session.config.kda_layers
    if layer not in layers:
        raise SessionError(f"layer {layer}: expected a KDA layer, one of {layers}")
    return np.asarray(state.cache.kda_state[layers.index(layer), 0])


def latent_rows(session: Session, state: State, layer: int) -> Floats:
    """What an MLA layer (0-based) keeps of each processed token: f32 [position, latent + rope].

    Raises:
        SessionError: not an MLA layer, or arguments of other types.
    """
    require_state(session, state)
    layers = session.config.mla_layers
    if layer not in layers:
        raise SessionError(f"layer {layer}: expected an MLA layer, one of {layers}")
    pages = np.asarray(state.cache.kv_latent[layers.index(layer)].astype(jnp.float32))
    return pages.reshape(-1, pages.shape[-1])[: state.position]


def depth_mixtures(session: Session, found: Pass) -> dict[str, Floats]:
    """With which weights each attention residual mixed, by place, in order of depth.

    Args:
        session: the one that ran the pass.
        found: a recorded pass.

    Returns:
        f32 [T, J + 1] for `layerNN.attn_in`, `layerNN.attn_out` and `head_in`: columns are the J
        snapshots (0 for those not yet taken), then the prefix. Each row sums to 1.

    Raises:
        SessionError: nothing was recorded, or arguments of other types.
    """
    require_session(session)
    require_recorded(found)
    c, nx = session.config, Numerics(session.run.compute, session.run.profile)
    norms, root, stages = session.weights.layer, session.weights.root, found.stages
    bank = jnp.asarray(stages["snapshots"])  # of the whole pass; a row taken does not change

    def weights(prefix: Floats, count: int, norm: jax.Array, proj: jax.Array) -> Floats:
        x = nx.round(jnp.asarray(prefix))
        return np.asarray(mixture(nx, x, bank, count, norm, proj, c.rms_norm_eps))

    mixed: dict[str, Floats] = {}
    for layer in range(c.num_hidden_layers):
        name, count = f"layer{layer:02d}", c.snapshots_before(layer)
        mixed[f"{name}.attn_in"] = weights(
            stages[f"{name}.prefix_in"], count,
            norms.self_attention_res_norm[layer], norms.self_attention_res_proj[layer],
        )  # fmt: skip
        mixed[f"{name}.attn_out"] = weights(
            stages[f"{name}.prefix"], count + c.starts_block(layer),
            norms.mlp_res_norm[layer], norms.mlp_res_proj[layer],
        )  # fmt: skip
    last = f"layer{c.num_hidden_layers - 1:02d}"
    left = stages[f"{last}.prefix"] + stages[f"{last}.delta"]
    mixed["head_in"] = weights(
        left, c.num_snapshots, root.output_attn_res_norm, root.output_attn_res_proj
    )
    return mixed

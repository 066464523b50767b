"""Every case of `python -m bench ops` by name; building one allocates its weights."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from bench import ops_fused, ops_kda, ops_mla, ops_small
from bench.ops_experts import experts_case
from bench.ops_problem import SITU, Problem
from bench.ops_products import attn_res_case, latent_up_case, route_case, skinny_case


def cases() -> dict[str, Callable[[], Problem]]:
    """Every case by name; building one allocates its weights."""
    out: dict[str, Callable[[], Problem]] = {}
    shapes = {  # name: rows and columns of one rank's matrix, keywords
        "kda_in.tp16": (3208, 7168, {"out_dtype": jnp.bfloat16}),
        "o_proj.tp16": (7168, 768, {}),
        "o_proj.tp8": (7168, 1536, {}),
        "kda_in.tp8": (6288, 7168, {"out_dtype": jnp.bfloat16}),
        "mla_a.tp16": (2112, 7168, {"out_dtype": jnp.bfloat16}),
        "q_b.tp16": (1152, 1536, {"out_dtype": jnp.bfloat16}),
        "shared_up.tp16": (768, 7168, {"situ": SITU}),
        "shared_down.tp16": (7168, 384, {}),
        "lm_head.tp16": (10240, 7168, {"out_dtype": jnp.bfloat16}),
    }
    for name, (n, k, kw) in shapes.items():
        for m in (1, 8, 64):
            out[f"skinny.{name}.rows{m}"] = lambda m=m, n=n, k=k, kw=kw: skinny_case(
                m, n, k, 7, **kw
            )
    for ranks in (16, 8):
        for m in (1, 8, 64):
            out[f"route.tp{ranks}.rows{m}"] = lambda m=m, r=ranks: route_case(m, r, 13)
            out[f"latent_up.tp{ranks}.rows{m}"] = lambda m=m, r=ranks: latent_up_case(m, r, 17)
    for m in (1, 8, 64):
        for count in (1, 8):
            name = f"attn_res.sources{count}.rows{m}"
            out[name] = lambda m=m, count=count: attn_res_case(m, count, 19)
    for ranks in (16, 8):
        for n in (1, 2, 8, 64):
            out[f"experts.tp{ranks}.rows{n}"] = lambda n=n, r=ranks: experts_case(n, r, 11)
    return out | ops_small.cases() | ops_kda.cases() | ops_mla.cases() | ops_fused.cases()

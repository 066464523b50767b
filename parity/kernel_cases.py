"""Kernels with the shapes of the released model's ranks, as `parity.kernel_aot` compiles them.

Each case: a function, and the shapes of its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name -> (function, abstract arguments); two layers stand for the stack."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import attn_res, experts, kda, kda_out, latent_up, mxfp4, route, skinny

    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    situ = (4.0, 25.0)

    def s(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = s(i32)
    out: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for m in (1, 8, 64):
        for name, n, k, kw in (
            ("kda_in", 3208, 7168, {"out_dtype": bf16}),
            ("o_proj", 7168, 768, {}),
            ("shared_up", 768, 7168, {"situ": situ}),
        ):
            out[f"skinny.{name}.rows{m}"] = (
                lambda x, w, i, kw=kw: skinny.skinny(x, w, i, **kw),
                (s(bf16, m, k), s(bf16, 2, n, k), layer),
            )
        ws = (s(bf16, 2, n, 7168) for n in (56, 224, 768))
        out[f"route.rows{m}"] = (
            lambda x, a, b, c, i: route.route(x, a, b, c, i, betas=situ),
            (s(bf16, m, 7168), *ws, layer),
        )
        out[f"latent_up.rows{m}"] = (
            lambda x, g, w, i: latent_up.latent_up(x, g, w, i, eps=1e-5),
            (s(bf16, m, 3584), s(bf16, 3584), s(bf16, 2, 448, 3584), layer),
        )
        if m == 8:  # a norm's sums in a CTA that has no cluster
            out["latent_up.narrow"] = (
                lambda x, g, w, i: latent_up.latent_up(x, g, w, i, eps=1e-5),
                (s(bf16, m, 64), s(bf16, 64), s(bf16, 2, 128, 64), layer),
            )
        row, wide = s(bf16, m, 7168), s(bf16, 7168)
        out[f"attn_res.rows{m}"] = (
            lambda p, b, c, d, *ws: attn_res.attn_res(p, b, c, d, *ws, eps=1e-5, snapshot=True),
            (row, s(bf16, m, 8, 7168), layer, row, wide, wide, wide),
        )
        out |= _small_cases(m) | (_mix_cases(m) if m <= 8 else {})
        for ranks in (16, 8):
            width, z, e = 3072 // ranks, 3584, 896
            w13 = s(jnp.uint32, 2, e * width // 32, mxfp4.tile_lines(z), 32)
            w2 = s(jnp.uint32, 2, e * z // 64, mxfp4.tile_lines(width), 32)
            out[f"experts.tp{ranks}.rows{m}"] = (
                lambda *a, width=width: experts.experts(*a, width=width, betas=situ),
                (s(bf16, m, z), s(i32, m, 16), s(f32, m, 16), w13, w2, layer),
            )
            if m == 1 and ranks == 16:  # with fewer no CTA is left for the product beside
                out["experts_row.tp16.rows1"] = _row_case(w13, w2, width)
            usual = experts.default_tuning(m, width, z)
            for form, other in (
                ("two_kernels", replace(usual, one_kernel=False)),
                ("one_kernel", replace(usual, one_kernel=True)),
            ):
                if other != usual:
                    out[f"experts.{form}.tp{ranks}.rows{m}"] = (
                        lambda *a, width=width, other=other: experts.experts(
                            *a, width=width, betas=situ, tuning=other
                        ),
                        out[f"experts.tp{ranks}.rows{m}"][1],
                    )
    for batch, tokens, commit in (
        (1, 1, True), (1, 8, False), (8, 1, True), (64, 1, True), (8, 8, False)
    ):  # fmt: skip
        settings = dict(eps=1e-5, lower_bound=-5.0, commit=commit)
        avals = (
            s(bf16, batch * tokens, 3208), s(f32, 2, batch, 6, 128, 128),
            s(bf16, 2, batch, 3, 2304), s(bf16, 2, 768, 128), s(f32, 2, 2304, 4),
            s(f32, 2, 6), s(f32, 2, 768), s(f32, 2, 128), layer, *[s(i32, batch)] * 3,
        )  # fmt: skip
        out[f"kda.tp16.batch{batch}.tokens{tokens}"] = (
            lambda *a, kw=settings: kda.kda(
                *a[:3], kda.Weights(*a[3:8]), a[8], kda.Rows(*a[9:]), **kw
            ),
            avals,
        )
        if batch * tokens <= 8:
            out[f"kda_out.tp16.batch{batch}.tokens{tokens}"] = (
                lambda *a, kw=settings: kda_out.kda_out(
                    *a[:3], kda.Weights(*a[3:8]), a[8], kda.Rows(*a[9:12]), *a[12:], **kw
                ),
                (*avals, s(bf16, 2, 7168, 768), s(i32, 128)),
            )
    return out


def _row_case(w13: Any, w2: Any, width: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Routed experts of one row of a TP16 rank, with their choice."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import experts_row, meeting

    bf16, f32, s = jnp.bfloat16, jnp.float32, jax.ShapeDtypeStruct
    row = experts_row.Row(
        s((1, 3584), bf16), s((1, 896), f32), s((2, 896), f32), s((1, 384), bf16),
        s((2, 7168, 384), bf16),
    )  # fmt: skip
    settings: dict[str, Any] = dict(width=width, betas=(4.0, 25.0))
    call = partial(experts_row.experts_row, k=16, scaling=2.5, **settings)
    return call, (row, w13, w2, meeting.COUNTERS, s((), jnp.int32))


def _mix_cases(m: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """AttnRes with the products behind it, as the layers of a TP16 rank have them."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import mix_products, route, skinny

    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    s, d = jax.ShapeDtypeStruct, 7168

    def call(items: Callable[..., Any]) -> Callable[..., Any]:
        def run(prefix, bank, delta, shared, *rest):
            *stacks, counters, layer = rest[:5]
            mix = mix_products.Mix(prefix, bank, layer, delta, *stacks, layer, shared)
            return mix_products.mix_products(mix, items(rest[5:]), counters, layer, eps=1e-5)

        return run

    def plain(ws: Any) -> Any:
        return [skinny.Projection(w, bf16) for w in ws]

    def routing(ws: Any) -> Any:
        return route.items(*ws, (4.0, 25.0), 16)

    out = {}
    for name, items, sizes in (
        ("kda", plain, (3208,)),
        ("mla", plain, (2112, 768)),
        ("route", routing, (56, 224, 768)),
    ):
        if m > {"kda": 2, "mla": 4, "route": 8}[name]:
            continue  # kernels of their own there
        row, shared, stack = s((m, d), bf16), s((m, d), f32), s((2, d), bf16)
        ws = [s((2, n, d), bf16) for n in sizes]
        out[f"mix_products.{name}.rows{m}"] = (
            call(items),
            (row, s((m, 8, d), bf16), row, shared, *[stack] * 3, s((128,), i32), s((), i32), *ws),
        )
    return out


def mla_cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The three MLA kernels in one call, by ranks, rows, tokens of a sequence and cache dtype."""
    import jax
    import jax.numpy as jnp

    from parity import mla_inputs

    out: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for heads, ranks in ((6, 16), (12, 8)):
        for batch, tokens in ((1, 1), (8, 1), (1, 8), (64, 1), (8, 8)):
            for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
                scale = None if dtype == jnp.bfloat16 else 4.0
                name = f"mla.tp{ranks}.rows{batch * tokens}.tokens{tokens}.{jnp.dtype(dtype).name}"
                case = mla_inputs.shapes(batch, tokens, heads, dtype, scale)
                leaves, tree = jax.tree.flatten((case.arrays, case.cache))
                # cut while it is traced, when the device that it is for is known
                out[name] = (
                    lambda i, *xs, case=case, tree=tree: mla_inputs.kernels(case)(
                        *jax.tree.unflatten(tree, xs), i
                    ),
                    (jax.ShapeDtypeStruct((), jnp.int32), *leaves),
                )
            if heads == 6 and batch * tokens <= 8:
                out |= _mla_out_case(batch, tokens, heads)
    return out


def _mla_out_case(
    batch: int, tokens: int, heads: int
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The last MLA kernel with the output projection behind it, at a TP16 rank's sizes."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import mla_attend, mla_value_out

    bf16, f32, i32, s = jnp.bfloat16, jnp.float32, jnp.int32, jax.ShapeDtypeStruct
    t = mla_attend.default_tuning(batch, tokens * heads, True)
    shape = batch, -(-tokens * heads // t.columns), t.splits, t.columns
    n, width = batch * tokens, heads * 128
    avals = (
        s((*shape, 512), f32), s(shape, f32), s((batch, tokens), i32), s((n, width), bf16),
        s((2, heads * 256, 512), bf16), s((2, 7168, width), bf16), s((128,), i32), s((), i32),
    )  # fmt: skip

    def call(latent, lse, *rest):
        return mla_value_out.value_out(mla_attend.Parts(latent, lse), *rest, heads=heads)

    return {f"mla_value_out.tp16.rows{n}.tokens{tokens}": (call, avals)}


def _small_cases(m: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What stands between a layer's products, for m rows."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import attn_res, topk, vocab

    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32

    def s(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer, row = s(i32), s(bf16, m, 7168)
    weights = s(bf16, 2, 7168), s(bf16, 2, 1, 7168), s(bf16, 2, 7168)
    logits, bias = s(f32, m, 896), s(f32, 2, 896)
    return {
        f"attn_res.two_deltas.rows{m}": (
            lambda p, b, c, d, e, i, *ws: attn_res.attn_res(
                p, b, c, d, *ws, eps=1e-5, shared=e, layer=i
            ),
            (row, s(bf16, m, 8, 7168), layer, row, s(f32, m, 7168), layer, *weights),
        ),
        f"topk.rows{m}": (
            lambda x, b, i: topk.topk(x, b, i, k=16, scaling=2.5),
            (logits, bias, layer),
        ),
        f"vocab.head.rows{m}": (vocab.vocab, (row, s(bf16, 10240, 7168))),
        f"vocab.markov.rows{m}": (
            lambda x, w, base, ids: vocab.vocab(x, w, base, ids=ids),
            (s(bf16, 163840, 256), s(bf16, 10240, 256), s(f32, m, 10240), s(i32, m)),
        ),
        f"topk.shared.rows{m}": (
            lambda x, b, i, h, w: topk.topk(x, b, i, k=16, scaling=2.5, shared=(h, w)),
            (logits, bias, layer, s(bf16, m, 384), s(bf16, 2, 7168, 384)),
        ),
    }


def exchange_cases(
    ranks: int, hosts: int = 1
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A layer's exchanges over `ranks`, to be called in a `shard_map`; arguments of one rank.

    On several hosts there is a process each.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels import exchange

    gather, reduce, chunk = exchange.all_gather, exchange.all_reduce, exchange.CHUNK
    out: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for m in (1, 8, 64):
        for name, call, width, dtype in (
            ("o_proj", reduce, 7168, jnp.float32),
            ("routed_and_shared", reduce, 3584 + 7168, jnp.float32),
            ("scores_and_latent", gather, 896 // ranks + 3584 // ranks // 2, jnp.uint32),
            ("output", gather, 7168 // ranks // 2, jnp.uint32),
        ):
            size = -(-m * width // chunk) * chunk
            out[f"exchange.{name}.rows{m}"] = (
                lambda x, call=call: call(x, "x", ranks, multi_process=hosts > 1),
                (jax.ShapeDtypeStruct((size,), dtype),),
            )
    return out

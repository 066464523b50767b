"""Compile every kernel at real shapes for a GPU that is absent: `python -m parity.kernel_aot`.

    python -m parity.kernel_aot --target h200|gb300 [--match PART ...]
    python -m parity.kernel_aot --target gb300 --hosts 4 --gpus 4

The second form compiles the exchanges between ranks for a mesh of that many hosts (a process each)
and GPUs per host. One target per process. Needs the CUDA plugin of JAX, ptxas and libdevice (extra
`aot`). Prints registers and spilled bytes as ptxas reports them; exit status 1 if a kernel that
must not spill does. It proves that kernels lower and assemble, not what they compute.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

TARGETS = {  # cores, compute capability, L2 and memory bytes, name
    "h200": (132, (9, 0), 62914560, 150 << 30, "NVIDIA H200"),
    "gb300": (152, (10, 3), 135528448, 276 << 30, "NVIDIA GB300"),
}
SYMMETRIC = ":S(7)"  # how a compiled program marks arrays in symmetric memory
MAY_SPILL: set[str] = set()  # kernels that keep more than the registers hold, by design


def plugin_folder() -> Path | None:
    """Folder of the CUDA wheels (ptxas, libdevice), or None where they are not installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return None
    found = importlib.util.find_spec("nvidia")
    for place in (found.submodule_search_locations or []) if found else []:
        if (Path(place) / "cu13" / "bin" / "ptxas").exists():
            return Path(place) / "cu13"
    return None


def description(target: str) -> str:
    """XLA's target configuration in text form."""
    cores, (major, minor), l2, memory, name = TARGETS[target]
    version = 'driver_version: "13.0.0" runtime_version: "12.8.0"'
    return (
        "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32"
        " shared_memory_per_block: 49152 shared_memory_per_core: 233472"
        f" threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128"
        " block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535"
        f" memory_bandwidth: 4800000000000 l2_cache_size: {l2} clock_rate_ghz: 1.98"
        f" device_memory_size: {memory} shared_memory_per_block_optin: 232448"
        f" cuda_compute_capability {{ major: {major} minor: {minor}"
        " feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536"
        " registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024"
        f' thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" name: "{name}" {version}'
        ' compile_time_toolkit_version: "12.8.0" dnn_version: "9.15.0" } platform_name: "CUDA"'
        f' dnn_version_info {{ major: 9 minor: 15 }} device_description_str: "{name}"'
    )


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name -> (function, abstract arguments); two layers stand for the stack."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import attn_res, experts, kda, latent_up, mxfp4, route, skinny

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
                ("sum_inside", replace(usual, one_kernel=True, sum_inside=True)),
            ):
                if other != usual:
                    out[f"experts.{form}.tp{ranks}.rows{m}"] = (
                        lambda *a, width=width, other=other: experts.experts(
                            *a, width=width, betas=situ, tuning=other
                        ),
                        out[f"experts.tp{ranks}.rows{m}"][1],
                    )
    for batch, tokens, commit in ((1, 1, True), (1, 8, False), (64, 1, True), (8, 8, False)):
        out[f"kda.tp16.batch{batch}.tokens{tokens}"] = (
            lambda *a, commit=commit: kda.kda(
                *a[:3], kda.Weights(*a[3:8]), a[8], kda.Rows(*a[9:]),
                eps=1e-5, lower_bound=-5.0, commit=commit,
            ),
            (
                s(bf16, batch * tokens, 3208), s(f32, 2, batch, 6, 128, 128),
                s(bf16, 2, batch, 3, 2304), s(bf16, 2, 768, 128), s(f32, 2, 2304, 4),
                s(f32, 2, 6), s(f32, 2, 768), s(f32, 2, 128), layer, *[s(i32, batch)] * 3,
            ),
        )  # fmt: skip
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
    call = partial(experts_row.experts_row, k=16, scaling=2.5, width=width, betas=(4.0, 25.0))
    return call, (row, w13, w2, meeting.COUNTERS, s((), jnp.int32))


def _mix_cases(m: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """AttnRes with the products behind it, as the layers of a TP16 rank have them."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import mix_products, route, skinny

    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    s, d = jax.ShapeDtypeStruct, 7168

    def call(items: Callable[..., Any], zeros: bool) -> Callable[..., Any]:
        def run(prefix, bank, delta, shared, *rest):
            *stacks, counters, layer = rest[:5]
            mix = mix_products.Mix(prefix, bank, layer, delta, *stacks, layer, shared)
            return mix_products.mix_products(
                mix, items(rest[5:]), counters, layer, eps=1e-5, zeros=zeros
            )

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
            call(items, name == "route"),
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
    return out


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


@contextlib.contextmanager
def _reports(folder: Path) -> Iterator[None]:
    names = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    os.environ |= names
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def compile_case(
    target: str, call: Callable[..., Any], avals: tuple[Any, ...], hosts: int = 1, gpus: int = 1
) -> list[str]:
    """Compile; ptxas' lines `kernel registers spilled` for every kernel in it.

    On several GPUs the call is one rank's, and so are its arguments: vectors, of which a rank holds
    a part.
    """
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description(target), topology=f"1x{hosts}x{gpus}"
    )
    ranks = hosts * gpus
    mesh = topologies.make_mesh(topology, (ranks,), ("x",))
    cut = jax.sharding.PartitionSpec(*["x"] * (ranks > 1))
    here = jax.sharding.NamedSharding(mesh, cut)

    def place(a: Any) -> Any:
        shape = tuple(n * ranks for n in a.shape) if ranks > 1 else a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=here)

    placed = jax.tree.map(place, avals)
    if ranks > 1:
        call = jax.shard_map(call, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    with tempfile.TemporaryDirectory() as name:
        with _reports(Path(name)), jax.default_device(topology.devices[0]):
            text = jax.jit(call).lower(*placed).compile().as_text() or ""
        if hosts > 1 and SYMMETRIC not in text:
            raise RuntimeError("what other processes write to does not lie in symmetric memory")
        lines = []
        for file in sorted(Path(name).glob("*.ptxas")):
            text = file.read_text()
            registers = re.findall(r"Used (\d+) registers", text)[-1]
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill", text.split("Function")[-1])))
            kernel = re.sub(r"_\d+$", "", file.stem)
            lines.append(f"{kernel} {registers} {spilled}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Compile the cases of one target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", choices=tuple(TARGETS), default="h200")
    parser.add_argument("--match", nargs="+", default=[""], help="parts of names of cases")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1, help="of a host")
    args = parser.parse_args(argv)
    folder = plugin_folder()
    if folder is None:
        print("NOT RUN: no CUDA plugin with ptxas; install the extra `aot`", file=sys.stderr)
        return 2
    # no driver and no cuDNN here; nothing to tune on
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    os.environ["PATH"] += os.pathsep + str(folder / "bin")
    bad = 0
    ranks = args.hosts * args.gpus
    every = exchange_cases(ranks, args.hosts) if ranks > 1 else cases() | mla_cases()
    if args.target != "h200":  # wgmma in it
        every = {name: case for name, case in every.items() if not name.startswith("mix_")}
    chosen = [name for name in every if any(part in name for part in args.match)]
    if not chosen:
        known = ", ".join(every)
        print(f"no case has {args.match} in its name; there are {known}", file=sys.stderr)
        return 2
    for name in chosen:
        call, avals = every[name]
        for line in compile_case(args.target, call, avals, args.hosts, args.gpus):
            kernel, registers, spilled = line.split()
            print(f"{name}: {kernel} {registers} registers, {spilled} bytes spilled", flush=True)
            bad += int(spilled) > 0 and kernel not in MAY_SPILL
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

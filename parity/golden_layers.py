"""Every layer of a recorded model on its recorded input: the sharp comparison, in both dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from parity.driver import Arrays, Driver
from parity.folders import Folder
from parity.golden_limits import router_choice
from parity.golden_model import EPS, RUNS, inconsistencies, rmsnorm
from parity.layerwise import Built, build_layer, inject
from parity.verdict import Verdict, Where, compare, not_recorded, not_run


def check_layers(
    folder: Folder,
    runs: tuple[tuple[str, str], ...] = RUNS,
    build: Callable[..., Built] = build_layer,
    layers: tuple[int, ...] | None = None,
) -> Iterator[Verdict]:
    """Compares the layers of a folder, each fed with what was recorded before it.

    Args:
        folder: of kind `model`.
        runs: (dtype, profile) pairs.
        build: makes compiled layers, see `layerwise.inject`.
        layers: 0-based; None takes all whose input was recorded.
    """
    g = folder.tensors
    where = Where("model", folder.name, "injected")
    if "seq.layer00.prefix_sum_out" not in g:
        yield not_recorded(where, "layers", "no stream of the first layer: nothing to inject")
        return
    if wrong := inconsistencies(g):
        cause = f"golden.safetensors: {'; '.join(wrong)}"
        yield not_run(where, "layers", cause)
        return
    ids = np.asarray(g["seq_ids"])
    for dtype, profile in runs:
        driver = Driver.open(folder.path, dtype, profile, len(ids), mla_norm_eps=EPS)
        c = driver.config
        table = np.asarray(driver.weights.root.embed_tokens[ids].astype("float32"))
        streams = [table.astype(np.float64)]
        for layer in range(c.num_hidden_layers):
            out = g.get(f"seq.layer{layer:02d}.prefix_sum_out")
            if out is None:
                cause = "no prefix_sum_out: neither it nor a later layer can be judged alone"
                yield not_recorded(where, f"layer{layer:02d}", cause)
                break
            if layers is None or layer in layers:
                bank = [streams[i] for i in range(layer) if c.starts_block(i)]
                own = inject(driver, layer, streams[layer], bank, build)
                at = where.at(case=f"injected layer{layer:02d}", dtype=dtype, profile=profile)
                yield from _layer(at, layer, own, streams[layer], g, driver)
            streams.append(np.asarray(out, np.float64))


def _layer(
    at: Where, layer: int, own: Arrays, before: np.ndarray, g: Arrays, driver: Driver
) -> Iterator[Verdict]:
    c, w = driver.config, driver.weights.layer
    recorded = {
        k.rsplit(".", 1)[1]: np.asarray(v, np.float64 if v.dtype.kind != "i" else v.dtype)
        for k, v in g.items()
        if k.startswith(f"seq.layer{layer:02d}.")
    }
    eps, want = c.rms_norm_eps, {}
    if "attn_norm_in" in recorded:
        want["x"] = rmsnorm(recorded["attn_norm_in"], w.input_layernorm[layer], eps)
    if "mlp_norm_in" in recorded:
        want["y"] = rmsnorm(recorded["mlp_norm_in"], w.post_attention_layernorm[layer], eps)
    if "attn_out" in recorded:
        start = 0.0 if c.starts_block(layer) else before
        want["prefix"] = start + recorded["attn_out"]
    keep = np.ones(len(before), bool)
    if "router_idx" in recorded and "ids" in own:
        idx = recorded["router_idx"]
        yield router_choice(at, own["ids"], idx, recorded.get("router_gap"), "router_injected")
        if own["ids"].shape == idx.shape:
            keep = (np.sort(own["ids"], -1) == np.sort(idx, -1)).all(-1)
    note = "" if keep.all() else f"{int((~keep).sum())} rows with another expert set left out"
    for name, value in want.items():
        yield compare(at, name, own[name], value, "sublayer")
    if "mlp_out" in recorded:
        got, value = own["delta"][keep], recorded["mlp_out"][keep]
        yield compare(at, "mlp_out", got, value, "sublayer", note=note)
    got, value = own["out"][keep], recorded["prefix_sum_out"][keep]
    yield compare(at, "prefix_sum_out (injected)", got, value, "sublayer", note=note)
    for name in sorted(set(own) & set(recorded) - {"out"}):
        value = recorded[name]
        if "conv_state" in name:
            value = value[:, value.shape[1] - own[name].shape[1] :]
        yield compare(at, name, own[name], value, "sublayer_cache")

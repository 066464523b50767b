"""Known mistakes, made on purpose: the comparisons must reject every one of them.

A mutant replaces one function (or one attribute) of `jax_impl` while it is traced anew, or one
setting; then the comparison that ought to notice runs on it. A mutant that no comparison rejects is
a failure, and so is a control, the unchanged code under the same comparison, that does not pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jax_impl.ops.experts as experts_module
from jax_impl.backend import STAGES, Backend
from jax_impl.config import RunConfig
from jax_impl.ops import attn_res, kda, mla, mxfp4, norm, router, situ
from jax_impl.stages import standard
from jax_impl.static import Static
from parity import wrong
from parity.cases import CASES
from parity.driver import ROWS, Driver, Session, load
from parity.folders import open_folder, read_tensors
from parity.golden_layers import check_layers
from parity.golden_model import EPS
from parity.golden_ops import check_operation, op_name, operations
from parity.layerwise import fresh_layer
from parity.report import worst
from parity.verdict import Verdict, Where, compare, failed

MODEL = "model_tiny3"
FP8_TOKENS = 64
_FP8_BASE = {"mla_norm_eps": EPS, "kv_dtype": "float8_e4m3fn"}


@contextmanager
def replaced(holder: Any, name: str, make: Callable[..., Any]) -> Iterator[None]:
    """`holder.name` becomes `make` with the original as first argument, until the block ends."""
    original = getattr(holder, name)
    setattr(holder, name, functools.partial(make, original))
    try:
        yield
    finally:
        setattr(holder, name, original)


@contextmanager
def fixed_latent_eps() -> Iterator[None]:
    """The MLA latent norms use the epsilon of all other norms, whatever the settings say."""
    original = RunConfig.latent_eps
    RunConfig.latent_eps = property(lambda self: 1e-5)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        RunConfig.latent_eps = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: the mistake in words.
        check: comparison that must reject it, see `_CHECKS`; `op:FILE`, `case:ID`, `layer:N`,
            `blocks`, `fp8`.
        patches: (holder, attribute, wrong function) to be replaced together.
        context: another way to make the mistake.
        in_table: whether the table of recorded mistakes lists it.
    """

    name: str
    check: str
    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = ()
    context: Callable[[], Any] | None = None
    in_table: bool = True

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The code base with the mistake in it."""
        if self.context is not None:
            with self.context():
                yield
            return
        with functools.reduce(_both, (replaced(*p) for p in self.patches)):
            yield


@contextmanager
def _both(a: Any, b: Any) -> Iterator[None]:
    with a, b:
        yield


_ATTEND = ("absorbed_attention", "explicit_attention")
MUTANTS: tuple[Mutant, ...] = (
    Mutant("A_log per channel", "op:kda_gate", ((kda, "log_decay", wrong.decay_per_channel),)),
    Mutant("softplus gate", "op:kda_gate", ((kda, "log_decay", wrong.decay_softplus),)),
    Mutant("linear_beta ignored", "op:situ", ((situ, "situ", wrong.situ_uncapped_up),)),
    Mutant("silu instead of SiTU", "op:situ", ((situ, "situ", wrong.situ_silu),)),
    Mutant("nibbles swapped", "op:mxfp4", ((mxfp4, "dequantise", wrong.nibbles_swapped),)),
    Mutant("w1/w3 swapped", "op:latent_moe", ((experts_module, "situ", wrong.situ_swapped),)),
    Mutant(
        "bias inside the expert weight", "op:router_k3",
        ((router, "choose_experts", wrong.router_bias_in_weight),),
    ),
    Mutant(
        "bias not used in selection", "op:router_k3",
        ((router, "choose_experts", wrong.router_no_bias),),
    ),
    Mutant(
        "AttnRes mixes normalised values", "op:attn_res",
        ((attn_res, "attn_res", wrong.mix_of_normalised),),
    ),
    Mutant(
        "prefix not reset at a block start", "layer:2",
        ((standard, "attn_out", wrong.never_resets),),
    ),
    Mutant("block size +1", "blocks"),
    Mutant(
        "KDA output scale missing", "op:kda_recurrent_T8",
        ((kda, "recurrence", wrong.no_output_scale),),
    ),
    Mutant(
        "decay after the prediction", "op:kda_recurrent_T8",
        ((kda, "delta_step", wrong.decay_after_prediction),),
    ),
    Mutant("RoPE applied in MLA", "op:mla", tuple((mla, n, wrong.with_rope) for n in _ATTEND)),
    Mutant(
        "KDA output gate silu", "op:gated_rmsnorm", ((norm, "gated_rmsnorm", wrong.gate_silu),)
    ),
    Mutant("MLA output gate missing", "op:mla", ((mla, "output_gate", wrong.no_output_gate),)),
    Mutant("latent eps 1e-5", "op:mla", context=fixed_latent_eps),
    Mutant("latent eps 1e-5, small rows", "case:mla-small latents", context=fixed_latent_eps),
    Mutant(
        "l2norm without eps", "case:kda_recurrent-small keys",
        ((norm, "l2norm", wrong.l2_without_eps),),
    ),
    # ---- not in the table of recorded mistakes ----
    Mutant(
        "l2norm eps on the mean", "case:kda_recurrent-small keys",
        ((norm, "l2norm", wrong.l2_eps_on_mean),), in_table=False,
    ),
    Mutant(
        "clamped softplus gate", "op:kda_gate", ((kda, "log_decay", wrong.decay_clamped),),
        in_table=False,
    ),
    Mutant(
        "read before write", "op:kda_recurrent_T8", ((kda, "delta_step", wrong.read_before_write),),
        in_table=False,
    ),
    Mutant(
        "state as [key, value]", "op:kda_recurrent_T8",
        ((kda, "recurrence", wrong.state_key_first),), in_table=False,
    ),
    Mutant(
        "convolution taps reversed", "op:short_conv", ((kda, "short_conv", wrong.taps_reversed),),
        in_table=False,
    ),
    Mutant(
        "convolution window kept", "op:short_conv",
        ((kda, "next_window", wrong.window_not_advanced),), in_table=False,
    ),
    Mutant(
        "softmax scale without rope", "op:mla",
        tuple((mla, n, wrong.scale_without_rope) for n in _ATTEND), in_table=False,
    ),
    Mutant(
        "no causal mask", "op:mla", tuple((mla, n, wrong.sees_the_future) for n in _ATTEND),
        in_table=False,
    ),
    Mutant(
        "router without groups", "op:router_grouped",
        ((router, "choose_experts", wrong.router_no_groups),), in_table=False,
    ),
    Mutant(
        "routed scaling forgotten", "op:router_scaled",
        ((router, "choose_experts", wrong.router_no_scaling),), in_table=False,
    ),
    Mutant(
        "unused snapshots multiplied by zero", "op:attn_res",
        ((attn_res, "attn_res", wrong.masked_by_product),), in_table=False,
    ),
    Mutant(
        "snapshot before the mix", "layer:2", ((standard, "attn_in", wrong.snapshot_before_mix),),
        in_table=False,
    ),
    Mutant(
        "KDA state not committed", "layer:3", ((standard, "_commit_layer", wrong.never_commits),),
        in_table=False,
    ),
    Mutant(
        "FP8 read scale dropped", "fp8", ((mla, "from_cache", wrong.no_read_scale),), in_table=False
    ),
)  # fmt: skip


def check_mutants(recorded: Path, chosen: tuple[Mutant, ...] = MUTANTS) -> Iterator[Verdict]:
    """One verdict per mutant, and one control per comparison that is used.

    Args:
        recorded: directory that holds the recorded folders.
        chosen: mutants to try.
    """
    for check in dict.fromkeys(m.check for m in chosen):
        where = Where("mutants", MODEL if _needs_model(check) else "ops", f"control of {check}")
        found = list(_run(check, recorded))
        bad = [v for v in found if not v.passed]
        if bad or not found:
            note = f"the unchanged code fails: {bad[0].quantity}" if bad else "nothing was compared"
            yield failed(where, "unchanged code passes", note)
        else:
            w = worst(found)
            note = f"nearest to its limit: {w.quantity}, {w.judged}"
            yield dataclasses.replace(w, where=where, quantity="unchanged code passes", note=note)
        for mutant in (m for m in chosen if m.check == check):
            yield _verdict(mutant, where, recorded)


def _verdict(mutant: Mutant, where: Where, recorded: Path) -> Verdict:
    """Passed means that a comparison rejected the mutant by its numbers."""
    with mutant.applied() if mutant.check != "blocks" else _nothing():
        found = list(_run(mutant.check, recorded, wrong_blocks=mutant.check == "blocks"))
    where = where.at(case=mutant.name)
    crashed = [v for v in found if v.status == "not run"]
    if crashed:
        return failed(where, mutant.check, f"did not run, which rejects nothing: {crashed[0].note}")
    rejecting = [v for v in found if v.status == "failed"]
    if not rejecting:
        return failed(where, mutant.check, f"ACCEPTED by all {len(found)} comparisons")
    w = worst(rejecting)
    if w.metrics.get("pattern_equal") is False:
        how = "NaN where numbers belong"
    else:
        how = f"{(w.value or 0) / w.limit:.3g} times the limit" if w.limit else "exactness lost"
    note = f"{len(rejecting)} of {len(found)} comparisons reject it; {w.quantity}: {how}"
    quantity = f"rejected by {w.quantity}"
    return dataclasses.replace(w, where=where, quantity=quantity, status="passed", note=note)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _needs_model(check: str) -> bool:
    return check.startswith("layer") or check in ("blocks", "fp8")


def _run(check: str, recorded: Path, *, wrong_blocks: bool = False) -> Iterator[Verdict]:
    """The comparison behind a name, always traced anew."""
    kind, _, target = check.partition(":")
    if kind == "op":
        for stem, meta in operations(recorded / "ops"):
            if stem == target:
                tensors = read_tensors(recorded / "ops" / f"{stem}.safetensors")
                where = Where("mutants", "ops", stem)
                op = op_name(meta["op"])
                yield from check_operation(
                    where, op, tensors, meta, ("jax",), ("float32",), ("V", "-")
                )
    elif kind == "case":
        from parity.case_check import check_cases

        chosen = [c for c in CASES if c.id == target]
        yield from check_cases(chosen, ("float32",), ("V", "-"))
    elif kind == "layer":
        folder = open_folder(recorded / MODEL)
        layers = (int(target),)
        yield from check_layers(folder, (("float32", "V"),), _fresh, layers)
    elif kind == "blocks":
        yield from _blocks(recorded, wrong_blocks)
    elif kind == "fp8":
        yield from _fp8(recorded)
    else:
        raise ValueError(f"unknown check {check!r}")


def _backend():
    """The stage table with the functions that `standard` holds at this moment."""
    return Backend(**{name: getattr(standard, name) for name in STAGES})


def _fresh(static: Static, starts_block: bool):
    return fresh_layer(static, starts_block, _backend())


def _blocks(recorded: Path, wrong_size: bool) -> Iterator[Verdict]:
    """Whole-model logits, with the snapshot interval of the file or one more."""
    folder = open_folder(recorded / MODEL)
    ids = np.asarray(folder.tensors["seq_ids"])
    driver = Driver.open(folder.path, "float32", "V", len(ids), mla_norm_eps=EPS)
    if wrong_size:
        c = driver.config
        config = dataclasses.replace(c, attn_res_block_size=c.attn_res_block_size + 1)
        driver = dataclasses.replace(driver, config=config)
    logits, _, _, _ = driver.whole(ids)
    where = Where("mutants", folder.name, "whole", "float32", "V")
    yield compare(where, "logits", logits, folder.tensors["logits_f64"], "logits", logits=True)


def _fp8(recorded: Path) -> Iterator[Verdict]:
    """Decode over an FP8 latent cache with scales 1 and 4, and over a bf16 cache."""
    config, _ = load((recorded / MODEL).resolve())
    ids = np.random.default_rng(0).integers(0, config.vocab_size, FP8_TOKENS)
    runs: dict[str, dict[str, Any]] = {
        "bf16 cache": {"kv_dtype": "bfloat16", "mla_norm_eps": EPS},
        "scale 1": _FP8_BASE | {"kv_scale": 1.0},
        "scale 4": _FP8_BASE | {"kv_scale": 4.0},
    }
    rows = {name: _decode(recorded / MODEL, ids, settings) for name, settings in runs.items()}
    for name, other in (
        ("scale 1", "bf16 cache"),
        ("scale 4", "bf16 cache"),
        ("scale 4", "scale 1"),
    ):
        where = Where("mutants", MODEL, "fp8", "float32", "V", f"jax, {other}")
        yield compare(where, f"logits, {name}", rows[name], rows[other], "fp8_scale", logits=True)


def _decode(path: Path, ids: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """Logits [T, V] of `ids` fed one at a time through a freshly traced step."""
    import jax

    from jax_impl.step import step

    driver = Driver.open(path, "float32", "V", len(ids), **settings)
    static, backend = driver.static, _backend()

    def run(weights, cache, inputs):
        return step(static, backend, "all", weights, cache, inputs)

    session = Session(driver, seed=8, step=jax.jit(run, donate_argnums=1))
    sequence = session.sequence(slot=2)
    for token in ids:
        session.step([(sequence, np.array([token]))] + [None] * (ROWS - 1), 1)
    return sequence.rows()

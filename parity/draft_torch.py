"""The drafter of `torch_ref` on recorded taps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from parity.golden_dspark import EPS, Arrays, DraftCase
from parity.op_torch import DTYPES
from parity.torch_threads import one_thread
from torch_ref.draft import Draft
from torch_ref.model import Model
from torch_ref.numerics import Numerics


def open_drafter(
    draft: Path, target: Path, dtype: str, profile: str, _cases: list[DraftCase]
) -> Callable[[DraftCase], Arrays]:
    """A function from a case to everything recorded about it, by recorded name."""
    nm = Numerics(DTYPES[dtype], profile, mla_norm_eps=EPS)
    return Runner(Draft.load(draft, Model.load(target, nm), nm))


class Runner:
    """One drafter under one `Numerics`."""

    def __init__(self, draft: Draft) -> None:
        """Keeps the drafter."""
        self.draft = draft

    def __call__(self, case: DraftCase) -> Arrays:
        """Context in two pieces, then one block."""
        with one_thread():
            return self._run(case)

    def _run(self, case: DraftCase) -> Arrays:
        draft, state = self.draft, self.draft.new_state()
        streams: dict[str, torch.Tensor] = {}
        taps = torch.from_numpy(case.taps)
        cut = len(taps) // 2
        for part in (taps[:cut], taps[cut:]):
            draft.write_context(part, state)
        out = draft.propose(case.anchor, len(taps), state, case.drafts, record=streams)
        found = {
            "context": draft.context(taps),
            "final_hidden": out.hidden,
            "base_logits": out.base_logits,
            "logits": out.logits,
            **streams,
        }
        for layer, rows in enumerate(state.rows):
            latent, key = rows.split([draft.config.kv_lora_rank, draft.config.qk_rope_head_dim], -1)
            found[f"layers.{layer}.context_latent"] = latent
            found[f"layers.{layer}.context_k_pe"] = key
        arrays = {name: value.double().numpy() for name, value in found.items()}
        return arrays | {"draft_ids": np.asarray(out.ids)}

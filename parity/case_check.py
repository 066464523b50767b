"""`jax_impl` against the PyTorch reference in float64, on the cases of `parity.cases`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from parity.cases import Case, cases
from parity.golden_ops import check_operation
from parity.inputs import make_inputs
from parity.verdict import Verdict, Where


def check_cases(
    chosen: Iterable[Case] | None = None,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    profiles: tuple[str, ...] = ("H", "V", "-"),
) -> Iterator[Verdict]:
    """Verdicts for all cases (those tagged `ci` by default) in those of their dtypes."""
    for case in cases() if chosen is None else chosen:
        tensors, meta = with_truth(case)
        kept = tuple(d for d in case.dtypes if d in dtypes)
        where = Where("ops", "cases", case.id, against="torch_ref float64")
        yield from check_operation(where, case.op, tensors, meta, ("jax",), kept, profiles)


def with_truth(case: Case) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Inputs of a case with the float64 results of `torch_ref` under their recorded names."""
    from parity import op_torch  # PyTorch only where it is needed

    tensors, meta = make_inputs(case)
    truth = op_torch.run(case.op, tensors, meta, "float64", "H")
    for name, value in truth.items():
        # what a recording holds without suffix: stored columns and integers
        plain = name == "idx" or (case.op == "short_conv" and name.startswith("state_"))
        tensors[name if plain else f"{name}_f64"] = value
    if "idx" in tensors:
        tensors["idx"] = tensors["idx"].astype(np.int64)
    return tensors, meta

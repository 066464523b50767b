"""Known mistakes must be rejected. What a comparison accepts, it does not test."""

from __future__ import annotations

import pytest

from parity.mutants import MUTANTS, check_mutants, replaced
from parity.report import good, problems

# The mistakes for which recorded effects on logits exist.
TABLE = """A_log per channel; softplus gate; linear_beta ignored; silu instead of SiTU;
nibbles swapped; w1/w3 swapped; bias inside the expert weight; bias not used in selection;
AttnRes mixes normalised values; prefix not reset at a block start; block size +1;
KDA output scale missing; decay after the prediction; RoPE applied in MLA; KDA output gate silu;
MLA output gate missing; latent eps 1e-5; l2norm without eps"""
CHECKS = list(dict.fromkeys(m.check for m in MUTANTS))


@pytest.mark.parametrize("check", CHECKS)
def test_mutants_are_rejected_and_their_control_passes(golden_dir, check):
    if check.startswith("case"):
        pytest.importorskip("torch")
    chosen = tuple(m for m in MUTANTS if m.check == check)
    found = list(check_mutants(golden_dir, chosen))
    assert len(found) == 1 + len(chosen)
    assert good(found), problems(found)


def test_every_mistake_of_the_table_has_its_mutant():
    wanted = {line.strip() for line in TABLE.replace("\n", " ").split(";")}
    assert wanted <= {m.name for m in MUTANTS if m.in_table}


def test_names_are_unique():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def test_a_mutant_that_changes_nothing_is_reported_as_accepted(golden_dir):
    import dataclasses

    from jax_impl.ops import situ

    harmless = dataclasses.replace(
        next(m for m in MUTANTS if m.check == "op:situ"),
        name="harmless",
        patches=((situ, "situ", lambda original, *a: original(*a)),),
    )
    control, verdict = check_mutants(golden_dir, (harmless,))
    assert control.passed
    assert verdict.status == "failed" and "ACCEPTED" in verdict.note


def test_a_replacement_ends_with_its_block_even_after_an_error():
    class Holder:
        value = staticmethod(lambda: 1)

    with pytest.raises(RuntimeError), replaced(Holder, "value", lambda original: original() + 1):
        assert Holder.value() == 2
        raise RuntimeError
    assert Holder.value() == 1

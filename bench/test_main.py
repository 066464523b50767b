"""The command line: help without heavy imports, and every command there."""

import subprocess
import sys

import pytest

from bench.__main__ import COMMANDS, main
from jax_impl.number_list import numbers
from jax_impl.output import BAD_INPUT


def test_help_needs_neither_jax_nor_numpy():
    code = (
        "import sys, bench.__main__ as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_lists_of_numbers_are_plain():
    assert numbers("1, 8,64") == (1, 8, 64) and numbers("-1") == (-1,)  # ranges come later
    for wrong in ("", "1,", "1_0", "+1", "1.0", "\u0661", "\u00b2", "1;2"):
        with pytest.raises(ValueError, match="expected whole numbers with commas"):
            numbers(wrong)


@pytest.mark.parametrize(
    ("typed", "meant"), [("rooflin", "roofline"), ("rank_slice", "rank-slice"), ("op", "ops")]
)
def test_an_unknown_command_is_answered_with_one_that_is_alike(typed, meant, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([typed, "x"])
    assert stopped.value.code == BAD_INPUT
    assert f"bench: found no command {typed!r}; did you mean {meant}?" in capsys.readouterr().err

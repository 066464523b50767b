"""The command line: help without heavy imports, and every command there."""

import subprocess
import sys

from bench.__main__ import COMMANDS


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

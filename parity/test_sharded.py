"""The step on several ranks, on emulated devices; each group in a process that has them.

The number of devices is fixed when JAX starts, and the other tests run with one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity.sharded import FULL, MATRIX, PRESET, Setting

ROOT = Path(__file__).parents[1]


def run(code: str, devices: int = 16, timeout: float = 1500) -> str:
    """Output of Python code in a process with emulated devices; fails with its errors."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


CHECK = """
from parity import sharded
from parity.sharded import Setting
bad = [v for v in sharded.check_sharded({settings!r}) if not v.passed]
for v in bad:
    print(v)
assert not bad
"""


SHORT = {
    "model_tiny16": (Setting(16, True, 8, True),),
    PRESET: (Setting(8, False, 1, False, "ep"),),
}


@pytest.mark.parametrize("subject", SHORT)
def test_logits_tokens_and_replicas(subject):
    run(CHECK.format(settings={subject: SHORT[subject]}))


@pytest.mark.slow
@pytest.mark.parametrize("subject", FULL)
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("dcp", [False, True])
def test_whole_matrix(subject, tp, dcp):
    chosen = tuple(s for s in FULL[subject] if s.tp == tp and s.dcp == dcp)
    assert chosen
    run(CHECK.format(settings={subject: chosen}), timeout=3000)


def test_the_matrix_covers_every_choice():
    assert len(set(MATRIX)) == 16
    for field, values in {
        "tp": {8, 16}, "dcp": {False, True}, "batch": {1, 8}, "verify": {False, True},
        "experts": {"tp", "ep"}, "interleave": {1, 4},
    }.items():  # fmt: skip
        assert {getattr(s, field) for s in MATRIX} == values


COLLECTIVES = """
import collections, re
from jax_impl.cache import StepInputs
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import RunConfig
from jax_impl.params import abstract_weights
from jax_impl.sharding import *
from jax_impl.static import Static
from jax_impl.step import build_step
import jax, numpy as np, sys
import jax.numpy as jnp
from jax.sharding import NamedSharding

config = Checkpoint.open("parity/golden/model_tiny16").config
run = RunConfig(compute="bfloat16", slots=2, pages=2, page_size=2, dcp=DCP)
placement = place_ranks(16, run)
mesh = placement.mesh

def whole(local, specs):
    def one(a, s):
        cut = next((i for i, n in enumerate(s) if n), None)
        shape = global_shape(a.shape, cut, 16)
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=NamedSharding(mesh, s))
    return jax.tree.map(one, local, specs)

weights = whole(abstract_weights(config, 16), weight_specs(config, run))
cache = jax.eval_shape(lambda: make_spread_cache(config, run, placement))
shapes = cache_shapes(config, run, placement.ranks)
specs = cache_specs(run).replace(kv_scale=None, draft_kv=None)
cache = whole(shapes, specs)
i32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
inputs = StepInputs(i32(1, 8), i32(1), i32(1), i32(1), i32(1, 2),
                    jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.uint32))
static = Static(config, run, placement.ranks)
compiled = build_step(static, rows="all", mesh=mesh).lower(weights, cache, inputs).compile()
text = compiled.as_text()
found = collections.defaultdict(collections.Counter)
for line in text.splitlines():
    kind = re.search(r"= .*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\\(", line)
    if kind:
        scope = re.search(r'op_name="[^"]*?(layer\\d\\d)', line)
        groups = re.search(r"replica_groups=(\\S+)", line)
        assert groups and groups[1].rstrip(",") in (
            "[1,16]<=[16]", "{{" + ",".join(map(str, range(16))) + "}}"), line
        found[scope[1] if scope else "rest"][kind[1]] += 1
for layer in range(config.num_hidden_layers):
    want = collections.Counter({"all-reduce": 2})
    if not config.is_dense(layer):
        want["all-gather"] += 2
    if config.is_mla(layer) and DCP > 1:
        want["all-gather"] += 1
        want["all-to-all"] += 1
    assert found[f"layer{layer:02d}"] == want, (layer, found)
# embedding and finiteness; (max, argmax) per row and the drawn token
assert found["rest"] == collections.Counter({"all-reduce": 2, "all-gather": 2}), found
memory = compiled.memory_analysis()
held = sum(np.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(cache))
assert memory.alias_size_in_bytes >= held, (memory.alias_size_in_bytes, held)
"""


@pytest.mark.parametrize("dcp", [1, 16])
def test_exchanges_per_layer_and_a_cache_in_place(dcp):
    """o_proj, one packed gather, one packed reduce, the output gather; two more in MLA with dcp.

    One program runs on all ranks, and every exchange spans all of them.
    """
    run(COLLECTIVES.replace("DCP", str(dcp)))


TAMPERED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_impl.sharding import unequal_replicas
mesh = Mesh(np.array(jax.devices()), ("tp",))
parts = [jax.device_put(np.float32([1, 2]), d) for d in jax.devices()]
same = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), parts)
parts[3] = jax.device_put(np.nextafter(np.float32([1, 2]), 3), jax.devices()[3])
other = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P()), parts)
assert unequal_replicas({"a": same, "b": other}) == ["['b']"]
"""


def test_one_replica_that_differs_in_the_last_bit_is_found():
    run(TAMPERED)


def test_settings_have_names_of_their_own():
    names = [s.name for s in MATRIX]
    assert len(set(names)) == len(names) and "dcp" in Setting(8, True, 1, False).name

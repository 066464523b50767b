"""Shared memory that a kernel asks for beyond what it uses; units dealt to CTAs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import common, experts
from pallas_kernels.experts_pairs import Pairs
from pallas_kernels.row_product import WARPS, RowUnits
from parity.ptx_lanes import Lanes, Ref

CORES, ALL = 132, 200 << 10
BF16 = jnp.bfloat16


def split(monkeypatch, scratch, grid=(8,), cores: int | None = CORES, **kw):
    """The new body and scratch memory, and what the old body is called with."""
    monkeypatch.setattr(common, "cores", lambda: cores)
    seen = []
    kw |= dict(scratch_types=scratch, grid=grid, num_threads=4)
    before, held = dict(kw), scratch.copy()
    body, found = common._with_the_largest_split(
        lambda *args, **named: seen.append((args, named)), kw
    )
    assert kw == before and scratch == held, "the caller's own are left as they are"
    assert found | dict(scratch_types=scratch) == kw
    return body, found["scratch_types"], seen


def smem(*shape, dtype=jnp.float32):
    return plgpu.SMEM(shape, dtype)


def bytes_of(ref):
    assert ref.memory_space == plgpu.SMEM
    return math.prod(ref.shape) * ref.dtype.itemsize


@pytest.mark.parametrize(
    ("grid", "cluster", "cores", "padded"),
    [
        ((132,), None, 132, True), ((133,), None, 132, False), ((11, 12), None, 132, True),
        ((12, 12), None, 132, False), ((132,), (1,), 132, True),
        ((64,), (2,), 132, True), ((65,), (2,), 132, False),
        ((16,), (8,), 132, True), ((17,), (8,), 132, False),
        ((16,), (7,), 132, True), ((17,), (7,), 132, False), ((8,), (17,), 132, False),
        ((16,), (2, 4), 132, True), ((17,), (2, 4), 132, False),
        ((148,), None, 148, True), ((149,), None, 148, False),
        ((72,), (2,), 148, True), ((73,), (2,), 148, False), ((17,), (8,), 148, False),
        ((1,), None, None, False), ((1,), (2,), None, False),
    ],
)  # fmt: skip
def test_one_cta_per_multiprocessor_asks_for_all(monkeypatch, grid, cluster, cores, padded):
    """Clusters count by the groups of 16 or 18 multiprocessors that hold them."""
    kw = {} if cluster is None else dict(cluster=cluster)
    own = dict(a=smem(1000))  # 4000 bytes are 4 KB
    body, scratch, seen = split(monkeypatch, own, grid, cores, **kw)
    body(1, 2, **dict.fromkeys(scratch, 3))
    assert seen == [((1, 2), dict(a=3))], "the own body gets its own arguments"
    if padded:
        assert scratch == own | dict(unused=scratch["unused"])
        assert bytes_of(scratch["unused"]) + 4096 == ALL
    else:
        assert scratch is own


UNION = plgpu.RefUnion([smem(256), smem(257)], [smem(600), smem(1)])  # 1 + 2 KB or 3 + 1
ONE = plgpu.RefUnion([smem(2048, dtype=BF16)], [smem(1)])


@pytest.mark.parametrize(
    ("refs", "kilobytes"),
    [
        ([smem(1)], 1), ([smem(256)], 1), ([smem(257)], 2), ([smem(1), smem(256)], 2),
        ([smem(3, 100, 7, dtype=BF16)], 5), ([smem(2, 2048, dtype=jnp.int8)], 4),
        ([UNION], 4), ([ONE, UNION, smem(1)], 9), ([plgpu.RefUnion([smem(1)], [UNION])], 4),
        ([plgpu.Barrier(num_barriers=3), plgpu.Barrier()], 0),
        ([plgpu.TMEM((128, 64), jnp.float32), smem(8)], 1),
        ([smem(ALL // 4 - 256)], 199), ([smem(ALL // 4 - 255)], 200), ([smem(ALL // 4)], 200),
        ([smem(ALL // 4 + 1)], 201), ([], 0),
    ],
)  # fmt: skip
def test_what_a_kernel_uses_is_counted(monkeypatch, refs, kilobytes):
    scratch = {f"ref{i}": ref for i, ref in enumerate(refs)}
    _, found, _ = split(monkeypatch, scratch)
    assert sum(map(common._shared_bytes, refs)) == kilobytes << 10
    if kilobytes < 200:
        assert bytes_of(found["unused"]) == ALL - (kilobytes << 10)
    else:
        assert found is scratch


def test_a_union_counts_as_jax_lays_it_out():
    for union in (UNION, ONE):
        assert common._shared_bytes(union) == common.round_up(bytes_of(union), 1024)


def test_only_scratch_by_name_gets_more(monkeypatch):
    refs = [smem(8)]
    assert split(monkeypatch, refs)[1] is refs
    assert common._with_the_largest_split(len, dict(grid=(1,))) == (len, dict(grid=(1,)))


@pytest.mark.parametrize("interpret", [False, True])
def test_kernels_ask_for_it_and_keep_their_names(monkeypatch, interpret):
    monkeypatch.setattr(common, "cores", lambda: CORES)
    monkeypatch.setattr(common, "params", lambda **kw: None)
    monkeypatch.setattr(common, "interpreter", lambda: "settings")
    monkeypatch.setattr(plgpu, "kernel", lambda body, **kw: (body.__name__, kw))
    own = dict(a=smem(8))
    name, kw = common.kernel(
        lambda a: None, "k3_name", interpret=interpret, grid=(1,), scratch_types=own
    )
    assert name == "k3_name" and ("unused" in kw["scratch_types"]) is not interpret


# rows, columns, CTAs, warpgroups: of a TP16 rank; most units and most columns of a CTA; a CTA more
# than units; warpgroups without a unit; 9 and 13 groups of columns, of which lanes keep 8 at once
SIZES = [
    (7168, 384, 36, 4), (7168, 384, 76, 2), (7168, 768, 56, 2), (64, 1024, 1, 1), (16, 32, 2, 1),
    (96, 512, 3, 2), (1040, 288, 9, 2), (272, 416, 5, 1), (112, 32, 3, 1), (112, 32, 7, 3),
]  # fmt: skip
COLUMNS = "expected a multiple of 32, at most 1024"


@pytest.mark.parametrize(
    ("sizes", "warpgroups", "unmet"),
    [
        ((64, 1024, 1), 1, []),
        ((80, 1024, 1), 1, ["units of shared per CTA: found 5, expected at most 4, one per warp"]),
        ((64, 1056, 1), 1, [f"columns of shared: found 1056, {COLUMNS}"]),
        ((64, 48, 1), 1, [f"columns of shared: found 48, {COLUMNS}"]),
        ((120, 32, 1), 2, ["rows of shared: found 120, expected a multiple of 16"]),
    ],
)
def test_limits_name_found_and_expected(sizes, warpgroups, unmet):
    assert RowUnits(*sizes).limits(warpgroups) == unmet


def test_a_rank_of_sixteen_has_the_first_of_these_sizes():
    """Of eight ranks there is no product beside: every CTA has a tile of W13."""
    width, z = 192, 3584
    t = experts.default_tuning(1, width, z)
    beside = Pairs(16, z, width, (4.0, 25.0), t, (7168, 384)).beside
    assert (beside.d, beside.m, beside.ctas, t.warpgroups) == SIZES[0]


@pytest.mark.parametrize(("d", "m", "ctas", "warpgroups"), SIZES)
def test_every_unit_is_multiplied_once(monkeypatch, d, m, ctas, warpgroups):
    """All of `request` and `multiply`, with small integers, so that every sum is exact.

    What is not there yet, or nobody's, is NaN. A copy comes when it is waited for.
    """
    units, rng = RowUnits(d, m, ctas), np.random.default_rng(d + m)
    assert not units.limits(warpgroups) and units.per <= WARPS * warpgroups
    w, x = (rng.integers(-4, 5, shape).astype(BF16) for shape in ((1, d, m), (m,)))
    (lined,) = units.lined(w)
    held = units.place()
    assert held.memory_space == plgpu.SMEM and held.dtype == BF16
    sizes = dict(w=lined.nbytes, x=x.nbytes, y=4 * d, place=bytes_of(held))
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    memory = np.full(sum(sizes.values()), 0xFF, np.uint8)
    for name, a in dict(w=lined, x=x).items():
        memory[starts[name] :][: a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    lines = Ref(starts["w"], lined.shape[1] * 2, len(lined))
    place = Ref(starts["place"], sizes["place"] // units.per, units.per)
    bars, y = Ref(0, 1, units.per), Ref(starts["y"], 4, d)
    on_the_way, lanes = {}, Lanes(memory)

    def copied(source, to, bar):
        assert bar.address < units.per and bar.address not in on_the_way
        assert source.bytes.stop <= starts["x"] and to.bytes.stop <= len(memory)
        on_the_way[bar.address] = source.bytes, to.bytes

    def wait(bar):
        source, to = on_the_way.pop(bar.address)
        memory[to] = memory[source]

    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", copied)
    monkeypatch.setattr(plgpu, "barrier_wait", wait)
    monkeypatch.setattr(plgpu, "inline_mgpu", lambda **_: lambda f: lambda *refs: f(None, *refs))
    monkeypatch.setattr(common, "Registers", lambda: lanes)
    for cta in range(ctas):
        memory[starts["place"] :] = 0xFF
        for wg in range(warpgroups):
            units.request(lines, cta, wg, place, bars)
        for wg in range(warpgroups):
            lanes.first = 128 * wg
            units.multiply(cta, wg, place, bars, Ref(starts["x"], 2, m), y)
        assert not on_the_way
    words = slice(starts["y"] // 4, starts["place"] // 4)
    want = w[0].astype(np.float32) @ x.astype(np.float32)
    assert (memory.view(np.float32)[words] == want).all()
    assert (lanes.stores[words] == 1).all() and lanes.stores.sum() == d
    assert not lanes.loads[: starts["x"] // 4].any() and not lanes.loads[words].any()

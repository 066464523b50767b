"""Shared memory that a kernel asks for beyond what it uses; units dealt to CTAs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import common
from pallas_kernels.row_product import LINE, ROWS, WARPS, RowUnits
from parity.kernel_env import needs_interpreter

CORES, ALL = 132, 200 << 10


def split(monkeypatch, scratch, grid, cores: int | None = CORES, **kw):
    monkeypatch.setattr(common, "cores", lambda: cores)
    seen = []
    body, found = common._with_the_largest_split(
        lambda *args, **named: seen.append((args, named)),
        dict(scratch_types=scratch, grid=grid) | kw,
    )
    return body, found["scratch_types"], seen


def smem(*shape, dtype=jnp.float32):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.SMEM(shape, dtype)


@needs_interpreter
@pytest.mark.parametrize(
    ("grid", "cluster", "padded"),
    [
        ((132,), None, True), ((133,), None, False), ((11, 12), None, True),
        ((12, 12), None, False), ((132,), (1,), True),
        ((64,), (2,), True), ((65,), (2,), False), ((16,), (8,), True), ((17,), (8,), False),
        ((16,), (7,), True), ((17,), (7,), False),
    ],
)  # fmt: skip
def test_one_cta_per_multiprocessor_asks_for_all(monkeypatch, grid, cluster, padded):
    """Clusters count by the groups of 16 multiprocessors that hold them."""
    kw = {} if cluster is None else dict(cluster=cluster)
    body, scratch, seen = split(monkeypatch, dict(a=smem(1000)), grid, **kw)
    assert ("unused" in scratch) is padded
    if padded:  # 4000 bytes are 4 KB
        assert math.prod(scratch["unused"].shape) * 4 + 4096 == ALL
        body(1, 2, unused=None, a=3)
        assert seen == [((1, 2), dict(a=3))]


@needs_interpreter
def test_what_a_kernel_uses_is_counted(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    union = plgpu.RefUnion([smem(256), smem(256)], [smem(1024)])  # 2 KB or 4 KB
    scratch = dict(u=union, bar=plgpu.Barrier(num_barriers=3), b=smem(1, dtype=jnp.bfloat16))
    _, found, _ = split(monkeypatch, scratch, (8,))
    assert math.prod(found["unused"].shape) * 4 == ALL - 5 * 1024
    full = dict(a=smem(ALL // 4))
    assert split(monkeypatch, full, (8,))[1] is full
    assert split(monkeypatch, [smem(8)], (8,))[1] == [smem(8)]
    assert "unused" not in split(monkeypatch, dict(a=smem(8)), (1,), cores=None)[1]


class Ref(np.ndarray):
    """An array with the part of a ref's interface that copies use."""

    @property
    def at(self):
        return _At(self)


class _At:
    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        if hasattr(index, "start") and not isinstance(index, slice):
            index = slice(index.start, index.start + index.size)
        return self.array[index : index + 1] if isinstance(index, int) else self.array[index]


@pytest.mark.parametrize(
    ("d", "m", "ctas", "warpgroups"),
    [(7168, 384, 20, 8), (7168, 384, 76, 2), (7168, 768, 56, 2), (112, 32, 3, 1), (16, 32, 5, 1)],
)
def test_every_unit_is_asked_for_once(monkeypatch, d, m, ctas, warpgroups):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    units, got, bars = RowUnits(d, m, ctas), np.zeros(d // ROWS, int), []
    lines = np.arange(d * m // LINE).reshape(-1, 1).view(Ref)

    def copied(source, place, bar):
        (unit,) = np.unique(source // units.lines)
        assert source.shape[0] == units.lines and not place.any() and bar[0] not in bars
        got[unit] += 1
        place[...] = source[None] + 1  # none is 0
        bars.append(bar[0])

    monkeypatch.setattr(pl, "when", lambda condition: lambda work: work() if condition else None)
    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", copied)
    assert not units.limits(warpgroups) and units.per <= WARPS * warpgroups
    for cta in range(ctas):
        place = np.zeros((units.per, units.lines, 1), int).view(Ref)
        came = np.arange(WARPS * warpgroups).view(Ref)
        bars.clear()
        for wg in range(warpgroups):
            units.request(lines, cta, wg, place, came)
        for i in bars:  # warp i multiplies unit cta + i ctas, from place i
            assert (
                place[i, :, 0] - 1 == (cta + i * ctas) * units.lines + np.arange(units.lines)
            ).all()
    assert (got == 1).all()

"""Register code of `topk` and `experts_row`: a row's choice by one warpgroup.

A candidate is 64 bits, the order-preserving form of its biased score above the complement of its
number, so that the larger one comes first and no two are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import common

MAX_CHOSEN = 32  # groups that a bound is taken from


class Places(NamedTuple):
    """Offsets in bytes within a warpgroup's scratch memory."""

    maxima: int  # u64 [128]: each thread's best
    groups: int  # u64 [warps, 32]: best of each group, once for every warp
    candidates: int  # u64 [experts + 8]
    scores: int  # f32 [experts], in the candidates' order; later each expert's first unit
    order: int  # f32 [32]: scores of the row's chosen
    counter: int  # u32, and 12 bytes; later the warps' sums
    chosen: int  # i32 [rounds, k]: their numbers
    end: int


def places_of(experts: int, chosen: int, rounds: int) -> Places:
    """For k = `chosen` and `rounds` rows of a warpgroup."""
    sizes = 1024, 1024, 8 * experts + 64, 4 * experts, 4 * MAX_CHOSEN, 16, 4 * rounds * chosen
    at = np.concatenate([[0], np.cumsum([common.round_up(size, 16) for size in sizes])])
    return Places(*map(int, at))


def scratch_words(experts: int, chosen: int, rounds: int) -> int:
    """Shared i32 words of a warpgroup."""
    return places_of(experts, chosen, rounds).end // 4


# $0 key, $1 score; $2 1 + exp(-logit), $3 bias
_SCORE = """
{
.reg .pred nan;
.reg .b32 score, biased, mask;
rcp.rn.f32 score, $2;
add.rn.f32 biased, score, $3;
setp.nan.f32 nan, biased, biased;
selp.b32 biased, 0xFF800000, biased, nan;
shr.s32 mask, biased, 31;
or.b32 mask, mask, 0x80000000;
xor.b32 $0, biased, mask;
mov.b32 $1, score;
}
"""
# $0, $1 the better of key $2, number $3 and (so far) $4, $5; the earlier one if they are equal
_BETTER = """
{
.reg .pred more;
.reg .b32 key, number;
setp.gt.u32 more, $2, $4;
selp.b32 key, $2, $4, more;
selp.b32 number, $3, $5, more;
mov.b32 $0, key;
mov.b32 $1, number;
}
"""
# $0 key, $1 number, $2 thread, $3 scratch
_STORE_BEST = """
{
.reg .pred one;
.reg .b32 at, back;
not.b32 back, $1;
mad.lo.u32 at, $2, 8, $3;
st.shared.v2.b32 [at+MAXIMA], {back, $0};
setp.eq.u32 one, $2, 0;
@one st.shared.b32 [$3+COUNTER], 0;
}
"""
# $0, $1 halves of the K-th best of the 32 groups' best; $2 thread, $3 scratch
_BOUND = """
{
.reg .pred more, here;
.reg .b32 lane, at, count, low, high;
.reg .b64 best, a, b;
and.b32 lane, $2, 31;
mad.lo.u32 at, lane, 8, $3;
ld.shared.b64 best, [at+MAXIMA];
ld.shared.b64 a, [at+MAXIMA+256];
max.u64 best, best, a;
ld.shared.b64 a, [at+MAXIMA+512];
max.u64 best, best, a;
ld.shared.b64 a, [at+MAXIMA+768];
max.u64 best, best, a;
shr.u32 at, $2, 5;
mad.lo.u32 at, at, 256, $3;
mad.lo.u32 low, lane, 8, at;
st.shared.b64 [low+GROUPS], best;
bar.warp.sync 0xFFFFFFFF;
mov.b32 count, 0;
PAIRS
setp.eq.u32 here, count, LAST;
vote.sync.ballot.b32 count, here, 0xFFFFFFFF;
bfind.u32 count, count;
mov.b64 {low, high}, best;
shfl.sync.idx.b32 $0, low, count, 31, 0xFFFFFFFF;
shfl.sync.idx.b32 $1, high, count, 31, 0xFFFFFFFF;
}
"""
_BOUND_PAIR = """
ld.shared.v2.b64 {a, b}, [at+PLACE];
setp.gt.u64 more, a, best;
@more add.u32 count, count, 1;
setp.gt.u64 more, b, best;
@more add.u32 count, count, 1;
"""
# $0, $1 bound, $2 thread, $3 scratch, then keys, then scores
_KEEP = """
{
.reg .pred any, in<8>;
.reg .b32 number, count, one, at;
.reg .b64 bound, own<8>;
mov.b64 bound, {$0, $1};
mov.b32 count, 0;
COMPARE
setp.ne.u32 any, count, 0;
mov.b32 at, 0;
@any atom.shared.add.u32 at, [$3+COUNTER], count;
STORE
}
"""
_KEEP_COMPARE = """
add.u32 number, $2, FIRST;
not.b32 number, number;
mov.b64 ownNTH, {number, KEY};
setp.ge.u64 inNTH, ownNTH, bound;
selp.b32 one, 1, 0, inNTH;
add.u32 count, count, one;
"""
_KEEP_STORE = """
mad.lo.u32 one, at, 8, $3;
@inNTH st.shared.b64 [one+CANDIDATES], ownNTH;
mad.lo.u32 one, at, 4, $3;
@inNTH st.shared.b32 [one+SCORES], SCORE;
@inNTH add.u32 at, at, 1;
"""
# $0 thread, $1 scratch: rank each candidate; the first K go to their places
_RANK = """
{
.reg .pred done, in, more;
.reg .b32 count, first, mine, rank, at, end, v;
.reg .b64 own, a, b;
ld.shared.b32 count, [$1+COUNTER];
mov.b32 mine, $0;
and.b32 first, $0, 96;
mad.lo.u32 end, count, 8, $1;
NEXT:
setp.ge.u32 done, first, count;
@done bra READY;
setp.lt.u32 in, mine, count;
mad.lo.u32 at, mine, 8, $1;
mov.b64 own, 0;
@in ld.shared.b64 own, [at+CANDIDATES];
mov.b32 rank, 0;
mov.b32 at, $1;
OTHERS:
STEPS
add.u32 at, at, 64;
setp.lt.u32 more, at, end;
@more bra OTHERS;
setp.lt.and.u32 in, rank, K, in;
mad.lo.u32 at, mine, 4, $1;
@in ld.shared.b32 v, [at+SCORES];
mad.lo.u32 at, rank, 4, $1;
@in st.shared.b32 [at+ORDER], v;
mov.b64 {v, rank}, own;
not.b32 v, v;
@in st.shared.b32 [at+CHOSEN], v;
add.u32 mine, mine, 128;
add.u32 first, first, 128;
bra NEXT;
READY:
}
"""
_RANK_STEP = """
ld.shared.v2.b64 {a, b}, [at+FROM];
add.u32 v, at, PLACE;
setp.lt.u32 more, v, end;
setp.gt.and.u64 more, a, own, more;
@more add.u32 rank, rank, 1;
add.u32 v, at, BESIDE;
setp.lt.u32 more, v, end;
setp.gt.and.u64 more, b, own, more;
@more add.u32 rank, rank, 1;
"""
# $0 thread, $1 scratch: each of the row's weights, to where STORES says
_WEIGH = """
{
.reg .pred out;
.reg .b32 at, sum, v, number;
.reg .b64 to, far;
setp.ge.u32 out, $0, K;
@out bra READY;
ld.shared.b32 sum, [$1+ORDER];
SUMS
add.rn.f32 sum, sum, TINY;
mad.lo.u32 at, $0, 4, $1;
ld.shared.b32 v, [at+ORDER];
div.rn.f32 v, v, sum;
mul.rn.f32 v, v, SCALING;
STORES
READY:
}
"""
# $2 ids, $3 weights of the row
_TO_GLOBAL = """
ld.shared.b32 number, [at+CHOSEN];
mul.wide.u32 far, $0, 4;
add.u64 to, far, $2;
st.global.b32 [to], number;
add.u64 to, far, $3;
st.global.b32 [to], v;
"""
_TO_SHARED = "st.shared.b32 [at+MAXIMA], v;"  # whose numbers nobody needs any more


def filled(text: str, **values: Any) -> str:
    """PTX with the names in it replaced, in the order given."""
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def _where(experts: int, k: int, turn: int, rounds: int) -> dict[str, int]:
    """`Places` by the names that the PTX has for them, `chosen` those of the row `turn`."""
    places = places_of(experts, k, rounds)
    where = {name.upper(): value for name, value in places._asdict().items()}
    return where | {"CHOSEN": places.chosen + 4 * turn * k}


def load(row: Any) -> jax.Array:
    """A global row f32 [E] as `rank` takes it, all of it asked for where this stands.

    An ordinary load of several numbers is moved to where each is used: `rank` would wait for
    memory once per number.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = row.shape
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)
    out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    def code(_: Any, ref: Any) -> Any:
        reg, frag = common.Registers(), layout.to_mgpu()
        at = reg.wide_add(reg.global_address(ref), reg.mul(reg.thread(), 4))
        registers = np.empty(frag.registers_shape(shape), dtype=object)
        for i in range(registers.size):
            text = f"ld.global.nc.b32 $0, [$1+{512 * i}];"
            (word,) = reg.ptx(text, at, results=1, volatile=True)
            registers.flat[i] = reg.as_type(word, frag.registers_element_type(reg.f32))
        return reg.fa.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)(code)(row)


def rank(
    denominators: jax.Array, bias: jax.Array, words: Any, k: int, turn: int = 0, rounds: int = 1
) -> None:
    """A row's choice to `Places.chosen`, from 1 + exp(-logits) and bias, f32 [E].

    `words` is the warpgroup's scratch memory; `turn` of `rounds` counts its rows. Ends with a
    barrier of the warpgroup.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    experts = bias.shape[0]
    layout = plgpu.Layout.WG_STRIDED((experts,), vec_size=1)
    where = _where(experts, k, turn, rounds)

    def code(_: Any, sums: Any, bias: Any, words: Any) -> None:
        reg = common.Registers()
        thread, base = reg.thread(), reg.shared_address(words)
        both = [
            reg.ptx(_SCORE, *reg.elements(a), *reg.elements(b), results=2)
            for a, b in zip(sums.registers.flat, bias.registers.flat, strict=True)
        ]
        keys, scores = zip(*both, strict=True)
        best = keys[0], thread
        for i, key in enumerate(keys[1:], 1):
            best = reg.ptx(_BETTER, key, reg.add(thread, 128 * i), *best, results=2)
        reg.ptx(filled(_STORE_BEST, **where), *best, thread, base, volatile=True)
        reg.barrier()
        bound = reg.ptx(_bound_text(where, k), thread, base, results=2, volatile=True)
        text = _keep_text(where, len(keys))
        reg.ptx(text, *bound, thread, base, *keys, *scores, volatile=True)
        reg.barrier()
        reg.ptx(_rank_text(where, k), thread, base, volatile=True)
        reg.barrier()

    call = plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType()))
    call(code)(denominators, bias, words)


def weigh(
    ids: Any, weights: Any, words: Any, experts: int, scaling: float, turn: int = 0, rounds: int = 1
) -> None:
    """Behind `rank`: the row's ids and weights, global [k] each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    k = ids.shape[0]
    text = _weigh_text(_TO_GLOBAL, _where(experts, k, turn, rounds), k, scaling)

    def code(_: Any, ids: Any, weights: Any, words: Any) -> None:
        reg = common.Registers()
        to = reg.global_address(ids), reg.global_address(weights)
        reg.ptx(text, reg.thread(), reg.shared_address(words), *to, volatile=True)

    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    call(code)(ids, weights, words)


def share(words: Any, experts: int, k: int, scaling: float) -> None:
    """Behind `rank` of one row: its weights f32 [k] to `Places.maxima`, in the same bits."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    text = _weigh_text(_TO_SHARED, _where(experts, k, 0, 1), k, scaling)

    def code(_: Any, words: Any) -> None:
        reg = common.Registers()
        reg.ptx(text, reg.thread(), reg.shared_address(words), volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(code)(words)


def _bound_text(where: dict[str, int], k: int) -> str:
    pairs = "".join(_BOUND_PAIR.replace("PLACE", str(where["GROUPS"] + 16 * j)) for j in range(16))
    return filled(_BOUND, PAIRS=pairs, LAST=k - 1, **where)


def _keep_text(where: dict[str, int], per_thread: int) -> str:
    def lines(text: str, i: int) -> str:
        key, score = f"${4 + i}", f"${4 + per_thread + i}"
        text = text.replace("SCORES", str(where["SCORES"]))
        return filled(text, KEY=key, SCORE=score, NTH=i, FIRST=128 * i)

    compare, store = (
        "".join(lines(text, i) for i in range(per_thread)) for text in (_KEEP_COMPARE, _KEEP_STORE)
    )
    return filled(_KEEP, COMPARE=compare, STORE=store, **where)


def _rank_text(where: dict[str, int], k: int) -> str:
    steps = "".join(
        filled(_RANK_STEP, FROM=f"CANDIDATES+{16 * j}", PLACE=16 * j, BESIDE=16 * j + 8)
        for j in range(4)
    )
    text = _RANK.replace("STEPS", steps).replace("rank, K", f"rank, {k}")
    return filled(text, **where)


def _weigh_text(stores: str, where: dict[str, int], k: int, scaling: float) -> str:
    sums = "".join(
        f"ld.shared.b32 v, [$1+ORDER+{4 * j}];\nadd.rn.f32 sum, sum, v;\n" for j in range(1, k)
    )
    text = _WEIGH.replace("$0, K", f"$0, {k}").replace("SUMS", sums).replace("STORES", stores)
    text = text.replace("TINY", common.literal(1e-20)).replace("SCALING", common.literal(scaling))
    return filled(text, **where)

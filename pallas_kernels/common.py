"""What every kernel shares: JAX's version-dependent names, row buckets, raw register helpers.

Private JAX names are used in this file only. Kernels are Mosaic GPU kernels under warpgroup
lowering semantics; the default changed between JAX versions, so `params` always names it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MINIMUM_JAX = (0, 11, 2)  # warpgroup lowering by default, written Refs aliased under jit
MAX_ROWS = 64
BUCKETS = (8, 16, 32, 64)  # widths of the tensor-core operand that holds the rows
SHARED_MEMORY = 232448  # bytes one CTA may use on sm_90 and sm_100
GPCS = 8  # groups of multiprocessors of an H200 or B300: a cluster is within one
_SPLIT = 200 << 10  # bytes of a CTA with which the multiprocessor gives all it can to shared memory


def unmet_conditions() -> list[str]:
    """Why no specialised step can run here; empty if one can. Each entry: found and expected."""
    reasons = []
    if jax.__version_info__ < MINIMUM_JAX:
        wanted = ".".join(map(str, MINIMUM_JAX))
        reasons.append(f"JAX {jax.__version__} found, kernels need {wanted} (Python 3.12) or newer")
    kinds = sorted({d.platform for d in jax.devices()})
    if kinds != ["gpu"]:
        reasons.append(f"devices found: {', '.join(kinds)}; kernels need an NVIDIA GPU")
    return reasons


def architecture(device: jax.Device | None = None) -> str:
    """`sm_90`, `sm_100`, ... of a device; `cpu` where there is no GPU.

    Default: the device that JAX places arrays on, which may be one that is only described.
    """
    device = device or jax.config.jax_default_device or jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return "cpu" if capability is None else "sm_" + str(capability).replace(".", "")


def cores(device: jax.Device | None = None) -> int | None:
    """Multiprocessors of a device, by default as in `architecture`; None where there is no GPU."""
    device = device or jax.config.jax_default_device or jax.devices()[0]
    return getattr(device, "core_count", None)


def blackwell() -> bool:
    """Whether kernels are built for a GPU with tensor memory (sm_100 and later)."""
    name = architecture()
    return name.startswith("sm_") and int(name[3:]) >= 100


def bucket(rows: int) -> int:
    """Width of the operand that holds `rows` rows.

    Raises:
        ValueError: more rows than the largest bucket.
    """
    for width in BUCKETS:
        if rows <= width:
            return width
    raise ValueError(f"rows: found {rows}, expected 1..{MAX_ROWS}")


def expect(reasons: list[str], name: str, found: Any, wanted: Any, ok: bool) -> None:
    """Append an unmet condition in the one form that all kernels use."""
    if not ok:
        reasons.append(f"{name}: found {found}, expected {wanted}")


def require(reasons: list[str], kernel: str) -> None:
    """Raise with all unmet conditions at once.

    Raises:
        ValueError: `reasons` is not empty.
    """
    if reasons:
        raise ValueError(f"{kernel}: " + "; ".join(reasons))


def params(**kw: Any) -> Any:
    """Compiler parameters; warpgroup lowering unless named otherwise."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    kw.setdefault("lowering_semantics", plgpu.LoweringSemantics.Warpgroup)
    return plgpu.CompilerParams(**kw)


def interpreter(detect_races: bool = True) -> Any:
    """Settings of the CPU interpreter; what lies outside an array reads as NaN."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=detect_races)


def races_found() -> bool:
    """Whether the interpreter has seen a race in this process since the last reset."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    races = interpret_pallas_call.get_races()
    return races is not None and races.races_found


def reset_interpreter() -> None:
    """Forget what the interpreter holds; needed after an exception in an interpreted kernel."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


def kernel(
    body: Any,
    name: str,
    *,
    interpret: bool = False,
    multi_process: bool = False,
    own_barriers: bool = False,
    read_once: bool = False,
    **kw: Any,
) -> Any:
    """`plgpu.kernel` with explicit lowering semantics, or the same kernel in the interpreter.

    `name` is how profilers and the compiled program call it; `multi_process` (JAX 0.12) that it
    writes to devices of other processes; `own_barriers` that a warpgroup's warps meet where the
    body says so (`barrier`), and not around each store and before each copy to shared memory;
    `read_once` that L2 drops before all else what the kernel copies to shared memory (JAX 0.11.2).
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        kw["interpret"] = interpreter()
    else:
        body, kw = _with_the_largest_split(body, kw)
        if read_once:
            _READ_ONCE.add(name)
            _Hinted.install()
    body.__name__ = name
    more: dict[str, bool] = dict(is_multi_process=True) if multi_process else {}
    settings = params(unsafe_no_auto_barriers=own_barriers, **more)
    return plgpu.kernel(body, compiler_params=settings, **kw)


def _with_the_largest_split(body: Any, kw: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The kernel with more scratch memory than it uses, where a multiprocessor runs one CTA of it.

    The driver splits a multiprocessor's memory between L1 and shared memory by what a kernel asks
    for, and changes the split only while nothing runs there: a kernel that wants another split than
    the one before it starts late.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    scratch = kw.get("scratch_types")
    clusters, size = math.prod(kw["grid"]), math.prod(kw.get("cluster", ()))
    here = (cores() or 0) // GPCS // size * GPCS if size > 1 else cores() or 0
    if not isinstance(scratch, dict) or clusters > here:
        return body, kw
    missing = _SPLIT - sum(map(_shared_bytes, scratch.values()))
    if missing <= 0:
        return body, kw

    def with_unused(*args: Any, unused: Any, **named: Any) -> None:
        body(*args, **named)

    unused = plgpu.SMEM((missing // 4,), jnp.int32)
    return with_unused, kw | dict(scratch_types=dict(scratch, unused=unused))


def _shared_bytes(scratch: Any) -> int:
    """Of shared memory that an entry of `scratch_types` takes, barriers not counted."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(scratch, plgpu.RefUnion):
        return max(sum(map(_shared_bytes, refs)) for refs in scratch.refs)
    if getattr(scratch, "memory_space", None) != plgpu.MemorySpace.SMEM:
        return 0
    return round_up(math.prod(scratch.shape) * jnp.dtype(scratch.dtype).itemsize, 1024)


_READ_ONCE: set[str] = set()  # names of kernels
_EVICT_FIRST = 0x12F0000000000000  # a cache policy, as PTX's `createpolicy` encodes it


class _Hinted:
    """Mosaic's NVVM operations, of which the copies of some kernels carry a cache policy.

    PTX has a place for it and Mosaic GPU no option. Under JAX 0.12, which writes the copy as text,
    there is none, and nothing else is different. 100 MB of weights per layer go through L2, and
    what the step reads again, activations and state, is lost with them: 2 us per layer at 1 row.
    Other kernels of the process are left as they are.
    """

    def __init__(self, operations: Any) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)

    def cp_async_bulk_tensor_shared_cluster_global(self, *args: Any, **kw: Any) -> Any:
        """The copy from global to shared memory."""
        reg = Registers()
        if _kernel_name(reg) in _READ_ONCE:
            i64 = reg.ir.IntegerType.get_signless(64)
            policy = reg.ir.IntegerAttr.get(i64, _EVICT_FIRST)
            kw["l2_cache_hint"] = reg.arith.constant(i64, policy)
        return self._operations.cp_async_bulk_tensor_shared_cluster_global(*args, **kw)

    @staticmethod
    def install() -> None:
        """Once per process."""
        from jax.experimental.mosaic.gpu import launch_context

        if not isinstance(launch_context.nvvm, _Hinted):
            launch_context.nvvm = _Hinted(launch_context.nvvm)  # type: ignore[assignment]


def _kernel_name(reg: Registers) -> str | None:
    """Of the kernel that is being lowered."""
    op = reg.ir.InsertionPoint.current.block.owner
    while op is not None:
        if "sym_name" in op.attributes:
            return reg.ir.StringAttr(op.attributes["sym_name"]).value.removesuffix("_mosaic_gpu")
        op = op.parent
    return None


def barrier(interpret: bool) -> None:
    """The warpgroup's warps meet; the interpreter has one thread per warpgroup."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not interpret:
        plgpu.inline_mgpu()(lambda _: Registers().barrier())()


def tref(ref: Any, perm: tuple[int, ...] = (1, 0)) -> Any:
    """A transposed view of a ref."""
    return ref.transpose(perm)


def store(ref: Any, value: jax.Array) -> None:
    """`ref[...] = value`, also where threads of a warp meet in one bank of shared memory.

    Or write parts of a line of global memory. JAX 0.12 refuses both unless told that they may be
    slow.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def tiled(dtype: Any, cols: int) -> tuple[Any, ...]:
    """Transforms of a shared-memory tile with rows of `cols` elements that TMA and MMA can read."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bits = jax.dtypes.itemsize_bits(dtype)
    swizzle = plgpu.find_swizzle(cols * bits)
    return (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))


def layer_operand(layer: int | jax.Array) -> jax.Array:
    """A layer number, traced or not, as the i32[1] operand of a kernel."""
    return jnp.asarray(layer, jnp.int32).reshape(1)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below `n`."""
    return -(-n // multiple) * multiple


def filled(a: jax.Array, multiple: int) -> jax.Array:
    """The array with zeros behind its last axis, up to a multiple: a copy, for small models."""
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % multiple)])


def literal(value: float) -> str:
    """An f32 number as PTX writes it."""
    return f"0f{int(np.float32(value).view(np.uint32)):08X}"


def store_partial_sums(value: jax.Array, into: Any, interpret: bool) -> None:
    """The sum of f32 [n] in four parts, one per warp of the warpgroup, to `into`, shared f32 [4].

    `jnp.sum` to a scalar is no alternative: its scratch memory is shared by all warpgroups.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        into[...] = jnp.pad(jnp.sum(value)[None], (0, 3))
        return
    size = value.shape[0]
    vector = 8
    while size % (128 * vector):
        vector //= 2
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

    def code(_: Any, fragment: Any, ref: Any) -> None:
        reg = Registers()
        parts = [
            reg.llvm.extractelement(register, reg.constant(i))
            for register in fragment.registers.flat
            for i in range(vector)
        ]
        while len(parts) > 1:
            rest = parts[-1:] if len(parts) % 2 else []
            pairs = zip(parts[0:-1:2], parts[1::2], strict=True)
            parts = [reg.arith.addf(a, b) for a, b in pairs] + rest
        # not volatile, so that the shuffles of several sums overlap
        (total,) = reg.ptx(_WARP_SUM, parts[0], results=1)
        reg.ptx(_STORE_WARP, total, reg.thread(), reg.shared_address(ref), volatile=True)

    plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))(code)(value, into)


_BUTTERFLY = "".join(
    f"shfl.sync.bfly.b32 other, sum, {1 << i}, 31, 0xFFFFFFFF;\nadd.f32 sum, sum, other;\n"
    for i in range(5)
)
# $0 sum over the warp of $1
_WARP_SUM = "{\n.reg .b32 sum, other;\nmov.b32 sum, $1;\n" + _BUTTERFLY + "mov.b32 $0, sum;\n}"
# $0 number, $1 thread, $2 four places
_STORE_WARP = """
{
.reg .pred one;
.reg .b32 at;
and.b32 at, $1, 31;
setp.eq.u32 one, at, 0;
shr.u32 at, $1, 5;
mad.lo.u32 at, at, 4, $2;
@one st.shared.b32 [at], $0;
}
"""


_LOAD_OR_ZEROS = """
{
.reg .pred in;
.reg .b32 v0, v1, v2, v3;
setp.lt.u32 in, $5, BELOW;
mov.b32 v0, 0;
mov.b32 v1, 0;
mov.b32 v2, 0;
mov.b32 v3, 0;
@in LOAD {v0, v1, v2, v3}, [$4+OFFSET];
mov.b32 $0, v0;
mov.b32 $1, v1;
mov.b32 $2, v2;
mov.b32 $3, v3;
}
"""


class Registers:
    """Raw register code inside `plgpu.inline_mgpu`: PTX, shared-memory pointers, bit casts.

    Mosaic GPU has no width-changing bit cast and no scatter; what needs one is written here in
    PTX, and every such function has a plain twin that the interpreter runs instead.
    """

    def __init__(self) -> None:
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, llvm, vector
        from jax.experimental.mosaic.gpu import fragmented_array, utils

        self.ir, self.arith, self.llvm, self.vector = ir, arith, llvm, vector
        self.fa, self.utils = fragmented_array, utils
        self.i32 = ir.IntegerType.get_signless(32)
        self.f32 = ir.F32Type.get()

    def ptx(
        self, text: str, *args: Any, results: int = 0, kind: Any = None, volatile: bool = False
    ) -> Any:
        """Inline PTX; `results` results of type `kind` (default i32), numbered from $0."""
        return self.utils.inline_ptx(
            text,
            *args,
            result_types=[kind or self.i32] * results if results else None,
            has_side_effects=volatile or not results,
        )

    def constant(self, value: int) -> Any:
        """An i32 constant."""
        if value >= 1 << 31:
            value -= 1 << 32
        return self.arith.constant(self.i32, self.ir.IntegerAttr.get(self.i32, value))

    def thread(self) -> Any:
        """Index of this thread within its warpgroup, i32."""
        idx = self.utils.thread_idx()
        return self.arith.remui(idx, self.constant(128))

    def shared_address(self, ref: Any) -> Any:
        """32-bit shared-memory address of a ref's first element."""
        return self.llvm.ptrtoint(self.i32, self.utils.memref_ptr(ref))

    def global_address(self, ref: Any) -> Any:
        """64-bit address of a global ref's first element."""
        i64 = self.ir.IntegerType.get_signless(64)
        return self.llvm.ptrtoint(i64, self.utils.memref_ptr(ref))

    def add(self, a: Any, b: Any) -> Any:
        """i32 sum; `b` may be a Python integer."""
        return self.arith.addi(a, self.constant(b) if isinstance(b, int) else b)

    def mul(self, a: Any, b: Any) -> Any:
        """i32 product; `b` may be a Python integer."""
        return self.arith.muli(a, self.constant(b) if isinstance(b, int) else b)

    def wide_add(self, address: Any, offset: Any) -> Any:
        """A 64-bit address plus an i32 offset, taken as unsigned."""
        i64 = self.ir.IntegerType.get_signless(64)
        (wide,) = self.ptx("cvt.u64.u32 $0, $1;", offset, results=1, kind=i64)
        return self.arith.addi(address, wide)

    def load_or_zeros(
        self, load: str, address: Any, number: Any, below: int, offset: int = 0
    ) -> list[Any]:
        """Four i32 registers from a 64-bit address; zeros, and no access, unless number < below.

        `load` is the PTX instruction without its operands; `number` i32 is taken as unsigned.
        """
        text = (
            _LOAD_OR_ZEROS.replace("LOAD", load)
            .replace("BELOW", str(below))
            .replace("OFFSET", str(offset))
        )
        return self.ptx(text, address, number, results=4, volatile=True)

    def vector_of(self, words: Any, kind: Any) -> Any:
        """i32 registers, in order, as one vector register of type `kind`."""
        both = self.llvm.mlir_undef(self.ir.VectorType.get((len(words),), self.i32))
        for i, word in enumerate(words):
            both = self.llvm.insertelement(both, word, self.constant(i))
        return self.llvm.bitcast(kind, both)

    def words(self, register: Any) -> list[Any]:
        """The i32 parts of a vector register of bf16 numbers."""
        count = register.type.shape[0] // 2
        whole = self.llvm.bitcast(self.ir.VectorType.get((count,), self.i32), register)
        return [self.llvm.extractelement(whole, self.constant(i)) for i in range(count)]

    def elements(self, register: Any) -> list[Any]:
        """The numbers of a vector register."""
        count = register.type.shape[0]
        return [self.llvm.extractelement(register, self.constant(i)) for i in range(count)]

    def as_type(self, word: Any, kind: Any) -> Any:
        """A 32-bit register as another type of 32 bits."""
        return self.llvm.bitcast(kind, word)

    def as_f32(self, word: Any) -> Any:
        """A 32-bit register as f32."""
        return self.llvm.bitcast(self.f32, word)

    def pair(self, register: Any) -> list[Any]:
        """The two f32 numbers of a register of two."""
        return [self.llvm.extractelement(register, self.constant(i)) for i in (0, 1)]

    def paired(self, first: Any, second: Any) -> Any:
        """A register of two f32 numbers."""
        kind = self.ir.VectorType.get((2,), self.f32)
        both = self.llvm.mlir_undef(kind)
        for i, value in enumerate((first, second)):
            both = self.llvm.insertelement(both, value, self.constant(i))
        return both

    def cluster_barrier(self) -> None:
        """Wait for all threads of the cluster; shared memory written before is visible after."""
        self.ptx("barrier.cluster.arrive.release.aligned;", volatile=True)
        self.ptx("barrier.cluster.wait.acquire.aligned;", volatile=True)

    def barrier(self) -> None:
        """Wait for the warpgroup's other warps."""
        self.utils.warpgroup_barrier()

    def fence_and_barrier(self) -> None:
        """Make ordinary shared-memory stores visible to TMA and MMA, then wait for the others."""
        self.utils.commit_shared()

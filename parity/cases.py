"""Named shapes with a seed: the inputs that parity compares on and benchmarks may time.

The sizes are small, pairwise different and partly prime, so that a swapped axis cannot pass by its
shape; the magnitudes are chosen so that every constant of a formula shows (epsilons included).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One input of one operation.

    Attributes:
        op: operation, a key of `parity.op_jax.OPS`.
        name: what is special about it.
        rows: tokens (of one sequence where there are sequences).
        batch: sequences; 1 where the operation knows rows only.
        seed: of `numpy.random.default_rng`.
        scale: magnitude of the activations; 1 is what follows an RMSNorm.
        sizes: further sizes and constants, as (name, value) pairs.
        dtypes: compute dtypes; float32 only where bf16 rounding hides what the case is about.
        tags: `ci` (every run), `nightly`, `bench`.
    """

    op: str
    name: str
    rows: int
    batch: int = 1
    seed: int = 0
    scale: float = 1.0
    sizes: tuple[tuple[str, float], ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    tags: tuple[str, ...] = ("ci",)

    @property
    def id(self) -> str:
        """Name for reports and test ids."""
        return f"{self.op}-{self.name}"

    def size(self, name: str, default: float) -> float:
        """A further size or constant."""
        return dict(self.sizes).get(name, default)


_HEADS = (("heads", 3), ("width", 20))
CASES: tuple[Case, ...] = (
    Case("rmsnorm", "plain", rows=5, seed=1, sizes=(("width", 96),)),
    Case("rmsnorm", "small rows", rows=7, seed=2, scale=2e-3, sizes=(("width", 67),)),
    Case("gated_rmsnorm", "plain", rows=5, seed=3, sizes=_HEADS),
    Case("gated_rmsnorm", "small rows", rows=5, seed=4, scale=3e-3, sizes=_HEADS),
    Case("short_conv", "odd width", rows=6, batch=3, seed=5, sizes=(("width", 33),)),
    Case("kda_gate", "plain", rows=6, seed=6, sizes=_HEADS),
    Case("kda_recurrent", "odd heads", rows=5, batch=2, seed=7, sizes=_HEADS),
    Case(
        "kda_recurrent", "small keys", rows=4, seed=8, scale=3e-4,
        sizes=(("heads", 3), ("width", 12)),
    ),
    Case("situ", "caps reached", rows=4, seed=9, scale=30.0, sizes=(("width", 41),)),
    Case("router", "plain", rows=9, seed=10, sizes=(("experts", 24), ("top_k", 5))),
    Case(
        "router", "groups and scaling", rows=9, seed=11,
        sizes=(("experts", 24), ("top_k", 3), ("groups", 6), ("kept", 2), ("scaling", 2.5)),
    ),
    Case("attn_res", "six snapshots", rows=5, seed=12, sizes=(("width", 72), ("snapshots", 6))),
    Case("mxfp4", "all scales but NaN", rows=13, seed=13, sizes=(("width", 64),)),
    Case("latent_moe", "odd experts", rows=5, seed=14, sizes=(("experts", 7), ("top_k", 3))),
    Case("mla", "plain", rows=11, seed=15),
    Case("mla", "small latents", rows=9, seed=16, scale=4e-3, dtypes=("float32",)),
)  # fmt: skip


def cases(tag: str = "ci") -> tuple[Case, ...]:
    """All cases with a tag."""
    return tuple(c for c in CASES if tag in c.tags)

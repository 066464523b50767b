"""`Static`, `DraftStatic`: the hashable settings that a stage gets as its first argument."""

from __future__ import annotations

from dataclasses import dataclass

from jax_impl.collectives import ONE_RANK, ContextSplit, Ranks
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.numerics import Numerics


@dataclass(frozen=True)
class Static:
    """Everything about a step that is fixed when it is built; hashable."""

    config: ModelConfig
    run: RunConfig
    ranks: Ranks = ONE_RANK

    @property
    def nx(self) -> Numerics:
        """The rounding rules."""
        return Numerics(self.run.compute, self.run.profile)

    @property
    def betas(self) -> tuple[float, float]:
        """The two soft caps of SiTU."""
        return self.config.activation_situ_beta, self.config.activation_situ_linear_beta

    @property
    def context(self) -> ContextSplit:
        """How the rows of the MLA latent cache lie on the ranks."""
        return ContextSplit(self.run.dcp, self.run.dcp_interleave, self.ranks)


@dataclass(frozen=True)
class DraftStatic:
    """`Static` of the drafter: the first argument of its stages; hashable."""

    config: DraftConfig
    run: RunConfig
    ranks: Ranks = ONE_RANK

    @property
    def nx(self) -> Numerics:
        """The rounding rules."""
        return Numerics(self.run.compute, self.run.profile)

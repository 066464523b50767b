"""The DSpark draft: context cache of a sequence, the block pass, Markov and confidence head.

One pass proposes K tokens. Its block is the newest token, the anchor, followed by K - 1 masks;
row k proposes the token at k + 1 places after the anchor. The rows attend to the context, which is
made from streams of the target, and to one another. Embedding and output head are the target's.

Legend: T context tokens, S cached rows, H heads, D hidden width, R latent width, V vocabulary.
"Compute" and "wide" are the two dtypes of `Numerics`; `nm.round` marks every rounding point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ref import ops
from torch_ref.draft_config import SKIPPED, DraftConfig, rope_frequencies, rope_multipliers
from torch_ref.loader import Shards
from torch_ref.model import Model, State, Tensors
from torch_ref.numerics import Numerics, linear
from torch_ref.sampling import Sampling, draw


@dataclass
class DraftState:
    """Context cache of one sequence; tensors are replaced and never written into.

    Attributes:
        rows: per draft layer [S, R + rope], compute: normalised latent, then the rotated shared
            key.
    """

    rows: list[Tensor]

    @property
    def position(self) -> int:
        """Number of target tokens in the cache, which is the position of the next one."""
        return self.rows[0].shape[0]

    def clone(self) -> DraftState:
        """An independent state that shares the tensors, which nobody writes into."""
        return DraftState(list(self.rows))


class Proposal(NamedTuple):
    """What one block pass proposes.

    Attributes:
        ids: [K] int64.
        logits: [K, V], compute, with the Markov bias, before any temperature: they belong to the
            tokens actually chosen on the left.
        base_logits: [K, V], compute, without the bias.
        hidden: [K, D], compute, after the final norm.
        previous: [K] int64, the token on the left of each draft; the first is the anchor.
    """

    ids: Tensor
    logits: Tensor
    base_logits: Tensor
    hidden: Tensor
    previous: Tensor


class Draft:
    """The draft model for one sequence at a time, bound to its target.

    Attributes:
        config: the architecture.
        target: gives embedding, output head and streams.
        numerics: number format and rounding profile; every norm takes the epsilon of the file.
        skipped: names in the checkpoint that are known and not used.
    """

    def __init__(
        self,
        config: DraftConfig,
        tensors: Mapping[str, Tensor],
        target: Model,
        numerics: Numerics,
    ) -> None:
        """Takes the tensors of a checkpoint.

        Raises:
            ValueError: a name is missing or unknown, or a shape is not the expected one (all are
                named at once); or the numerics ask for an FP8 cache, which a draft does not have.
        """
        if numerics.kv_dtype != "compute":
            raise ValueError(f"a draft caches in compute, not in kv_dtype {numerics.kv_dtype!r}")
        self.config, self.target, self.numerics = config, target, numerics
        specs = config.specs()
        self.skipped = tuple(n for n in SKIPPED if n in tensors)
        problems = [f"{n} is missing" for n in specs if n not in tensors]
        problems += [f"{n} is unknown" for n in tensors if n not in specs and n not in SKIPPED]
        stored = {n: tensors[n] for n in specs if n in tensors}
        problems += [
            f"{n} has shape {tuple(x.shape)}, expected {specs[n].shape}"
            for n, x in stored.items()
            if tuple(x.shape) != specs[n].shape
        ]
        if problems:
            raise ValueError("tensors of the draft: " + "; ".join(problems))
        self._w = {n: numerics.round(x) for n, x in stored.items()}
        self._frequency = rope_frequencies(config.rope, config.qk_rope_head_dim)
        self._amplitude, score_factor = rope_multipliers(config.rope)
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        self._scale = width**-0.5 * score_factor

    @classmethod
    def load(cls, path: str | Path, target_model: Model, numerics: Numerics) -> Draft:
        """Opens a checkpoint folder with its `config.json`, for use with `target_model`.

        Raises:
            FileNotFoundError: a file is absent.
            ValueError: configuration or tensors are not what they must be.
        """
        config = DraftConfig.load(path, target_model.config)
        return cls(config, Shards(path), target_model, numerics)

    def new_state(self) -> DraftState:
        """The state before the first token: no context rows."""
        c = self.config
        row = torch.zeros(0, c.kv_lora_rank + c.qk_rope_head_dim, dtype=self.numerics.dtype)
        return DraftState([row] * c.num_hidden_layers)

    def target_pass(self, token_ids: Tensor | Sequence[int], state: State) -> tuple[Tensor, Tensor]:
        """Runs the target on T tokens and hands out the streams that this draft reads.

        Args:
            token_ids: [T] integers.
            state: state of the target, updated as `Model.forward` does.

        Returns:
            Logits [T, V] and taps [T, taps * D], both in the compute dtype of the target.
        """
        c, record = self.config, {}
        logits = self.target.forward(token_ids, state, record=record)
        return logits, self.target.taps(record, c.target_layer_ids, c.aux_hidden_stream)

    # --- context ---

    def context(self, taps: Tensor) -> Tensor:
        """Context vectors [T, D], compute, of taps [T, taps * D] in ascending layer order."""
        c, nm = self.config, self.numerics
        width = c.target_hidden_size * len(c.target_layer_ids)
        if taps.dim() != 2 or taps.shape[1] != width:
            raise ValueError(f"taps have shape {tuple(taps.shape)}, expected [T, {width}]")
        taps = nm.round(taps)
        if c.fc_norm:
            parts = taps.split(c.target_hidden_size, dim=-1)
            taps = torch.cat([self._norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)], dim=-1)
        return self._norm(self._linear(taps, "context_proj"), "context_norm")

    @torch.no_grad()
    def write_context(self, taps: Tensor, state: DraftState) -> None:
        """Appends the context rows of T tokens at the positions that follow the cached ones.

        Args:
            taps: [T, taps * D], streams of tokens that the target has processed for good.
            state: updated in place; the old tensors stay as they were.

        Raises:
            ValueError: the taps have another width.
        """
        vectors = self.context(taps)
        positions = torch.arange(taps.shape[0]) + state.position
        state.rows = [
            torch.cat([rows, self._kv_rows(layer, vectors, positions)])
            for layer, rows in enumerate(state.rows)
        ]

    def _kv_rows(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Cache rows [T, R + rope], compute, of x [T, D] (context vector or normed block row)."""
        rank, at = self.config.kv_lora_rank, f"layers.{layer}.self_attn"
        y = self._linear(x, f"{at}.kv_a_proj_with_mqa")
        latent = self._norm(y[:, :rank], f"{at}.kv_a_layernorm")
        return torch.cat([latent, self.rotate(y[:, rank:], positions)], dim=-1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates the neighbouring pairs (2j, 2j + 1) of the last axis, one rounding at the end.

        Args:
            x: [T, ..., rope], compute.
            positions: [T] integers.

        Returns:
            Same shape, compute.
        """
        nm = self.numerics
        angle = nm.wide(positions)[:, None] * nm.wide(self._frequency)
        angle = angle.view(angle.shape[0], *[1] * (x.dim() - 2), angle.shape[1])
        cos, sin = torch.cos(angle) * self._amplitude, torch.sin(angle) * self._amplitude
        even, odd = nm.wide(x)[..., 0::2], nm.wide(x)[..., 1::2]
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return nm.round(rotated.flatten(-2))

    # --- block ---

    @torch.no_grad()
    def propose(
        self,
        anchor_token: int,
        position: int,
        state: DraftState,
        k: int,
        *,
        sampling: Sampling | None = None,
        noise: Tensor | None = None,
        record: Tensors | None = None,
    ) -> Proposal:
        """Proposes the K tokens after the anchor.

        Args:
            anchor_token: newest token, not yet processed by the target.
            position: its position; the context must cover all positions before it.
            state: context; not modified, as block rows are scratch.
            k: how many tokens to propose, at least 1.
            sampling: with a temperature above 0 the tokens are drawn from softmax(logits / T); its
                filters never apply to a draft. None means the largest logit.
            noise: [K, V] Gumbel noise, needed exactly when tokens are drawn.
            record: optional dict, filled with `layers.N.hidden_out` [K, D].

        Returns:
            The proposal.

        Raises:
            ValueError: the context does not reach the anchor, the block passes the longest
                position, or noise is there without need or missing.
        """
        c, last = self.config, self.config.max_position_embeddings - 1
        if position != state.position:
            raise ValueError(f"anchor at {position}, but the context ends before {state.position}")
        if k < 1 or position + k - 1 > last:
            raise ValueError(f"{k} rows at {position} do not fit into positions 0..{last}")
        temperature = 0.0 if sampling is None else sampling.temperature
        if (noise is None) != (temperature == 0):
            raise ValueError("noise is needed with a temperature above 0, and only then")
        ids = torch.tensor([anchor_token] + [c.mask_token_id] * (k - 1))
        hidden = self._block(ids, torch.arange(position, position + k), state, record)
        head = self.numerics.round(self.target.weights.root("lm_head.weight"))
        base = linear(hidden, head, self.numerics)
        previous, logits = [int(anchor_token)], []
        for row in range(k):
            logits.append(self._biased(base[row], previous[-1]))
            previous.append(draw(logits[-1], temperature, None if noise is None else noise[row]))
        chosen = torch.tensor(previous)
        return Proposal(chosen[1:], torch.stack(logits), base, hidden, chosen[:-1])

    def _block(
        self, ids: Tensor, positions: Tensor, state: DraftState, record: Tensors | None
    ) -> Tensor:
        """Final hidden rows [K, D] of the block."""
        c, nm = self.config, self.numerics
        x = nm.round(self.target.weights.embed(ids))
        for layer in range(c.num_hidden_layers):
            at = f"layers.{layer}"
            h = self._norm(x, f"{at}.input_layernorm")
            x = self._add(x, self._attend(layer, h, positions, state.rows[layer]))
            h = self._norm(x, f"{at}.post_attention_layernorm")
            gate, up = (self._linear(h, f"{at}.mlp.{n}_proj") for n in ("gate", "up"))
            x = self._add(x, self._linear(swiglu(gate, up, nm), f"{at}.mlp.down_proj"))
            if record is not None:
                record[f"{at}.hidden_out"] = x
        return self._norm(x, "final_norm")

    def _attend(self, layer: int, h: Tensor, positions: Tensor, context: Tensor) -> Tensor:
        """MLA of the block rows [K, D] over context and block, [K, D]."""
        c, nm, at = self.config, self.numerics, f"layers.{layer}.self_attn"
        low = self._norm(self._linear(h, f"{at}.q_a_proj"), f"{at}.q_a_layernorm")
        q = self._linear(low, f"{at}.q_b_proj").view(h.shape[0], c.num_attention_heads, -1)
        kv_b, nope = self._w[f"{at}.kv_b_proj.weight"], c.qk_nope_head_dim
        q = torch.cat([q[..., :nope], self.rotate(q[..., nope:], positions)], dim=-1)
        seen = context if c.sliding_window is None else context[-c.sliding_window :]
        rows = torch.cat([seen, self._kv_rows(layer, h, positions)])
        hidden = torch.zeros(h.shape[0], rows.shape[0], dtype=torch.bool)
        if not c.non_causal:
            hidden[:, seen.shape[0] :] = torch.ones(h.shape[0], h.shape[0]).triu(1).bool()
        o = block_attention(q, rows, kv_b, nope, hidden, self._scale, nm)
        return self._linear(o.flatten(-2), f"{at}.o_proj")

    # --- heads ---

    def _biased(self, base: Tensor, previous: int) -> Tensor:
        """Logits [V], compute: base plus the bias W2 W1[previous], each rounded."""
        if not 0 <= previous < self.config.vocab_size:
            raise ValueError(f"token id {previous} is outside 0..{self.config.vocab_size - 1}")
        e = self._w["markov_head.markov_w1.weight"][previous]
        return self._add(base, self._linear(e, "markov_head.markov_w2"))

    @torch.no_grad()
    def confidence(self, proposal: Proposal) -> Tensor:
        """Predicted probability, [K] wide, that each draft is accepted once those before it are.

        Raises:
            ValueError: the draft has no confidence head.
        """
        c, nm = self.config, self.numerics
        if not c.enable_confidence_head:
            raise ValueError("the draft has no confidence head (enable_confidence_head is false)")
        x = proposal.hidden
        if c.confidence_head_with_markov:
            x = torch.cat([x, self._w["markov_head.markov_w1.weight"][proposal.previous]], dim=-1)
        weight, bias = (nm.wide(self._w[f"confidence_head.proj.{n}"]) for n in ("weight", "bias"))
        return torch.sigmoid(nm.wide(x) @ weight[0] + bias)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._w[f"{name}.weight"], self.numerics)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return ops.rms_norm(x, self._w[f"{name}.weight"], self.config.rms_norm_eps, self.numerics)

    def _add(self, a: Tensor, b: Tensor) -> Tensor:
        nm = self.numerics
        return nm.round(nm.wide(a) + nm.wide(b))


def swiglu(gate: Tensor, up: Tensor, nm: Numerics) -> Tensor:
    """silu(gate) * up, compute; H rounds the activation first, V rounds the product only."""
    wide = nm.wide(gate)
    act = wide * torch.sigmoid(wide)
    if nm.profile == "H":
        act = nm.wide(nm.round(act))
    return nm.round(act * nm.wide(up))


def block_attention(
    q: Tensor, rows: Tensor, kv_b: Tensor, nope: int, hidden: Tensor, scale: float, nm: Numerics
) -> Tensor:
    """MLA of block rows, in the form and with the rounding points that `nm.mla_form` names.

    Args:
        q: [K, H, nope + rope], compute, its last part rotated.
        rows: [S, R + rope], compute: context rows, then the block's own.
        kv_b: [H * (nope + value), R], compute: per head the key rows, then the value rows.
        nope: width of the per-head key part.
        hidden: [K, S] bool, what a row must not see; all false in a non-causal block.
        scale: factor on the scores.
        nm: numerics.

    Returns:
        [K, H, value], compute.
    """
    heads, rank = q.shape[1], kv_b.shape[1]
    up = nm.wide(kv_b).view(heads, -1, rank)
    if nm.mla_form == "absorbed":
        absorbed = ops.mla_absorbed_query(q, kv_b, nope, nm)
        scores = torch.einsum("thr,sr->hts", nm.wide(absorbed), nm.wide(rows)) * scale
        probs = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        mixed = nm.round(torch.einsum("hts,sr->thr", probs, nm.wide(rows[:, :rank])))
        return nm.round(torch.einsum("thr,hvr->thv", nm.wide(mixed), up[:, nope:]))
    expanded = linear(rows[:, :rank], kv_b, nm).view(rows.shape[0], heads, -1)
    shared = rows[:, None, rank:].expand(-1, heads, -1)
    key, value = torch.cat([expanded[..., :nope], shared], dim=-1), expanded[..., nope:]
    scores = nm.round(torch.einsum("thd,shd->hts", nm.wide(q), nm.wide(key)))
    scores = nm.wide(nm.round(nm.wide(scores) * scale)).masked_fill(hidden, float("-inf"))
    probs = nm.round(torch.softmax(scores, dim=-1))
    return nm.round(torch.einsum("hts,shv->thv", nm.wide(probs), nm.wide(value)))

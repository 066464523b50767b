"""The layer loop, the caches of one sequence, and greedy decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_ref import ops
from torch_ref.config import Config
from torch_ref.loader import Weights, load_weights
from torch_ref.numerics import Numerics, fp8_decode, fp8_encode, linear

Tensors = dict[str, Tensor]
Forced = Mapping[int, Tensor]


@dataclass
class State:
    """Caches of one sequence; the lists run over the layers of one kind, in layer order.

    `Model` replaces entries of the lists and never writes into a tensor, so `clone` is cheap and a
    clone taken before a window is the state to return to when tokens of the window are rejected.

    Attributes:
        kda_state: per KDA layer [H, V, K], wide.
        conv_window: per KDA layer [taps - 1, 3 * H * K], compute: raw projections before
            convolution, oldest first, channels [q | k | v].
        kv_latent: per MLA layer [S, R + rope]: normalised latent then raw shared key, in the
            compute dtype or in `torch.float8_e4m3fn`.
        position: tokens processed so far (S of every MLA layer between two passes).
    """

    kda_state: list[Tensor]
    conv_window: list[Tensor]
    kv_latent: list[Tensor]
    position: int = 0

    def clone(self) -> State:
        """An independent state that shares the tensors, which nobody writes into."""
        lists = (self.kda_state, self.conv_window, self.kv_latent)
        return State(*(list(x) for x in lists), position=self.position)


class Model:
    """The text model for one sequence at a time.

    Attributes:
        config: the architecture.
        weights: where the tensors come from.
        numerics: number format and rounding profile.
    """

    def __init__(self, weights: Weights) -> None:
        """Uses `weights`, with the configuration and numerics they were made for."""
        self.weights, self.config, self.numerics = weights, weights.config, weights.numerics
        c = self.config
        self._betas = (c.activation_situ_beta, c.activation_situ_linear_beta)

    @classmethod
    def load(cls, path: str | Path, numerics: Numerics, *, keep: bool = True) -> Model:
        """Opens a checkpoint folder; see `load_weights` for arguments and errors."""
        return cls(load_weights(path, numerics, keep=keep))

    @classmethod
    def from_tensors(
        cls, config: Config, tensors: Mapping[str, Tensor], numerics: Numerics
    ) -> Model:
        """Uses a dict of tensors named as in a checkpoint with `config.prefix`.

        Only what is run is looked up, so the dict may hold a single layer.
        """
        return cls(Weights(config, tensors, numerics))

    def new_state(self, device: torch.device | str = "cpu") -> State:
        """The state before the first token, on `device`: zeros and no latent rows."""
        c, nm = self.config, self.numerics
        heads, width, taps = c.kda_num_heads, c.kda_head_dim, c.short_conv_kernel_size
        row = c.kv_lora_rank + c.qk_rope_head_dim
        kv_dtype = torch.float8_e4m3fn if nm.kv_dtype == "fp8" else nm.dtype
        return State(
            [
                torch.zeros(heads, width, width, dtype=nm.wide_dtype, device=device)
                for _ in c.kda_layers
            ],
            [
                torch.zeros(taps - 1, 3 * c.kda_width, dtype=nm.dtype, device=device)
                for _ in c.kda_layers
            ],
            [torch.zeros(0, row, dtype=kv_dtype, device=device) for _ in c.mla_layers],
        )

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor | Sequence[int],
        state: State,
        *,
        record: Tensors | None = None,
        forced: Forced | None = None,
    ) -> Tensor:
        """Processes T further tokens of one sequence: a prompt, one decode step or a window.

        Args:
            token_ids: [T] integers, T >= 1.
            state: caches before these tokens; updated in place to those after the last token (the
                lists get new tensors, the old tensors stay as they were).
            record: optional dict, filled with the streams of these T tokens:
                `layerNN.attn_norm_in`, `.attn_out`, `.mlp_norm_in`, `.mlp_out`, `.prefix_sum_out`
                [T, D]; on MoE layers `.router_idx`, `.router_weight` [T, X], `.router_gap` [T],
                `.router_edge` [T, 2]; on MLA layers `.mla_latent` [T, R], `.mla_k_pe` [T, rope];
                `final_norm_in`, `final_norm_out` [T, D].
            forced: optional expert ids [T, X] by 0-based layer that replace the choice of the
                router.

        Returns:
            Logits [T, vocabulary], compute; row i judges the token after token i.

        Raises:
            ValueError: no tokens, or ids outside the vocabulary.
        """
        c = self.config
        ids = torch.as_tensor(token_ids).long()
        if ids.dim() != 1 or not ids.numel():
            raise ValueError(
                f"token_ids must be one row of at least one id, got {tuple(ids.shape)}"
            )
        prefix, snapshots = self.weights.embed(ids), []
        for layer in range(c.num_hidden_layers):
            prefix, snapshots = self.layer(
                layer, prefix, snapshots, state, record=record, forced=forced
            )
        state.position += ids.numel()
        return self.head(prefix, snapshots, record=record)

    @torch.no_grad()
    def layer(
        self,
        layer: int,
        prefix: Tensor,
        snapshots: Sequence[Tensor],
        state: State,
        *,
        record: Tensors | None = None,
        forced: Forced | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs one 0-based layer on T tokens.

        Args:
            layer: which layer.
            prefix: [T, D], compute: the running sum on entry.
            snapshots: each [T, D], compute: those taken before this layer.
            state: as in `forward`; only the entry of this layer changes. `position` is read and not
                advanced, so all layers of a pass see the same value.
            record: as in `forward`.
            forced: as in `forward`.

        Returns:
            Prefix and snapshots on exit; the arguments are not modified.
        """
        c, nm = self.config, self.numerics
        w, snapshots = self.weights.layer(layer), list(snapshots)
        streams: Tensors = {}
        u = prefix
        if snapshots:  # the first layer has nothing to mix
            mix = self._mix(w, "self_attention", prefix, snapshots)
            u = ops.mix_for_norm(mix, nm)
        if c.starts_block(layer):  # after the mix, so the old prefix was its last source
            snapshots.append(prefix)
        x = ops.rms_norm(u, w["input_layernorm.weight"], c.rms_norm_eps, nm)
        attend = self._kda if c.is_kda(layer) else self._mla
        a = attend(layer, x, w, state, streams)
        prefix = a if c.starts_block(layer) else self._add(prefix, a)
        v = ops.mix_for_norm(self._mix(w, "mlp", prefix, snapshots), nm)
        y = ops.rms_norm(v, w["post_attention_layernorm.weight"], c.rms_norm_eps, nm)
        if c.is_dense(layer):
            f = self._mlp(y, w, "mlp")
        else:
            f = self._moe(layer, y, w, None if forced is None else forced.get(layer), streams)
        prefix = self._add(prefix, f)
        streams |= {"attn_norm_in": u, "attn_out": a, "mlp_norm_in": v, "mlp_out": f}
        if record is not None:
            streams["prefix_sum_out"] = prefix
            record |= {f"layer{layer:02d}.{name}": x for name, x in streams.items()}
        return prefix, snapshots

    @torch.no_grad()
    def head(
        self, prefix: Tensor, snapshots: Sequence[Tensor], *, record: Tensors | None = None
    ) -> Tensor:
        """Final mix (rounded in both profiles), final norm and logits [T, vocabulary], compute."""
        root, nm, eps = self.weights.root, self.numerics, self.config.rms_norm_eps
        norm, proj = (root(f"model.output_attn_res_{n}.weight") for n in ("norm", "proj"))
        mix = nm.round(ops.attn_res(prefix, snapshots, norm, proj, eps, nm))
        hidden = ops.rms_norm(mix, root("model.norm.weight"), eps, nm)
        if record is not None:
            record |= {"final_norm_in": mix, "final_norm_out": hidden}
        return linear(hidden, root("lm_head.weight"), nm)

    def taps(self, record: Tensors, layers: Sequence[int], stream: str = "prefix") -> Tensor:
        """Streams after some layers, side by side, from the record of a pass.

        Args:
            record: what `forward` filled in for T tokens.
            layers: 0-based layers; the last layer may be among them.
            stream: "prefix", the running sum on exit of the layer, or "attn_res", the mixture that
                its next consumer makes of it before any norm (for the last layer, the head's).

        Returns:
            [T, len(layers) * D], compute, in the order of `layers`.
        """
        names = [f"layer{layer:02d}.prefix_sum_out" for layer in layers]
        if stream == "attn_res":
            last = self.config.num_hidden_layers - 1
            consumers = (f"layer{layer + 1:02d}.attn_norm_in" for layer in layers)
            names = [
                "final_norm_in" if layer == last else name
                for layer, name in zip(layers, consumers, strict=True)
            ]
        elif stream != "prefix":
            raise ValueError(f"stream {stream!r} is not 'prefix' or 'attn_res'")
        return torch.cat([self.numerics.round(record[name]) for name in names], dim=-1)

    def _add(self, a: Tensor, b: Tensor) -> Tensor:
        nm = self.numerics
        return nm.round(nm.wide(a) + nm.wide(b))

    def _mix(self, w: Tensors, site: str, prefix: Tensor, snapshots: Sequence[Tensor]) -> Tensor:
        norm, proj = w[f"{site}_res_norm.weight"], w[f"{site}_res_proj.weight"]
        return ops.attn_res(prefix, snapshots, norm, proj, self.config.rms_norm_eps, self.numerics)

    def _mlp(self, x: Tensor, w: Tensors, where: str) -> Tensor:
        parts = (w[f"{where}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return ops.mlp(x, *parts, self._betas, self.numerics)

    def _kda(self, layer: int, x: Tensor, w: Tensors, state: State, _streams: Tensors) -> Tensor:
        """KDA attention [T, D] to [T, D]; replaces state and window of the layer."""
        c, nm, i = self.config, self.numerics, self.config.kda_layers.index(layer)

        def project(x: Tensor, name: str) -> Tensor:
            return linear(x, w[f"self_attn.{name}_proj.weight"], nm)

        def heads(flat: Tensor) -> Tensor:
            return flat.view(*flat.shape[:-1], c.kda_num_heads, c.kda_head_dim)

        raw = torch.cat([project(x, n) for n in "qkv"], dim=-1)
        taps = torch.cat([w[f"self_attn.{n}_conv1d.weight"] for n in "qkv"])
        convolved, state.conv_window[i] = ops.short_conv(raw, state.conv_window[i], taps, nm)
        q, k, v = (heads(part) for part in convolved.chunk(3, dim=-1))
        q = ops.l2_norm(q, nm) * c.kda_head_dim**-0.5
        k = ops.l2_norm(k, nm)
        z = heads(project(project(x, "f_a"), "f_b"))
        a_log, dt_bias = w["self_attn.A_log"], w["self_attn.dt_bias"]
        log_decay = ops.kda_log_decay(z, a_log, dt_bias, c.gate_lower_bound, nm)
        beta = torch.sigmoid(nm.wide(project(x, "b")))
        o, state.kda_state[i] = ops.kda_recurrence(q, k, v, log_decay, beta, state.kda_state[i], nm)
        gate = heads(project(x, "g"))
        y = ops.gated_rms_norm(o, gate, w["self_attn.o_norm.weight"], c.rms_norm_eps, nm)
        return project(y.flatten(-2), "o")

    def _mla(self, layer: int, x: Tensor, w: Tensors, state: State, streams: Tensors) -> Tensor:
        """MLA attention [T, D] to [T, D]; appends the latent rows of these tokens."""
        c, nm, i = self.config, self.numerics, self.config.mla_layers.index(layer)

        def part(name: str) -> Tensor:
            return w[f"self_attn.{name}.weight"]

        eps, rank = nm.mla_norm_eps, c.kv_lora_rank
        q_latent = ops.rms_norm(linear(x, part("q_a_proj"), nm), part("q_a_layernorm"), eps, nm)
        q = linear(q_latent, part("q_b_proj"), nm).view(x.shape[0], c.num_attention_heads, -1)
        kv = linear(x, part("kv_a_proj_with_mqa"), nm)
        latent = ops.rms_norm(kv[:, :rank], part("kv_a_layernorm"), eps, nm)
        row = torch.cat([latent, kv[:, rank:]], dim=-1)
        if nm.kv_dtype == "fp8":
            stored = torch.cat([state.kv_latent[i], fp8_encode(row, nm.kv_scale, nm)])
            rows = fp8_decode(stored, nm.kv_scale, nm)
        else:
            stored = rows = torch.cat([state.kv_latent[i], row])
        state.kv_latent[i] = stored
        attend = ops.mla_explicit if nm.mla_form == "explicit" else ops.mla_absorbed
        o = attend(q, rows, part("kv_b_proj"), c.qk_nope_head_dim, state.position, nm)
        y = ops.mla_gate(o.flatten(-2), linear(x, part("g_proj"), nm), nm)
        streams |= {"mla_latent": latent, "mla_k_pe": kv[:, rank:]}
        return linear(y, part("o_proj"), nm)

    def _moe(
        self, layer: int, y: Tensor, w: Tensors, forced: Tensor | None, streams: Tensors
    ) -> Tensor:
        """LatentMoE [T, D] to [T, D]."""
        c, nm = self.config, self.numerics

        def part(name: str) -> Tensor:
            return w[f"block_sparse_moe.{name}"]

        routing = ops.router(
            y,
            part("gate.weight"),
            part("gate.e_score_correction_bias"),
            c.num_experts_per_token,
            nm,
            scaling=c.routed_scaling_factor,
            groups=c.num_expert_group,
            kept_groups=c.topk_group,
            forced=forced,
        )
        streams |= {
            "router_idx": routing.idx,
            "router_weight": routing.weight,
            "router_gap": routing.gap,
            "router_edge": routing.edge,
        }
        shared = self._mlp(y, w, "block_sparse_moe.shared_experts")
        routed, _ = ops.latent_moe(
            y,
            routing,
            lambda e: self.weights.expert(layer, e),
            part("routed_expert_down_proj.weight"),
            part("routed_expert_norm.weight"),
            part("routed_expert_up_proj.weight"),
            self._betas,
            c.rms_norm_eps,
            nm,
        )
        return self._add(routed, shared)


def greedy(model: Model, prompt_ids: Tensor | Sequence[int], steps: int) -> tuple[Tensor, Tensor]:
    """Prefills the prompt and decodes `steps` tokens, one at a time, by the largest logit.

    Returns:
        The ids [steps] int64 and the logits they were chosen from [steps, vocabulary]; equal logits
        are decided for the lower id. The stop token is not obeyed.
    """
    state, ids, rows = model.new_state(), [], []
    logits = model.forward(prompt_ids, state)[-1]
    for step in range(steps):
        rows.append(logits)
        ids.append(int(logits.argmax()))
        if step + 1 < steps:
            logits = model.forward([ids[-1]], state)[-1]
    return torch.tensor(ids), torch.stack(rows)

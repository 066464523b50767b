"""The one table of tolerances: quantity and compute dtype -> metric, limit and the reason for it.

A limit is loosened only in a change of its own. Numbers called "measured" are what this code showed
on the recorded folders when the limit was written.
"""

from __future__ import annotations

from dataclasses import dataclass

EXACT = "exact"
ANY = "any"  # the same limit in every dtype
F32, BF16 = "float32", "bfloat16"


@dataclass(frozen=True)
class Tolerance:
    """`metric` of a comparison may be at most `limit`; `EXACT` asks for equality instead."""

    metric: str
    limit: float
    reason: str


_BF16_OP = (
    "a bf16 unit in the last place is 2^-8 of the value and a result passes a few roundings; the "
    "published code in bf16 shows 1e-3 to 5e-3"
)
TOLERANCES: dict[tuple[str, str], Tolerance] = {
    # ---- single operations ----
    ("op", F32): Tolerance(
        "max_rel", 1e-6, "f32 sums of at most some hundred terms; the published f32 run shows 3e-7"
    ),
    ("op", BF16): Tolerance("max_rel", 1e-2, _BF16_OP),
    ("op_element", F32): Tolerance(
        "max_element",
        2e-6,
        "where every element is a product of a few f32 factors, each has its own relative error; "
        "measured up to 8.4e-7, from the argument of a sigmoid",
    ),
    ("op_long", F32): Tolerance(
        "max_rel", 2e-6, "a recurrence of more than 32 steps collects one f32 rounding per step"
    ),
    ("op_long", BF16): Tolerance("max_rel", 1e-2, _BF16_OP),
    ("op_inner", F32): Tolerance("max_rel", 1e-6, "as for operation outputs"),
    ("op_inner", BF16): Tolerance(
        "max_rel",
        1.5e-2,
        "attention before its gate: a score near 8, rounded twice, moves by up to 2^-5 and its "
        "probability by as many parts; gate and output projection average that out again",
    ),
    ("kda_state", F32): Tolerance("max_rel", 2e-6, "f32 state, one rounding per step"),
    ("kda_state", BF16): Tolerance(
        "rel_l2", 1e-5, "the state stays f32: from identical bf16 q, k, v only f32 noise remains"
    ),
    ("attn_res", F32): Tolerance("max_rel", 1e-6, "softmax over at most nine sources, f32"),
    ("attn_res", BF16): Tolerance(
        "rel_l2", 2e-3, "f32 inside, one rounding at the end: half a unit is 2^-9 = 2e-3 at most"
    ),
    ("mxfp4", ANY): Tolerance(EXACT, 0.0, "every MXFP4 value is a bf16 number"),
    ("mxfp4_quantised", ANY): Tolerance(
        "max_abs",
        2.0,
        "in units of the group's scale: 8 rounds down to the largest code, 6; elsewhere half a gap",
    ),
    ("router_ids", ANY): Tolerance(
        "flip_gap_max", 1e-6, "f32 scores: another sum order moves a score by less than 1e-6"
    ),
    ("router_weight", ANY): Tolerance(
        "max_rel", 1e-6, "f32 in every dtype: operands are exact in bf16, scores are f32"
    ),
    # ---- whole models, chained ----
    ("logits", F32): Tolerance(
        "max_abs", 5e-4, "std 2.6; the published f32 run deviates by 2e-5 to 5e-5, times ten"
    ),
    ("logits", BF16): Tolerance(
        "rms",
        0.5,
        "std 2.6; the published bf16 run deviates by 0.10 to 0.21 because depth mixtures amplify "
        "single roundings and router near-ties flip",
    ),
    ("logits_short", F32): Tolerance("max_abs", 5e-4, "as for the logits of the long sequence"),
    ("logits_short", BF16): Tolerance(
        "kl_median",
        0.2,
        "the rms of a few rows is that of a single flipped one; measured medians up to 0.045",
    ),
    ("stream", F32): Tolerance(
        "max_abs", 2e-4, "values up to 10; f32 noise amplified from layer to layer"
    ),
    ("stream", BF16): Tolerance(
        "rms",
        0.54,
        "twice what the published bf16 run shows in the last layer of the deepest recorded model "
        "(0.27); the injected comparison is the sharp one. A folder that records less has a limit "
        "of its own, see `golden_limits.stream_limit`",
    ),
    ("cache", F32): Tolerance("max_abs", 2e-4, "as for the streams that fill it"),
    ("agreement", F32): Tolerance(
        "max_abs", 2e-4, "two groupings of one computation: f32 sum order only, amplified by depth"
    ),
    ("greedy", F32): Tolerance(
        "margin",
        1e-3,
        "twice the logit tolerance: where the recorded margin is larger, the choice cannot change",
    ),
    ("greedy", BF16): Tolerance(
        "margin",
        1.0,
        "where a router near-tie flips, single logits move by up to 2; measured other choices at "
        "margins up to 0.70. Where the bf16 ids are recorded, the exact logit of the other choice "
        "may be that much below, and one before the point to which the recorded bf16 run agrees "
        "also needs a reason, `golden_limits.explanation`",
    ),
    ("greedy_noise", BF16): Tolerance(
        "margin_over_noise",
        3 * 2**0.5,
        "in units of what bf16 did to a logit of the median recorded row: a margin is a difference "
        "of two logits, hence the root of 2, and three standard deviations",
    ),
    ("router_chained", F32): Tolerance(
        "flip_gap_max", 2e-5, "stream error up to 2e-4 moves a score by at most about a tenth of it"
    ),
    ("router_chained", BF16): Tolerance(
        "flipped_share",
        0.25,
        "a row flips if one of its k picks does; the published bf16 run flips 1 to 5 per cent of "
        "the picks on average over the layers, so up to a fifth of the rows of one layer",
    ),
    # ---- one layer on injected inputs ----
    ("sublayer", F32): Tolerance(
        "rel_l2", 5e-6, "one layer in f32 on recorded inputs that were stored as f32"
    ),
    ("sublayer", BF16): Tolerance(
        "rel_l2",
        1.2e-2,
        "against float64, inputs rounded to bf16: about ten chained roundings of up to 2^-9 each",
    ),
    ("sublayer_cache", F32): Tolerance(
        "rel_l2", 5e-6, "cache rows of one layer in f32 on recorded inputs"
    ),
    ("sublayer_cache", BF16): Tolerance(
        "rel_l2", 1.2e-2, "q, k, v and latents carry two or three bf16 roundings each"
    ),
    ("pair_sublayer", F32): Tolerance("rel_l2", 5e-6, "two f32 programs, other sum order"),
    ("pair_sublayer", BF16): Tolerance(
        "rel_l2", 4e-3, "same rounding points: another sum order flips single roundings only"
    ),
    ("pair_mix", F32): Tolerance("rel_l2", 2e-6, "two f32 programs, other sum order"),
    ("pair_mix", BF16): Tolerance(
        "rel_l2", 2e-3, "mix and norm on identical inputs: single flipped roundings"
    ),
    ("router_injected", F32): Tolerance(
        "flip_gap_max", 1e-5, "f32 scores from inputs that carry 1e-6 of f32 noise"
    ),
    ("router_injected", BF16): Tolerance(
        "flip_gap_max",
        2e-2,
        "the row that is scored carries bf16 noise of 2^-8 per element, a logit of a few units "
        "moves by as many parts in a hundred, a score by a quarter of that",
    ),
    # ---- JAX against PyTorch on any checkpoint ----
    ("pair_logits", F32): Tolerance(
        "rel_l2", 1e-4, "scale-free form of the logit tolerance; AttnRes amplifies f32 noise"
    ),
    ("pair_logits", BF16): Tolerance(
        "rel_l2", 0.2, "scale-free form of rms 0.5 at a standard deviation of 2.6"
    ),
    ("pair_greedy", F32): Tolerance("margin", 1e-3, "twice the float32 logit tolerance"),
    ("pair_greedy", BF16): Tolerance("margin", 1.0, "as for recorded bf16 choices"),
    # ---- the drafter on recorded streams ----
    ("draft_logits", F32): Tolerance(
        "max_abs", 1e-4, "std 2.9; the published modules in f32 deviate by 1.5e-5"
    ),
    ("draft_logits", BF16): Tolerance(
        "rms", 0.15, "std 2.9; the published modules in bf16 deviate by 0.047, times three"
    ),
    ("draft_stream", F32): Tolerance(
        "max_abs", 1e-4, "values up to 10, three layers in f32, recorded as f32"
    ),
    ("draft_stream", BF16): Tolerance(
        "rel_l2", 3e-2, "against float64: chained bf16 roundings of a few layers"
    ),
    ("drafts", F32): Tolerance(
        "margin", 2e-4, "twice the logit tolerance: with a larger margin no other draft is right"
    ),
    ("drafts", BF16): Tolerance(
        "margin", 0.6, "four times the logit rms; below it only where the recorded bf16 run parts"
    ),
    # ---- speculative decoding ----
    ("speculative_text", F32): Tolerance(
        "margin", 1e-3, "twice the logit tolerance: verification groups the same sums differently"
    ),
    ("speculative_text", BF16): Tolerance(
        "margin",
        1.0,
        "the state of accepted rows differs in the last f32 bit, which turns single bf16 roundings "
        "and with them near-ties of a router, as for recorded bf16 choices",
    ),
    # ---- acceptance rules ----
    ("printed", ANY): Tolerance(
        "max_abs", 1e-5, "examples are printed with six decimals; f32 sums add less than that"
    ),
    ("schedule", ANY): Tolerance("max_abs", 1e-12, "differences of decimals in float64"),
    ("enumeration", ANY): Tolerance("max_abs", 1e-12, "sums of products of float64 probabilities"),
    ("lossless", ANY): Tolerance(
        "variation",
        1e-12,
        "total variation between enumerated and wanted distribution, float64 sums; rules with a "
        "mistake show more than 1e-4",
    ),
    ("same_law", ANY): Tolerance(
        "max_abs", 1e-9, "logarithms on one side, products on the other, float64"
    ),
    ("chi_square", ANY): Tolerance(
        "surprise",
        3.0,
        "-log10 of the p value: significance 1e-3 per test, seeds fixed, so it passes or fails "
        "always",
    ),
    # ---- a recorded serving engine ----
    ("engine_tokens", F32): Tolerance(
        "differing_share",
        0.1,
        "of the rows of each recorded text; a float64 run differs from the engine in 7 and 8 of 96 "
        "and in 3 and 3 of 48. Rounded runs add a noise of their own, so for them only the reasons "
        "and the distance to the yardstick count",
    ),
    ("engine_margin", ANY): Tolerance(
        "deficit_over_noise",
        3 * 2**0.5,
        "in units of the noise that bf16 adds to one logit, measured on the record itself as the "
        "rms between torch_ref in bf16 (H) and float32 over rows with equal experts (0.22 on the "
        "synthetic preset, so 0.93): a margin is a difference of two logits, hence the root of 2, "
        "and three standard deviations; not widened for the noise of a bf16 run on our side",
    ),
    ("engine_near_tie", ANY): Tolerance(
        "gap_over_noise",
        2.0,
        "in units of what bf16 moves the gap of that layer's router by, measured likewise (2.7e-3 "
        "in the first expert layer, 1.5e-2 in the fifth): two standard deviations, within which 19 "
        "of 20 choices that rounding turns lie. Nearly every row has one, so it excuses only what "
        "parity.engine_ties measures that it can do in that row",
    ),
    ("engine_kl", ANY): Tolerance(
        "kl_ratio",
        1.5,
        "median KL to the engine over the median KL of torch_ref in bf16 (H) to the recorded "
        "float32: two bf16 programs may differ by both their noises, sqrt(2) in amplitude",
    ),
    ("engine_top1", ANY): Tolerance(
        "top1_below",
        0.03,
        "share of equal best tokens below that of torch_ref in bf16 (H) with the recorded float32; "
        "three points are 1.2 standard deviations of a difference of two such shares over 141 rows",
    ),
    ("engine_drafts", ANY): Tolerance(
        "deficit_over_noise",
        3 * 2**0.5,
        "as for the engine's margins, in units of what bf16 does to a draft's logit in torch_ref, "
        "expert flips of the target included",
    ),
    ("engine_reference", F32): Tolerance(
        "kl_median", 1e-8, "both are float32 runs of one function; measured 1e-12 to 1e-11"
    ),
    # ---- FP8 latent cache ----
    ("fp8_scale", ANY): Tolerance(
        "rms",
        0.15,
        "logit rms between FP8 caches of scale 1 and 4 and a bf16 cache: e4m3 keeps 3 mantissa "
        "bits, so rows carry 2^-4 relative noise, averaged by the attention",
    ),
    # ---- cases with exact answers ----
    ("equal", ANY): Tolerance(EXACT, 0.0, "copies and integers: nothing may round"),
}


def tolerance(key: str, dtype: str = ANY) -> Tolerance:
    """The entry for `key`, by dtype or for any dtype.

    Raises:
        KeyError: the table has no such entry; it is never guessed.
    """
    found = TOLERANCES.get((key, dtype)) or TOLERANCES.get((key, ANY))
    if found is None:
        raise KeyError(f"no tolerance for {key!r} in {dtype!r}; add one with its reason")
    return found

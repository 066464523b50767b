"""The HTML report: one file, plots inlined."""

from __future__ import annotations

import base64
import io
from typing import Any

from parity import report
from parity.verdict import Verdict

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Parity report</title><style>
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem}
table{border-collapse:collapse;width:100%;font-size:12px}
td,th{border-bottom:1px solid #ddd;padding:.25rem .5rem;text-align:left;vertical-align:top}
td.n{font-variant-numeric:tabular-nums;text-align:right}
.passed{color:#176f2c}.failed{color:#b00020;font-weight:600}.not-run{color:#9a6700;font-weight:600}
img{max-width:100%}details{margin:.5rem 0}
</style></head><body>
<h1>Parity report</h1>
<p class="{{ 'passed' if doc.passed else 'failed' }}">{{ doc.counts.passed }} passed,
{{ doc.counts.failed }} failed, {{ doc.counts['not run'] }} not run.</p>
<p>{{ doc.utc }} UTC. Command: <code>{{ doc.command | join(' ') }}</code>.
{% for name, version in doc.software.items() %}{{ name }} {{ version }}{{ ', ' if not loop.last }}
{% endfor %}.
</p>
{% if bad %}<h2>What did not pass</h2><ul>{% for line in bad %}<li class="failed">{{ line }}</li>
{% endfor %}</ul>{% endif %}
{% for title, image, words in plots %}<h2>{{ title }}</h2><p>{{ words }}</p>
<img alt="{{ title }}" src="data:image/png;base64,{{ image }}">{% endfor %}
<h2>Worst verdict of each group</h2>
<table><tr><th>folder<th>ours<th>against<th>dtype/profile<th>case<th>quantity<th>judged<th>worst
<th>limit<th>n<th>status<th>why this limit</tr>
{% for v, n, state in groups %}<tr><td>{{ v.where.folder }}<td>{{ v.where.ours }}
<td>{{ v.where.against }}<td>{{ v.where.dtype }}/{{ v.where.profile }}<td>{{ v.where.case }}
<td>{{ v.quantity }}<td>{{ v.judged }}<td class="n">{{ shown(v) }}
<td class="n">{{ number(v.limit) }}<td class="n">{{ n }}
<td class="{{ state | replace(' ', '-') }}">{{ state }}
<td>{{ v.reason }}{{ '; ' if v.note }}{{ v.note }}</tr>
{% endfor %}</table>
<details><summary>All {{ doc.verdicts | length }} verdicts with all metrics</summary><table>
{% for v in doc.verdicts %}<tr><td>{{ v.folder }}<td>{{ v.case }}<td>{{ v.quantity }}
<td>{{ v.ours }} {{ v.dtype }}/{{ v.profile }}<td class="{{ v.status | replace(' ', '-') }}">
{{ v.status }}<td>{% for k, m in v.metrics.items() %}{% if k not in hidden %}{{ k }}
{{ '%.3g' % m if m is number else m }}; {% endif %}{% endfor %}</tr>{% endfor %}</table></details>
</body></html>
"""


def render(verdicts: list[Verdict], doc: dict[str, Any]) -> str:
    """The report as HTML; `doc` is `report.document(verdicts)`."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True)
    groups = []
    for group in report.grouped(verdicts):
        state = next(
            (s for s in ("failed", "not run") if any(v.status == s for v in group)), "passed"
        )
        groups.append((report.worst(group), len(group), state))
    bad = [report.explain(v).replace(r"\[", "[") for v in report.unfinished(verdicts)]
    return environment.from_string(_TEMPLATE).render(
        doc=doc, groups=groups, bad=bad, plots=list(_plots(verdicts)), number=report.number,
        shown=report.shown, hidden=("rows_margin", "rows_error"),
    )  # fmt: skip


def _plots(verdicts: list[Verdict]):
    """(title, base64 PNG, words) of every plot for which there are numbers."""
    growth = [v for v in verdicts if v.quantity == "prefix_sum_out" and v.metrics]
    if growth:
        words = (
            "Relative L2 error of the running sum after each layer. Series named injected start "
            "every layer from the reference's own input, the others chain."
        )
        yield (
            "Error growth over the layers",
            _lines(growth, "rel_l2", "relative L2", log=True),
            words,
        )
    scatter = [v for v in verdicts if "rows_margin" in v.metrics]
    if scatter:
        words = (
            "Every row: the reference's margin between its two best tokens, and our largest logit "
            "error. A row can change its token only where the error is about as large."
        )
        yield "Margin and error", _scatter(scatter), words
    flips = [v for v in verdicts if v.quantity == "router_idx" and "flipped" in v.metrics]
    if flips:
        words = "Rows per layer in which another expert set was chosen; near-ties only, in bf16."
        yield "Router flips", _lines(flips, "flipped_share", "share of rows", log=False), words


def _layer(v: Verdict) -> int:
    return int(v.where.case.rsplit("layer", 1)[1][:2])


def _lines(verdicts: list[Verdict], metric: str, label: str, *, log: bool) -> str:
    figure, axes = _figure()
    series: dict[str, list[Verdict]] = {}
    for v in verdicts:
        kind = v.where.case.split(" layer")[0]
        name = f"{v.where.folder} {kind} {v.where.ours} {v.where.dtype}/{v.where.profile}"
        series.setdefault(name, []).append(v)
    for name, found in series.items():
        axes.plot([_layer(v) for v in found], [v.metrics[metric] for v in found], ".-", label=name)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    axes.legend(fontsize=6)
    return _png(figure)


def _scatter(verdicts: list[Verdict]) -> str:
    figure, axes = _figure()
    for v in verdicts:
        name = f"{v.where.folder} {v.where.case} {v.where.dtype}/{v.where.profile}"
        axes.plot(v.metrics["rows_margin"], v.metrics["rows_error"], ".", ms=4, label=name)
    low, high = axes.get_xlim()[0], axes.get_xlim()[1]
    axes.plot([max(low, 1e-3), high], [max(low, 1e-3), high], "k:", lw=0.8, label="error = margin")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("margin of the reference")
    axes.set_ylabel("largest error of the row's logits")
    axes.legend(fontsize=6)
    return _png(figure)


def _figure():
    # the object interface needs no display and leaves no global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return base64.b64encode(buffer.getvalue()).decode()

"""The HTML page, which contains all its resources and so opens without a network."""

import html
import json
from importlib import resources

from manyclass.report.colours import colour, marker
from manyclass.report.content import Curve, Figure, Report, ReportTable, Section, finite_or_none


def render_page(report: Report) -> str:
    """Render the report as one HTML document."""
    from plotly.offline import get_plotlyjs

    colours = report.colours()
    # Escape "</", which would end the enclosing script element.
    content = json.dumps([_figure_content(figure, colours[figure.name]) for figure in report.figures()]).replace(
        "</", r"<\/"
    )
    title = html.escape(report.title)
    links = "".join(f'<a href="#{_anchor(s)}">{html.escape(s.title)}</a>' for s in report.sections)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_resource('page.css')}</style></head><body>",
            f"<header><h1>{title}</h1><p>{html.escape(report.summary)}</p><nav>{links}</nav></header><main>",
            *(_section(section) for section in report.sections),
            f"</main><footer>{''.join(f'<p>{html.escape(note)}</p>' for note in report.notes)}</footer>",
            f'<script type="application/json" id="content">{content}</script>',
            f"<script>{get_plotlyjs()}</script><script>{_resource('page.js')}</script>",
            "</body></html>\n",
        )
    )


def _resource(name: str) -> str:
    return resources.files("manyclass.report").joinpath(name).read_text(encoding="utf-8")


def _anchor(section: Section) -> str:
    return "section-" + "".join(c if c.isalnum() else "-" for c in section.title.lower())


def _section(section: Section) -> str:
    parts = [f'<section id="{_anchor(section)}"><h2>{html.escape(section.title)}</h2>']
    for part in section.parts:
        if isinstance(part, Figure):
            parts.append(_figure(part))
        elif isinstance(part, ReportTable):
            parts.append(_table(part))
        else:
            parts.append(f"<p>{html.escape(part)}</p>")
    return "\n".join([*parts, "</section>"])


def _figure(figure: Figure) -> str:
    panels = "".join(f'<div class="panel" aria-label="{html.escape(panel.title)}"></div>' for panel in figure.panels)
    files = " ".join(f'<a href="figures/{figure.name}.{ending}">{ending.upper()}</a>' for ending in ("png", "svg"))
    return (
        f'<figure id="{figure.name}"><div class="legend"></div>'
        f'<div class="panels" data-number="{len(figure.panels)}">{panels}</div>'
        f"<figcaption>{html.escape(figure.caption)} {files}</figcaption></figure>"
    )


def _table(table: ReportTable) -> str:
    heads = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    tones = table.tones or ["plain"] * len(table.rows)
    rows = "".join(
        f'<tr class="{tone}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row, tone in zip(table.rows, tones, strict=True)
    )
    caption = f"<caption>{html.escape(table.caption)}</caption>" if table.caption else ""
    # On a small screen the cells of a table with verdicts are stacked; other tables keep their columns and scroll.
    style = ' class="claims"' if table.tones else ""
    return (
        f'<div class="scroll"><table{style}>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _figure_content(figure: Figure, colours: dict[str, int]) -> dict[str, object]:
    return {
        "name": figure.name,
        "panels": [
            {
                "title": panel.title,
                "x_label": panel.x_label,
                "y_label": panel.y_label,
                "log_x": panel.log_x,
                "log_y": panel.log_y,
                "curves": [_curve_content(curve, colours[curve.colour_of or curve.label]) for curve in panel.curves],
            }
            for panel in figure.panels
        ],
    }


def _curve_content(curve: Curve, number: int) -> dict[str, object]:
    return {
        "label": curve.label,
        "x": finite_or_none(curve.x),
        "y": finite_or_none(curve.y),
        "low": None if curve.low is None else finite_or_none(curve.low),
        "high": None if curve.high is None else finite_or_none(curve.high),
        "dashed": curve.dashed,
        "points": curve.points,
        "light": colour(number),
        "dark": colour(number, dark=True),
        "marker": marker(number),
    }

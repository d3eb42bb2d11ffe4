"""The HTML of one experiment: heading, claims, pictures, tables, settings, notes."""

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from iblr.reproduce import pictures
from iblr.reproduce.report.figures import figure
from iblr.reproduce.results import Result

MARKS = {"holds": "✓", "does not hold": "✗", "not run": "–", "too little to tell": "–"}
STATUSES = {
    "done": "done",
    "partial": "partly run",
    "not run": "not run",
    "waiting": "waiting",
    "failed": "failed",
}


def section(result: Result, common: Mapping[str, str]) -> str:
    """One experiment; `common` is the environment that the overview already names."""
    shown = result.section or pictures.Section()
    title = f"{anchor(result)}-title"
    return "\n".join(
        part
        for part in (
            f'<section class="experiment" id="{anchor(result)}" aria-labelledby="{title}">',
            _heading(result, shown, title),
            _state(result),
            _claimed(result),
            claims_table(result, shown.claims),
            *(
                _picture(picture, f"{anchor(result)}-picture-{number}")
                for number, picture in enumerate(shown.pictures, start=1)
            ),
            *(_table(table) for table in shown.tables),
            _notes(shown.notes),
            _settings(result, shown, common),
            "</section>",
        )
        if part
    )


def anchor(result: Result) -> str:
    """The id of its section."""
    return "experiment-" + re.sub(r"[^A-Za-z0-9_-]", "-", result.experiment)


def text(value: Any) -> str:
    """Escaped, for an element or an attribute."""
    return escape(str(value), quote=True)


def prose(value: str) -> str:
    """Escaped, with `code` between backticks; for an element.

    Example:
        >>> prose("see `a < b`")
        'see <code>a &lt; b</code>'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(value))


def chip(verdict: str) -> str:
    """A verdict in words, with a mark; the colour says nothing more."""
    kind = verdict.replace(" ", "-")
    mark = f'<span aria-hidden="true">{MARKS[verdict]}</span>'
    return f'<span class="chip {kind}">{mark} {text(verdict)}</span>'


def count(claims: Sequence[pictures.Claim]) -> str:
    """How many hold, in words."""
    held = sum(claim.holds is True for claim in claims)
    return f"{held} of {len(claims)} claim{'s' * (len(claims) != 1)} hold{'s' * (held == 1)}"


def duration(seconds: float) -> str:
    """In the units a reader would use.

    Example:
        >>> duration(0.04), duration(75.2), duration(7261.0)
        ('0.04 s', '1 min 15 s', '2 h 1 min')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def moment(iso: str) -> str:
    """A time as ISO 8601, for a reader; as it is where it is something else."""
    try:
        at = datetime.datetime.fromisoformat(iso)
    except ValueError:
        return text(iso)
    zone = f" {at.tzname()}" if at.tzinfo else ""
    return f'<time datetime="{text(iso)}">{at:%Y-%m-%d %H:%M}{text(zone)}</time>'


def claims_table(result: Result, claims: Sequence[pictures.Claim]) -> str:
    """What was claimed, ours and published, with the explanation under each claim."""
    if not claims:
        return ""
    rows = "".join(
        '<tr role="row">'
        f'<td role="cell" class="wide">{prose(claim.text)}'
        + (f'<p class="why">{prose(claim.why)}</p>' if claim.why else "")
        + f'</td><td role="cell" data-label="Ours" class="number">{text(claim.ours)}</td>'
        f'<td role="cell" data-label="Published" class="number">{text(claim.published)}</td>'
        f'<td role="cell" data-label="Verdict">{chip(claim.verdict)}</td></tr>'
        for claim in claims
    )
    return (
        '<table class="claims stacking" role="table"><caption class="hidden">Claims of '
        f"{text(result.title)}</caption>{headings('Claim', 'Ours', 'Published', 'Verdict')}"
        f'<tbody role="rowgroup">{rows}</tbody></table>'
    )


def headings(*names: str) -> str:
    """The head of a table that stacks on a phone."""
    cells = "".join(f'<th role="columnheader" scope="col">{text(name)}</th>' for name in names)
    return f'<thead role="rowgroup"><tr role="row">{cells}</tr></thead>'


def pairs(items: Iterable[tuple[str, str]]) -> str:
    """A list of names and values; values are HTML."""
    rows = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in items)
    return f'<dl class="pairs">{rows}</dl>'


def _heading(result: Result, shown: pictures.Section, title: str) -> str:
    ran = result.section is not None
    facts = [
        count(shown.claims) if shown.claims else "",
        result.mode if ran else "",
        f"{result.seeds} seed{'s' * (result.seeds != 1)}" if ran else "",
        duration(result.seconds) if ran else "",
    ]
    line = "".join(f"<li>{text(fact)}</li>" for fact in facts if fact)
    return (
        f'<header><p class="eyebrow">{text(result.figure)}</p>'
        f'<h2 id="{title}">{text(result.title)} {_status(result)}</h2>'
        + (f'<ul class="facts">{line}</ul>' if line else "")
        + "</header>"
    )


def _status(result: Result) -> str:
    if result.status == "done":
        return ""
    kind = re.sub(r"[^a-z]", "-", result.status)
    said = STATUSES.get(result.status, result.status)
    return f'<span class="chip status {kind}">{text(said)}</span>'


def _state(result: Result) -> str:
    if result.status == "done" and not result.reason:
        return ""
    said = result.reason or "No reason was given."
    state = STATUSES.get(result.status, result.status).capitalize()
    return f'<p class="state"><strong>{text(state)}.</strong> {prose(said)}</p>'


def _claimed(result: Result) -> str:
    if not result.claim:
        return ""
    return (
        '<blockquote class="claimed"><p class="eyebrow">What the paper says</p>'
        f"<p>{prose(result.claim)}</p></blockquote>"
    )


def _picture(picture: pictures.Picture, name: str) -> str:
    """A place for the picture, its data, and what is known of it without a script."""
    data = figure(picture)
    script = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    kind = data["kind"]
    caption = f"<p>{prose(picture.caption)}</p>" if picture.caption else ""
    inner = {
        pictures.Curves: _single,
        pictures.Plane: _single,
        pictures.Gallery: _gallery,
        pictures.Marginals: _marginals,
    }[type(picture)](picture, name)
    return (
        f'<figure class="picture {kind}" id="{name}" data-kind="{kind}" '
        f'aria-labelledby="{name}-title"><figcaption>'
        f'<h3 id="{name}-title">{text(picture.title)}</h3>{caption}</figcaption>'
        f'<div class="legend" role="group" aria-label="Show or hide"></div>{inner}'
        f'<script type="application/json" id="{name}-data">{escaped(script)}</script></figure>'
    )


def escaped(script: str) -> str:
    """JSON that cannot end the element it stands in."""
    return script.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plot(label: str, kind: str = "") -> str:
    return f'<div class="plot {kind}" role="img" aria-label="{text(label)}"></div>'


def _single(picture: pictures.Curves | pictures.Plane, name: str) -> str:
    if isinstance(picture, pictures.Curves):
        parts = [f"{picture.y.label} over {picture.x.label}"]
        parts += [
            curve.name + (", published" if curve.published else "") for curve in picture.curves
        ]
    else:
        parts = [f"Contours of a density over {picture.x_label} and {picture.y_label}"]
        parts += [ellipse.name for ellipse in picture.ellipses]
        parts += [f"{point} at {x:.3g}, {y:.3g}" for point, x, y in picture.points]
    return _plot(f"{picture.title}. {parts[0]}: {'; '.join(parts[1:])}." if parts[1:] else parts[0])


def _gallery(picture: pictures.Gallery, name: str) -> str:
    last = len(picture.panels) - 1
    small = "".join(
        f"<li>{_plot(f'{picture.title}: {panel.label}', 'small')}"
        f"<p><strong>{text(panel.label)}</strong> {prose(panel.caption)}</p></li>"
        for panel in picture.panels
    )
    return (
        f'<div class="pair"><div>{_plot(f"{picture.title}: exact", "exact")}'
        "<p><strong>Exact</strong></p></div>"
        f"<div>{_plot(f'{picture.title}: the chosen approximation', 'chosen')}"
        '<p class="chosen-caption" aria-live="polite"></p></div></div>'
        + (_slider(name, "Approximation", last, last) if last > 0 else "")
        + f'<h4>All approximations</h4><ul class="panels">'
        f"<li>{_plot(f'{picture.title}: exact', 'small')}<p><strong>Exact</strong></p></li>"
        f"{small}</ul>"
    )


def _marginals(picture: pictures.Marginals, name: str) -> str:
    total = len(picture.points)
    shown = max(1, min(picture.shown, total))
    pages = -(-total // shown)
    compared = ", ".join(series.name for series in picture.series)
    panels = "".join(
        f'<li><p class="panel-title"></p>{_plot(f"{picture.title}. {compared}", "marginal")}</li>'
        for _ in range(shown)
    )
    slider = _slider(name, "Coordinates", pages - 1, 0) if pages > 1 else ""
    return f'{slider}<ul class="panels marginal-panels">{panels}</ul>'


def _slider(name: str, label: str, last: int, start: int) -> str:
    return (
        f'<div class="slider"><label for="{name}-slider">{label}</label>'
        f'<input type="range" id="{name}-slider" min="0" max="{last}" value="{start}" step="1">'
        f'<output for="{name}-slider"></output></div>'
    )


def _table(table: pictures.Table) -> str:
    said = f'<p class="table-caption">{prose(table.caption)}</p>' if table.caption else ""
    return f"<h3>{text(table.title)}</h3>{said}{_rows(table.title, table.columns, table.rows)}"


def _rows(label: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls within the page where it is too wide."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scrolling" role="region" tabindex="0" aria-label="{text(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{prose(note)}</li>" for note in notes)
    return (
        '<aside class="notes" aria-label="Notes"><h3>Traps and misprints</h3>'
        f"<ul>{items}</ul></aside>"
    )


def _settings(result: Result, shown: pictures.Section, common: Mapping[str, str]) -> str:
    if result.section is None and not result.tasks:
        return ""
    differs = {key: v for key, v in result.environment.items() if common.get(key) != v}
    own = [
        ("mode", text(result.mode)),
        ("seeds", text(result.seeds)),
        ("started", moment(result.started)),
        ("computing", text(duration(result.seconds))),
    ]
    own += [(key, text(value)) for key, value in (*shown.settings, *differs.items())]
    file = quote(result.experiment)
    links = " and ".join(
        f'<a href="{file}.{kind}">{text(result.experiment)}.{kind}</a>' for kind in ("json", "npz")
    )
    return (
        f'<details class="settings"><summary>Settings</summary>{pairs(own)}'
        f'<p class="files">All numbers as they were computed: {links}.</p></details>'
        + _tasks(result.tasks)
    )


def _tasks(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    if not tasks:
        return ""
    rows = [
        (
            name,
            duration(float(kept["seconds"])) if "seconds" in kept else "",
            ", ".join(_item(*item) for item in kept.items() if item[0] != "seconds"),
        )
        for name, kept in tasks.items()
    ]
    return (
        f"<details><summary>Pieces of work ({len(rows)})</summary>"
        f"{_rows('Pieces of work', ('piece', 'time', 'settings'), rows)}</details>"
    )


def _item(key: str, value: Any) -> str:
    if key == "settings":
        return str(value)
    return f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"

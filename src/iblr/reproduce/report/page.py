"""The page as a whole: overview, sections, and the script and style that travel with it."""

import json
from collections.abc import Sequence
from importlib import resources
from string import Template

from iblr.reproduce.report.sections import (
    anchor,
    chip,
    count,
    duration,
    escaped,
    headings,
    moment,
    pairs,
    prose,
    section,
    text,
)
from iblr.reproduce.report.strokes import names, strokes
from iblr.reproduce.results import Result, ResultError

VERDICTS = {True: "holds", False: "does-not-hold", None: "not-run"}


def page(results: Sequence[Result]) -> str:
    """The whole document, which needs nothing outside of itself."""
    common = _common(results)
    shown = [p for result in results if result.section for p in result.section.pictures]
    drawn = {name: stroke._asdict() for name, stroke in strokes(names(shown)).items()}
    return Template(_file("page.html")).substitute(
        css=_file("page.css"),
        plotly=_plotly() if shown else "",
        pictures=_file("pictures.js"),
        script=_file("page.js"),
        strokes=escaped(json.dumps(drawn, ensure_ascii=False)),
        contents=_contents(results),
        overview=_overview(results, common),
        sections="\n".join(section(result, common) for result in results),
    )


def _file(name: str) -> str:
    return resources.files("iblr.reproduce.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    """Plotly's own script, which comes with its Python package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ResultError("The report needs Plotly: pip install 'iblr[cli]'.") from error
    return get_plotlyjs().replace("</script", "<\\/script")


def _common(results: Sequence[Result]) -> dict[str, str]:
    """What all experiments that ran have in common of their environments."""
    ran = [result.environment for result in results if result.section is not None]
    ran = ran or [result.environment for result in results]
    first = ran[0] if ran else {}
    return {key: v for key, v in first.items() if all(other.get(key) == v for other in ran)}


def _contents(results: Sequence[Result]) -> str:
    return "\n".join(
        f'<li><a href="#{anchor(result)}">{text(result.title)}</a>{_tally(result)}</li>'
        for result in results
    )


def _tally(result: Result) -> str:
    """Claims that hold, of all, beside the title; the state where there are none."""
    if result.section is None or not result.section.claims:
        state = result.status if result.status != "done" else "no claims"
        return f'<span class="tally">{text(state)}</span>'
    claims = result.section.claims
    held = sum(claim.holds is True for claim in claims)
    failed = any(claim.holds is False for claim in claims)
    kind = "failed" if failed else "held" if held == len(claims) else "open"
    return (
        f'<span class="tally {kind}"><span aria-hidden="true">{held}/{len(claims)}</span>'
        f'<span class="hidden">{text(count(claims))}</span></span>'
    )


def _overview(results: Sequence[Result], common: dict[str, str]) -> str:
    claims = [claim for result in results if result.section for claim in result.section.claims]
    return "\n".join(
        [
            f'<p class="count">{text(count(claims))}</p>',
            _bar([claim.holds for claim in claims]),
            _remainder(results, [claim.holds for claim in claims]),
            pairs(_facts(results, common)),
            "<h2 id='all-claims'>All claims</h2>",
            _all_claims(results),
        ]
    )


def _bar(held: Sequence[bool | None]) -> str:
    """The count as a picture; the words beside it say the same."""
    parts = "".join(
        f'<span class="{kind}" style="flex-grow:{held.count(value)}"></span>'
        for value, kind in VERDICTS.items()
        if held.count(value)
    )
    return f'<div class="bar" aria-hidden="true">{parts}</div>'


def _remainder(results: Sequence[Result], held: Sequence[bool | None]) -> str:
    failed, untold = held.count(False), held.count(None)
    empty = sum(result.section is None for result in results)
    said = []
    if failed:
        said.append(f"{failed} {'does' if failed == 1 else 'do'} not hold")
    if untold:
        said.append(f"{untold} {'was' if untold == 1 else 'were'} not run, or too little to tell")
    if empty:
        have = "has" if empty == 1 else "have"
        said.append(f"{empty} of {len(results)} experiments {have} no results yet")
    line = "; ".join(said)
    return f'<p class="remainder">{text(line[0].upper() + line[1:])}.</p>' if line else ""


def _facts(results: Sequence[Result], common: dict[str, str]) -> list[tuple[str, str]]:
    ran = [result for result in results if result.section is not None]
    if not ran:
        return [(key, text(value)) for key, value in common.items()]
    started = sorted({result.started for result in ran})
    seeds = sorted({result.seeds for result in ran})
    days = started[0][:10], started[-1][:10]
    when = moment(started[0]) + (f" to {moment(started[-1])}" if days[0] != days[1] else "")
    span = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}, see each section"
    return [
        ("started", when),
        ("computing", text(duration(sum(result.seconds for result in ran)))),
        ("mode", text(" and ".join(sorted({result.mode for result in ran})))),
        ("seeds", text(span)),
        *((key, text(value)) for key, value in common.items()),
    ]


def _all_claims(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        link = f'<a href="#{anchor(result)}">{text(result.title)}</a>'
        claims = result.section.claims if result.section else ()
        for claim in claims:
            rows.append((link, prose(claim.text), claim.verdict, claim.ours, claim.published))
        if not claims and result.status != "done":
            why = f"{prose(result.claim)} <span class='why'>{prose(result.reason)}</span>"
            rows.append((link, why, "not run", "–", "–"))
    body = "".join(
        f'<tr role="row"><td role="cell" class="origin">{link}</td>'
        f'<td role="cell" class="wide">{said}</td>'
        f'<td role="cell" data-label="Verdict">{chip(verdict)}</td>'
        f'<td role="cell" data-label="Ours" class="number">{text(ours)}</td>'
        f'<td role="cell" data-label="Published" class="number">{text(published)}</td></tr>'
        for link, said, verdict, ours, published in rows
    )
    return (
        '<table class="claims stacking overview" role="table" aria-labelledby="all-claims">'
        f"{headings('Experiment', 'Claim', 'Verdict', 'Ours', 'Published')}"
        f'<tbody role="rowgroup">{body}</tbody></table>'
    )

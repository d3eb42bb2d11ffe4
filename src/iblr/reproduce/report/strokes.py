"""How a method is drawn: the same name in the same way, wherever in the report it stands.

The methods of the paper have hues of their own; variants of one share its hue and differ in their
dashes. Other names get what hues are left in order of appearance. What a hue looks like, in the
light and in the dark, is said in `page.css`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from iblr.reproduce import pictures

FAMILIES = {  # the first word of a name, in lower case, and its hue
    "iblr": "iblr",
    "ibayeslrule": "iblr",
    "blr": "blr",
    "bayeslrule": "blr",
    "bbvi": "bbvi",
    "vogn": "vogn",
    "vadam": "vadam",
    "exact": "ink",
    "target": "ink",
    "posterior": "ink",
    "truth": "ink",
    "mcmc": "ink",
    "nuts": "ink",
}
FREE = ("free1", "free2", "free3", "free4")
DASHES = ("solid", "dash", "dot", "dashdot")
PUBLISHED = re.compile(
    r"[\s,(\[:-]*\b(published|(in )?(the )?paper('s)?)\b[)\]]*\s*$", re.IGNORECASE
)


class Stroke(NamedTuple):
    """How to draw one name.

    Attributes:
        hue: a colour of `page.css`.
        dash: Plotly's word for it.
        pale: whether all dashes of the hue were used up before.
        strong: whether it stands out.
    """

    hue: str
    dash: str
    pale: bool
    strong: bool


def method(name: str) -> str:
    """The method that a curve's name is about: without a word on where it was read off.

    Example:
        >>> method("iBLR (published)"), method("BLR, paper"), method("iBLR (Hess)")
        ('iBLR', 'BLR', 'iBLR (Hess)')
    """
    return PUBLISHED.sub("", name) or name


def strokes(names: Iterable[str]) -> dict[str, Stroke]:
    """A stroke for every name, in an order that does not change from one run to the next.

    Example:
        >>> strokes(["iBLR", "K < 3", "iBLR (Hess)"])["iBLR (Hess)"]
        Stroke(hue='iblr', dash='dash', pale=False, strong=True)
    """
    found: dict[str, Stroke] = {}
    used: dict[str, int] = {}
    free = 0
    for name in names:
        key = method(name)
        if key not in found:
            word = re.split(r"[^a-z0-9]", key.lower(), maxsplit=1)[0]
            hue = FAMILIES.get(word)
            if hue is None:
                hue, free = FREE[free % len(FREE)], free + 1
            count = used.get(hue, 0)
            used[hue] = count + 1
            pale = count >= len(DASHES)
            found[key] = Stroke(hue, DASHES[count % len(DASHES)], pale, hue == "iblr")
        found[name] = found[key]
    return found


def names(shown: Sequence[pictures.Picture]) -> list[str]:
    """Everything in the pictures that has a stroke."""
    found: list[str] = []
    for picture in shown:
        match picture:
            case pictures.Curves():
                found += [curve.name for curve in picture.curves]
            case pictures.Plane():
                found += [ellipse.name for ellipse in picture.ellipses]
                found += [name for name, _, _ in picture.points]
            case pictures.Marginals():
                found += [series.name for series in picture.series]
            case pictures.Gallery():
                pass
    return found

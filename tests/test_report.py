"""The report of `iblr reproduce`: all that was found is in the page, and nothing else is needed."""

import dataclasses
import html
import json
import math
import re
import sys
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
import report_results
from report_results import claim, result

from iblr.reproduce import pictures, report, results
from iblr.reproduce.report import figures, strokes

VOID = {"meta", "link", "input", "br", "hr"}
INLINE = {"code", "span", "strong", "time", "a"}
ATTRIBUTES_THAT_FETCH = {"src", "srcset", "data", "poster", "action"}


class Page(HTMLParser):
    """A page taken apart; tags that do not match, and ids given twice, are errors."""

    def __init__(self, path):
        super().__init__()
        self.open, self.ids, self.links, self.fetched = [], set(), [], []
        self.scripts, self.texts, self.tags = {}, [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self.texts.append("" if tag in INLINE else " ")
        if tag not in VOID:
            self.open.append((tag, attributes))
        if "id" in attributes:
            assert attributes["id"] not in self.ids
            self.ids.add(attributes["id"])
        if tag == "a":
            self.links.append(attributes["href"])
        self.fetched += [v for key, v in attrs if key in ATTRIBUTES_THAT_FETCH]
        self.fetched += [attributes["href"]] if tag == "link" else []

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag
        self.texts.append("" if tag in INLINE else " ")

    def handle_data(self, data):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if tag == "script" and "id" in attributes:
            self.scripts[attributes["id"]] = data
        elif tag not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.texts).split())


@pytest.fixture(scope="module")
def made():
    return report_results.all_results()


@pytest.fixture(scope="module")
def path(made, tmp_path_factory):
    return report.write(tmp_path_factory.mktemp("report"), made)


@pytest.fixture(scope="module")
def page(path):
    return Page(path)


def words(text):
    return " ".join(text.replace("`", "").split())


def write(tmp_path, *made):
    return Page(report.write(tmp_path, made))


def test_the_page_is_index_html_in_the_folder(path):
    assert path.name == "index.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in path.parent.iterdir()] == ["index.html"]


def test_every_experiment_has_a_section_that_the_contents_link_to(made, page):
    for one in made:
        anchor = f"experiment-{one.experiment}"
        assert anchor in page.ids
        assert page.links.count(f"#{anchor}") >= 2  # contents, table of claims
        assert one.title in page.text and one.figure in page.text
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids


def test_every_claim_stands_there_with_verdict_ours_published_and_explanation(made, page):
    for one in made:
        for c in one.section.claims if one.section else ():
            for text in (c.text, c.ours, c.published, c.verdict, c.why):
                assert words(text) in page.text


def test_tables_settings_notes_and_captions_are_there(made, page):
    for one in made:
        if one.section:
            table = [cell for t in one.section.tables for row in t.rows for cell in row]
            pairs = [word for pair in one.section.settings for word in pair]
            said = [word for p in one.section.pictures for word in (p.title, p.caption)]
            for text in (*table, *pairs, *said, *one.section.notes):
                assert words(text) in page.text


def test_claims_are_counted(page):
    assert "5 of 7 claims hold" in page.text
    assert "1 does not hold; 1 was not run, or too little to tell; 2 of 6 exp" in page.text


def test_what_was_not_run_says_so_and_why(made, page):
    for one in made:
        if one.status != "done":
            assert words(one.reason) in page.text
    for said in ("Partly run.", "Waiting.", "Not run."):
        assert said in page.text


def test_when_and_with_what_it_was_run_is_there(page):
    for text in ("2026-11-16 08:45 UTC", "quick", "1 to 5", *report_results.ENVIRONMENT.values()):
        assert text in page.text


def test_an_environment_of_its_own_is_told_in_the_section(tmp_path):
    other = report_results.ENVIRONMENT | {"jax": "0.11.0"}
    shown = pictures.Section(claims=(claim(),))
    page = write(tmp_path, result("a", "A", shown), result("b", "B", shown, environment=other))
    assert "0.10.2" in page.text and "0.11.0" in page.text


def test_text_is_escaped_everywhere(tmp_path):
    bad = '</script><script>alert("1")</script> K < 3 & t'
    x = np.linspace(0, 1, 5)
    grid = np.outer(x, x)
    section = pictures.Section(
        claims=(pictures.Claim(bad, bad, bad, False, bad),),
        pictures=(
            pictures.Curves(
                bad, pictures.Axis(bad), pictures.Axis(bad), (pictures.Curve(bad, x, x),), bad
            ),
            pictures.Plane(bad, x, x, grid, points=((bad, 0.5, 0.5),), x_label=bad, caption=bad),
            pictures.Gallery(bad, x, x, grid, (pictures.Panel(bad, grid, bad),), caption=bad),
            pictures.Marginals(bad, grid, (pictures.Series(bad, grid),), caption=bad),
        ),
        tables=(pictures.Table(bad, (bad,), ((bad,),), bad),),
        settings=((bad, bad),),
        notes=(bad,),
    )
    one = result("a", bad, section, figure=bad, claim=bad, reason=bad, status="partial", mode=bad)
    one = dataclasses.replace(one, environment={bad: bad}, tasks={bad: {bad: bad}}, started=bad)
    page = write(tmp_path, one)
    scripts = sum(tag == "script" for tag, _ in page.tags)
    assert scripts == 1 + len(section.pictures) + 1 + 3  # theme, data, strokes, code
    assert page.text.count(words(bad)) > 20
    assert json.loads(page.scripts["experiment-a-picture-1-data"])["x"]["label"] == bad


def test_the_page_fetches_nothing(path, page):
    assert page.fetched == ["data:,"]
    assert not [link for link in page.links if re.match(r"[a-z]+:|//", link)]
    policy = [a["content"] for tag, a in page.tags if a.get("http-equiv")]
    assert policy and "default-src 'none'" in policy[0]
    for name in ("page.html", "page.css", "page.js", "pictures.js"):
        ours = files(report).joinpath(name).read_text(encoding="utf-8")
        ours = ours.replace("http://www.w3.org/2000/svg", "")  # a name, never fetched
        assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", ours), name


def test_plotly_is_inlined_once_and_only_if_there_are_pictures(path, tmp_path):
    assert path.read_text(encoding="utf-8").count("plotly.js v") == 1
    bare = report.write(tmp_path, [result("a", "A", pictures.Section(claims=(claim(),)))])
    assert "plotly.js v" not in bare.read_text(encoding="utf-8")


def test_every_picture_has_data_a_label_and_a_stroke(made, page):
    shown = [p for one in made if one.section for p in one.section.pictures]
    data = [json.loads(text) for key, text in page.scripts.items() if key.endswith("-data")]
    assert [d["kind"] for d in data] == [type(p).__name__.lower() for p in shown]
    assert set(json.loads(page.scripts["strokes"])) >= set(strokes.names(shown))
    plots = [a for _, a in page.tags if "plot" in a.get("class", "").split()]
    assert len(plots) == 3 + (2 + 1 + 8) + 9
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)


def test_landmarks_language_and_headings(page):
    tags = [tag for tag, _ in page.tags]
    assert tags.count("main") == tags.count("h1") == tags.count("nav") == 1
    assert ("html", {"lang": "en"}) in page.tags
    assert "noscript" in tags


def test_no_results_at_all_still_make_a_page(tmp_path):
    assert "0 of 0 claims hold" in write(tmp_path).text


def test_an_older_page_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = report.write(tmp_path, [])
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(results.ResultError, match="No space left on device"):
        report.write(tmp_path, [result("a", "A", None)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(results.ResultError) as caught:
        report.write(tmp_path / "file", [])
    assert re.fullmatch(r"The report cannot be written to .*file: .*\. Give .*", str(caught.value))


def test_a_missing_plotly_is_one_line(tmp_path, made, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(results.ResultError) as caught:
        report.write(tmp_path, made)
    assert str(caught.value) == "The report needs Plotly: pip install 'iblr[cli]'."


def test_results_read_back_from_disk_make_the_same_page(made, path, tmp_path):
    for one in made:
        results.save(tmp_path, one)
    back = results.load_all(tmp_path, [one.experiment for one in made])[0]
    assert report.write(tmp_path, back).read_bytes() == path.read_bytes()


def test_numbers_are_rounded_and_never_nan():
    assert figures.numbers([1 / 3, 2.0, math.nan, -math.inf, 0.0]) == [0.33333, 2, None, None, 0]
    assert figures.numbers([52000.123456, 52001.2]) == [52000.1235, 52001.2]  # where they differ
    assert figures.numbers(np.ones((2, 2))) == [[1, 1], [1, 1]]
    assert figures.numbers([]) == []
    for picture in [
        p for one in report_results.all_results() if one.section for p in one.section.pictures
    ]:
        json.dumps(figures.figure(picture), allow_nan=False)


def test_ranges_are_kept_as_given_unless_an_axis_cannot_have_them():
    def shown(axis):
        return figures.figure(pictures.Curves("", axis, axis, ()))["x"]["range"]

    assert shown(pictures.Axis("", log=True, range=(1e-3, 250.0))) == [1e-3, 250.0]
    assert shown(pictures.Axis("", log=True, range=(0.0, 250.0))) is None
    assert shown(pictures.Axis("", range=(0.0, math.inf))) is None
    assert shown(pictures.Axis("")) is None


@pytest.mark.parametrize("log", [False, True])
def test_a_long_line_is_thinned_but_keeps_its_ends_and_spikes(log):
    x = np.arange(1.0, 1e5)
    y, others = np.ones_like(x), np.ones((3, len(x)))
    y[70_000], others[2, 300], others[1, 50_000] = 9.0, -4.0, np.nan
    axis = pictures.Axis("", log=log)
    curve = pictures.Curve("iBLR", x, y, others=others)
    thin = figures.figure(pictures.Curves("", axis, pictures.Axis(""), (curve,)))["curves"][0]
    assert len(thin["x"]) < 4000 and thin["x"][0] == 1 and thin["x"][-1] == 99_999
    assert 9 in thin["y"] and -4 in thin["others"][2]
    assert {len(line) for line in (thin["x"], thin["y"], *thin["others"])} == {len(thin["x"])}


def test_levels_hold_the_mass_they_should():
    x = np.linspace(-5, 5, 401)
    density = np.exp(-0.5 * (x[:, None] ** 2 + x[None, :] ** 2))
    radii = -np.log(figures.levels(x, x, density))  # r^2 / 2 of a standard Gaussian
    np.testing.assert_allclose(1 - np.exp(-radii), figures.MASSES, atol=2e-3)


@pytest.mark.parametrize("value", [0.0, 1.0, np.nan, np.inf])
def test_a_density_without_contours_is_drawn_without(value):
    x = np.linspace(0, 1, 4)
    assert figures.levels(x, x, np.full((4, 4), value)) == ()


def test_levels_of_what_is_no_density_are_evenly_spaced():
    x = np.linspace(0, 1, 4)
    levels = figures.levels(x, x, np.linspace(-8, 0, 16).reshape(4, 4))
    np.testing.assert_allclose(np.diff(levels), 1.0)


def test_an_ellipse_is_at_mahalanobis_distance_one():
    covariance = np.array([[2.0, 0.7], [0.7, 1.0]])
    grid = np.linspace(0, 1, 3)
    ellipse = pictures.Ellipse("iBLR", np.array([1.0, -1.0]), covariance)
    drawn = figures.figure(pictures.Plane("", grid, grid, np.eye(3), (ellipse,)))["ellipses"][0]
    gaps = np.array([drawn["x"], drawn["y"]]) - np.array([[1.0], [-1.0]])
    np.testing.assert_allclose((gaps * np.linalg.solve(covariance, gaps)).sum(0), 1, atol=1e-3)


def test_a_name_looks_the_same_everywhere():
    made = strokes.strokes(
        ["VOGN", "new", "iBLR", "iBLR (Hess)", "iBLR (published)", "newer", "iBLR"]
    )
    assert made["iBLR"] == made["iBLR (published)"]
    assert made["iBLR"].strong and not made["VOGN"].strong
    assert made["iBLR (Hess)"].hue == "iblr" and made["iBLR (Hess)"].dash != made["iBLR"].dash
    assert made["new"].hue != made["newer"].hue
    assert strokes.strokes(["BLR", "VOGN"])["VOGN"] == made["VOGN"]


def test_the_first_names_all_look_different():
    many = strokes.strokes([f"method{n}" for n in range(16)] + [f"iBLR t={n}" for n in range(8)])
    assert len(set(many.values())) == 24


def test_every_hue_has_a_colour_in_both_themes():
    css = files(report).joinpath("page.css").read_text(encoding="utf-8")
    for hue in {*strokes.FAMILIES.values(), *strokes.FREE} - {"ink"}:
        assert re.search(rf"--hue-{hue}: light-dark\(#\w{{6}}, #\w{{6}}\)", css), hue


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return np.dot(linear, (0.2126, 0.7152, 0.0722))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_and_lines_can_be_told_from_the_ground(theme):
    css = files(report).joinpath("page.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colours = {name: pair[theme] for name, *pair in found}
    for name in ("ink", "muted", "link"):
        assert contrast(colours[name], colours["ground"]) >= 4.5, name
        assert contrast(colours[name], colours["raised"]) >= 4.5, name
    for name in ("good", "bad", "open"):
        assert contrast(colours[name], colours[f"{name}-ground"]) >= 4.5, name
    for name in colours:
        if name.startswith("hue-"):
            assert contrast(colours[name], colours["ground"]) >= 3, name


def test_words_in_an_attribute_are_read_as_they_were(page, made):
    labels = [html.unescape(a["aria-label"]) for _, a in page.tags if a.get("role") == "img"]
    assert any(made[0].section.pictures[0].title in label for label in labels)

"""The report in a browser: everything is drawn, nothing is asked of the network, controls work.

Run by `make test-report`. Screenshots are left in the folder that IBLR_SCREENSHOTS names, or in
pytest's temporary one. If IBLR_REPORT names a folder of results, the page written from them is
tested as well.
"""

import os
import shutil
from pathlib import Path

import pytest
import report_results

from iblr.reproduce import report, results

pytestmark = pytest.mark.browser

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
REAL = os.environ.get("IBLR_REPORT")


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def shots(tmp_path_factory):
    chosen = os.environ.get("IBLR_SCREENSHOTS")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    """The page of results made up for it, written from files."""
    folder = tmp_path_factory.mktemp("made-up")
    made = report_results.all_results()
    for one in made:
        results.save(folder, one)
    return report.write(folder, results.load_all(folder, [one.experiment for one in made])[0])


@pytest.fixture(scope="session", params=["made up", *(["real"] if REAL else [])])
def path(request, made_up, tmp_path_factory):
    """Both pages; the real one is written anew elsewhere, so that its folder stays as it is."""
    if request.param == "made up":
        return made_up
    source, folder = Path(REAL), tmp_path_factory.mktemp("real")
    names = sorted(file.stem for file in source.glob("*.json"))
    assert names, f"IBLR_REPORT={REAL} has no results"
    for name in names:
        for ending in ("json", "npz"):
            shutil.copy(source / f"{name}.{ending}", folder)
    return report.write(folder, results.load_all(folder, names)[0])


@pytest.fixture
def visit(browser):
    """Opens a page; at the end, nothing may have gone wrong and nothing else been asked for."""
    contexts, problems, asked = [], [], []

    def opened(path, viewport=WIDE, query="", **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri() + query)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
    allowed = {"file", "data", "blob"}
    assert {url.split(":")[0] for url in asked} <= allowed
    assert {url.split("?")[0].rsplit("/", 1)[-1] for url in asked if url.startswith("file")} <= {
        "index.html"
    }


UNDRAWN = """() => [...document.querySelectorAll(".plot")]
  .filter((plot) => !plot.parentElement.hidden)
  .filter((plot) => !plot.querySelector("svg.main-svg")
                 || !plot.querySelector(".scatterlayer .trace, .contourlayer .contour"))
  .map((plot) => plot.closest("figure").id + ": " + plot.ariaLabel)"""
HANGING_OVER = """() => [...document.querySelectorAll("body *")]
  .filter((one) => !one.closest(".scrolling, .hidden, .skip, thead, svg"))
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.tagName + "." + one.className)"""


def eventually(page, expression):
    """Waits until it is true; the page's policy forbids Playwright's own way, which is an eval."""
    for _ in range(50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never true: {expression}")


def scrolls_sideways(page):
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_is_drawn(visit, path, shots, scheme):
    page = visit(path, query="?all", color_scheme=scheme)
    assert page.evaluate(UNDRAWN) == []
    assert page.locator("html").get_attribute("data-theme") == scheme
    page.wait_for_timeout(300)
    page.screenshot(path=shots / f"{path.parent.name}-{scheme}.png", full_page=True)


def test_a_phone_shows_everything_without_scrolling_sideways(visit, path, shots):
    page = visit(path, PHONE, is_mobile=True, has_touch=True)
    page.evaluate("renderAll()")
    assert page.evaluate(UNDRAWN) == []
    assert not scrolls_sideways(page)
    assert page.evaluate(HANGING_OVER) == []
    page.wait_for_timeout(300)
    page.screenshot(path=shots / f"{path.parent.name}-phone.png", full_page=True)


def test_no_width_makes_the_page_scroll_sideways(visit, path):
    page = visit(path, query="?all")
    for width in (320, 600, 760, 780, 900, 1080, 1100, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(200)
        assert not scrolls_sideways(page), width


def test_pictures_wait_until_they_are_in_view(visit, made_up):
    page = visit(made_up)
    last = page.locator("figure.marginals")
    assert last.locator("svg.main-svg").count() == 0
    last.scroll_into_view_if_needed()
    last.locator("svg.main-svg").first.wait_for()


def test_the_legend_hides_and_shows_a_method_with_its_band_and_seeds(visit, made_up):
    page = visit(made_up, query="?all")
    figure = page.locator("figure.curves").first
    button = figure.get_by_role("button", name="iBLR", exact=True)
    traces = figure.locator(".scatterlayer .trace")
    before = traces.count()
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert traces.count() == before - 3  # line, band and single seeds
    button.click()
    assert traces.count() == before
    button.dblclick()
    assert traces.count() == 3
    button.dblclick()
    assert traces.count() == before


def test_the_legend_tells_names_as_they_are(visit, made_up):
    page = visit(made_up, query="?all")
    assert page.get_by_role("button", name="BLR, t < 1 & no search").count() == 1
    labels = page.locator("figure.curves").first.locator(".xtitle, .ytitle").all_text_contents()
    assert labels == ["iterations", "‖mean − optimum‖"]


def test_axes_are_exactly_what_was_asked_for(visit, made_up):
    page = visit(made_up, query="?all")
    shown = page.evaluate(
        "(({xaxis, yaxis}) => [xaxis.type, ...xaxis.range, ...yaxis.range])"
        "(document.querySelector('figure.curves .plot')._fullLayout)"
    )
    assert shown == ["log", 0, 5, -3, 3]


def test_a_zoom_outlives_legend_and_theme(visit, made_up):
    page = visit(made_up, query="?all")
    figure = page.locator("figure.curves").first
    figure.locator(".plot").evaluate("(plot) => plot.scrollIntoView({behavior: 'instant'})")
    box = figure.locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 250, steps=5)
    page.mouse.up()
    shown = "document.querySelector('figure.curves .plot')._fullLayout.xaxis.range"
    eventually(page, f"{shown}[0] > 0.5")
    zoomed = page.evaluate(shown)
    figure.get_by_role("button", name="VOGN", exact=True).click()
    page.locator("#theme").click()
    assert page.evaluate(shown) == zoomed


def test_a_method_has_one_colour_in_all_pictures(visit, made_up):
    page = visit(made_up, query="?all")
    colours = page.evaluate(
        "() => [...new Set([...document.querySelectorAll('.plot')].flatMap((plot) => plot.data)"
        ".filter((trace) => trace.name === 'iBLR' && trace.mode === 'lines' && trace.line.color)"
        ".map((trace) => trace.line.color))]"
    )
    assert len(colours) == 1


def test_contours_are_where_the_levels_are(visit, made_up):
    page = visit(made_up, query="?all")
    low, high = page.evaluate(
        """() => {
          const figure = document.querySelector("figure.gallery");
          const data = document.getElementById(figure.id + "-data").textContent;
          const { levels, exact } = JSON.parse(data);
          const { z } = figure.querySelector(".plot").data[0];
          const count = (rows, above) => rows.flat().filter((value) => value > above).length;
          return [levels.map((level) => count(exact, level)), levels.map((_, i) => count(z, i))];
        }"""
    )
    assert low == high and len(set(low)) == len(low)


def test_the_slider_of_a_gallery_chooses_the_approximation(visit, made_up):
    page = visit(made_up, query="?all")
    figure = page.locator("figure.gallery")
    slider, caption = figure.get_by_role("slider"), figure.locator(".chosen-caption")
    assert caption.inner_text().startswith("K = 8")
    before = figure.locator(".plot.chosen .contourlayer").inner_html()
    slider.focus()
    page.keyboard.press("Home")
    assert caption.inner_text().startswith("K = 1")
    assert slider.get_attribute("aria-valuetext") == "K = 1"
    assert figure.locator(".plot.chosen .contourlayer").inner_html() != before
    assert figure.locator(".panels li").count() == 9


def test_the_slider_of_marginals_pages_through_all_coordinates(visit, made_up):
    page = visit(made_up, query="?all")
    figure = page.locator("figure.marginals")
    slider = figure.get_by_role("slider")
    titles = figure.locator(".panel-title:visible")
    seen = titles.all_inner_texts()
    slider.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        seen += titles.all_inner_texts()
    assert seen == [f"Coordinate {n}" for n in range(1, 21)]
    assert figure.locator("output").inner_text() == "19 to 20 of 20"
    page.keyboard.press("Home")
    assert titles.count() == 9


def test_the_theme_can_be_chosen_is_remembered_and_recolours_pictures(visit, made_up):
    page = visit(made_up, query="?all", color_scheme="light")
    line = "document.querySelector('figure.curves .plot').data[0].line.color"
    text = "document.querySelector('figure.curves .plot').layout.font.color"
    before, ground = (
        page.evaluate(f"[{line}, {text}]"),
        page.locator("body").evaluate("(body) => getComputedStyle(body).backgroundColor"),
    )
    page.get_by_role("button", name="Use the dark theme").click()
    assert page.evaluate(f"[{line}, {text}]") != before
    assert ground != page.locator("body").evaluate("(b) => getComputedStyle(b).backgroundColor")
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.get_by_role("button", name="Use the light theme").click()
    page.emulate_media(color_scheme="dark")  # what the system has is followed again
    eventually(page, "document.documentElement.dataset.theme === 'dark'")


def test_a_narrower_window_redraws_the_pictures(visit, made_up):
    page = visit(made_up, query="?all")
    page.set_viewport_size(PHONE)
    eventually(page, "document.querySelector('figure.curves .plot svg').clientWidth < 360")
    assert not scrolls_sideways(page)


def test_paper_gets_everything_in_the_light_theme(visit, path, shots):
    page = visit(path, color_scheme="dark")
    page.evaluate(
        "addEventListener('beforeprint', () => { window.printed = "
        f"[document.documentElement.dataset.theme, ({UNDRAWN})()]; }})"
    )
    page.pdf(path=shots / f"{path.parent.name}.pdf", format="A4")
    assert page.evaluate("window.printed") == ["light", []]
    eventually(page, "document.documentElement.dataset.theme === 'dark'")


def test_without_scripts_the_texts_are_there(browser, path):
    # The flag, unlike an option of the context, makes the parser read what is in <noscript>.
    flags = [*FLAGS, "--blink-settings=scriptEnabled=false"]
    scriptless = browser.browser_type.launch(executable_path=CHROMIUM, args=flags)
    try:
        page = scriptless.new_page()
        page.goto(path.as_uri())
        assert page.locator("noscript p").is_visible()
        assert page.get_by_role("table").first.is_visible()
        assert page.get_by_role("heading", level=2).last.is_visible()
        assert page.get_by_role("button").count() == 0  # which would do nothing
    finally:
        scriptless.close()


def test_every_link_within_the_page_leads_somewhere(visit, path):
    page = visit(path)
    assert (
        page.evaluate(
            "() => [...document.querySelectorAll('a[href^=\"#\"]')]"
            ".filter((link) => !document.getElementById(link.hash.slice(1))).length"
        )
        == 0
    )

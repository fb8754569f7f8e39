"""The report page in headless Chromium, driven by Playwright. Every test fails if the page logs or loads anything."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rkr.report import summary_json
from rkr.report.html import write_report
from rkr.report.looks import look_of
from rkr.report.scan import scan

api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("Chromium is not installed", allow_module_level=True)

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ISOLATED = [[0.8], [0.8, 0.7], [0.8, 0.7, 0.6]]
NASTY = "<script>alert(1)</script>\"'"
LOCAL = ("file:", "blob:", "data:", "about:")
ROWS = "table => [...table.rows].filter(r => !r.hidden).map(r => [...r.cells].map(c => c.textContent.trim()))"

Show = Callable[..., "api.Page"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[api.Browser]:
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=60_000)
        except api.Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def show(chromium: api.Browser) -> Iterator[Show]:
    """Open a report from disk in a fresh profile. Console messages, dialogs and network requests fail the test."""
    complaints: list[str] = []
    contexts = []

    def dismiss(dialog: api.Dialog) -> None:
        complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def opened(report: Path, width: int = 1200, scheme: str = "light") -> api.Page:
        viewport = {"width": width, "height": 900}
        context = chromium.new_context(viewport=viewport, color_scheme=scheme, is_mobile=width < 500)
        contexts.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("dialog", dismiss)
        page.on("request", lambda asked: asked.url.startswith(LOCAL) or complaints.append(f"request: {asked.url}"))
        page.goto(report.absolute().as_uri())
        page.locator("html[data-ready]").wait_for(state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def report(run_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """Three methods in two orders, one with a name that contains markup, and one unfinished run."""
    worse = [[0.9], [0.7, 0.8], [0.5, 0.7, 0.9]]
    run_folder(method="ewc", order="A")
    run_folder(worse, method="ewc", order="B")
    for order in "AB":
        run_folder(ISOLATED, method="rkr", order=order, isolated=True)
        run_folder([[0.66625], [0.66625] * 2, [0.66625] * 3], method=NASTY, order=order, isolated=True)
    run_folder([[0.5], [0.5, 0.6]], tasks=3, method="rkr", order="C", isolated=True)
    return write_report([tmp_path / "runs"], tmp_path / "report", figures=False).page


def table(page: api.Page, selector: str) -> list[list[str]]:
    """The text of every visible cell."""
    found: list[list[str]] = page.locator(selector).first.evaluate(ROWS)
    return found


def texts(page: api.Page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_text_contents()]


def marks(page: api.Page) -> dict[str, int]:
    return {chart: page.locator(f"[data-chart={chart}] .mark").count() for chart in ("over", "tradeoff", "orders")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_nothing_is_loaded(show: Show, report: Path, scheme: str) -> None:
    page = show(report, scheme=scheme)
    assert page.locator("figure[data-chart]").count() == page.locator(".plot > svg[role=img]").count() == 7


@pytest.mark.parametrize("width", [360, 1200])
def test_searches(
    show: Show, run_folder: Callable[..., Path], write_search: Callable[..., Path], tmp_path: Path, width: int
) -> None:
    run_folder(ISOLATED, method="ewc-strength-1")
    write_search()
    write_search("search-1", sampler="random", importance={})
    page = show(write_report([tmp_path / "runs"], tmp_path / "report", figures=False).page, width=width)
    assert page.locator("[data-chart=search] svg .mark").count() == 2 * 3 + 2  # and in the legend
    assert page.locator("[data-chart=search] svg path.line").count() == 2
    assert table(page, "[data-chart=search] table")[-2:] == [
        ["ewc, tpe, seed 0", "2", "strength = 10, bn = shared", "–", "33.50"],
        ["ewc, tpe, seed 0", "3", "strength = 100, bn = shared", "50.00", "50.00"],
    ]
    assert table(page, "[data-chart=importance] table")[1:] == [
        ["ewc, tpe, seed 0", "strength", "75.0"],
        ["ewc, tpe, seed 0", "bn", "25.0"],
    ]
    assert page.locator("[data-chart=importance] svg .bar").count() == 2


def test_complaints_are_noticed(chromium: api.Browser, tmp_path: Path) -> None:
    """The check that every other test relies on: scripts that the page did not come with are refused and logged."""
    report = tmp_path / "page.html"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    report.write_text(f"<!DOCTYPE html><title>x</title>{policy}<script>alert(1)</script>")
    page = chromium.new_page()
    logged: list[str] = []
    page.on("console", lambda message: logged.append(message.text))
    page.goto(report.as_uri())
    page.close()
    assert len(logged) == 1
    assert "Content Security Policy" in logged[0]


def test_the_tables_have_the_numbers_of_the_runs(show: Show, report: Path, tmp_path: Path) -> None:
    page = show(report)
    header, *rows = table(page, "[data-table=headline]")
    shown = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    summary = summary_json(scan(tmp_path / "runs").results)
    assert len(summary["methods"]) == 3
    for method in summary["methods"]:
        accuracy = method["accuracy"]
        expected = f"{accuracy['mean']:.2f} ± {accuracy['half_width']:.2f}"
        assert shown[method["method"]]["accuracy"] == expected
    assert shown["ewc"]["accuracy"] == "73.33 ± 42.35"
    assert shown[NASTY]["accuracy"] == "66.62 ± 0.00"  # exactly between 66.62 and 66.63: rounds to even
    assert shown["rkr C, unfinished"]["accuracy"] == "2 of 3 tasks"
    values = {(row[0], row[1]): row[2:] for row in table(page, "[data-chart=over] table")}
    assert values[("ewc", "3 toy-3")] == ["73.33", "42.35"]
    assert values[(NASTY, "3 toy-3")] == ["66.62", "0.00"]
    assert values[("rkr C, unfinished", "2 toy-2")] == ["55.00", "–"]
    assert table(page, "[data-chart=forgetting] table")[1] == [NASTY, "0.00", "0.00", "0.00", "0.00", "2"]
    assert table(page, "[data-chart=cost] table")[3] == [NASTY, "3 toy-3", "103.00", "+1.00", "7 kB", "+1 kB"]
    assert page.locator("#recipe-0 [data-proof] .same").first.text_content() == "✓ same"


def test_markup_in_names_is_shown_as_text(show: Show, report: Path) -> None:
    page = show(report)
    assert NASTY in texts(page, "[data-switch]")
    assert page.locator("script").count() == 2


def test_a_method_is_switched_off_and_on(show: Show, report: Path) -> None:
    page = show(report)
    before = marks(page)
    assert page.locator("[data-chart=over] .line").count() == 4  # three methods and the unfinished run
    assert page.locator("[data-chart=over] .band").count() == 0  # no method has three runs
    assert page.locator("[data-chart=during] .bar").count() == 3 * 2 * 3
    assert page.locator("[data-chart=forgetting] .bar").count() == 3
    switch = page.get_by_role("button", name="rkr", exact=True)
    switch.focus()
    page.keyboard.press("Enter")
    assert switch.get_attribute("aria-pressed") == "false"
    assert page.locator("[data-chart=over] .line").count() == 2
    assert page.locator("[data-chart=during] .bar").count() == 2 * 2 * 3
    assert page.locator("[data-chart=forgetting] .bar").count() == 2
    for chart, left in marks(page).items():
        assert left < before[chart]
    for name in ("[data-table=headline]", "[data-table=runs]", "[data-table=proofs]", "[data-chart=over] table"):
        assert {row[0] for row in table(page, name)[1:]} == {"ewc", NASTY}
    assert page.locator("[data-chart=matrix] select").first.locator("option").count() == 2
    page.locator("[data-none]").click()
    assert page.locator("[data-chart=over] .line").count() == page.locator("[data-chart=matrix] .cell").count() == 0
    page.locator("[data-all]").click()
    assert page.locator("[data-chart=over] .line").count() == 4
    assert marks(page) == before


def test_the_matrix_of_a_chosen_run(show: Show, report: Path) -> None:
    page = show(report)
    cells = page.locator("[data-chart=matrix] .cell")
    assert cells.count() == 6
    method, run = page.locator("[data-chart=matrix] select").all()
    method.select_option(label="ewc")
    run.select_option(label="order B")
    assert table(page, "[data-chart=matrix] table")[3] == ["3 toy-3", "50.0", "70.0", "90.0", "70.0"]
    run.select_option(label="mean of 2 runs")
    assert table(page, "[data-chart=matrix] table")[3] == ["3 toy-3", "55.0", "72.5", "92.5", "73.3"]
    method.select_option(label="rkr")
    run.select_option(label="order C (2 of 3 tasks)")
    assert cells.count() == 3


def test_headers_sort(show: Show, report: Path) -> None:
    page = show(report)
    buttons = page.locator("[data-table=headline] th button")
    accuracy = buttons.nth(2)
    assert accuracy.text_content() == "accuracy"
    accuracy.focus()
    page.keyboard.press("Enter")
    assert [row[0] for row in table(page, "[data-table=headline]")[1:]] == ["ewc", "rkr", NASTY, "rkr C, unfinished"]
    assert accuracy.locator("..").get_attribute("aria-sort") == "descending"
    accuracy.click()
    assert [row[0] for row in table(page, "[data-table=headline]")[1:]] == [NASTY, "rkr", "ewc", "rkr C, unfinished"]
    buttons.first.click()
    assert page.locator("[data-table=headline] [aria-sort]").count() == 1


def test_values_by_pointer_and_by_keyboard(show: Show, report: Path) -> None:
    page = show(report)
    chart = page.locator("[data-chart=during]")
    tip, said, bar = chart.locator(".tip"), chart.locator(".said"), chart.locator(".bar").first
    assert tip.is_hidden()
    box = bar.bounding_box()
    assert box is not None
    bar.hover(position={"x": box["width"] / 2, "y": 8})
    assert tip.text_content() == f"{NASTY}, task 1 toy-1\nright after learning: 66.62 ± 0.00 %"
    page.mouse.move(1, 1)
    assert tip.is_hidden()
    chart.locator("[data-save=csv]").focus()
    page.keyboard.press("Tab")
    assert chart.locator(".plot:focus").count() == 1
    page.keyboard.press("ArrowRight")
    assert said.text_content() == f"{NASTY}, task 2 toy-2, right after learning: 66.62 ± 0.00 %"
    page.keyboard.press("End")
    assert said.text_content() == "rkr, task 3 toy-3, after all tasks: 60.00 ± 0.00 %"
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_charts_are_saved_from_a_page_on_disk(show: Show, report: Path) -> None:
    page = show(report, scheme="dark")
    saved = {}
    for kind in ("csv", "svg"):
        with page.expect_download() as waiting:
            page.locator(f"[data-chart=over] [data-save={kind}]").click()
        assert waiting.value.suggested_filename == f"toy-over.{kind}"
        saved[kind] = Path(waiting.value.path()).read_bytes()
    rows = list(csv.reader(io.StringIO(saved["csv"].decode("utf-8-sig"))))
    assert rows[0] == ["method", "after task", "mean in %", "± 95 %"]
    assert rows[1] == [NASTY, "1 toy-1", "66.625", "0"]
    assert len(rows) == 1 + 3 * 3 + 2
    text = saved["svg"].decode()
    assert "var(" not in text
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    names = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"ewc", "rkr", NASTY, "tasks learned"} <= names


def test_light_and_dark(show: Show, report: Path) -> None:
    def lightness(page: api.Page) -> float:
        colour = "body => getComputedStyle(body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
        return sum(page.locator("body").evaluate(colour)) / 3

    assert lightness(show(report, scheme="light")) > 200
    page = show(report, scheme="dark")
    assert lightness(page) < 60
    button = page.locator("#theme")
    assert button.text_content() == "Light mode"  # what it switches to
    button.click()
    assert lightness(page) > 200
    assert button.text_content() == "Dark mode"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_to_the_side(show: Show, report: Path, scheme: str) -> None:
    page = show(report, width=360, scheme=scheme)
    page.locator("details").evaluate_all("all => all.forEach(details => { details.open = true })")
    assert page.evaluate("[innerWidth, document.documentElement.scrollWidth, document.body.scrollWidth]") == [360] * 3
    widths = page.locator(".plot > svg").evaluate_all("all => all.map(svg => svg.getBoundingClientRect().width)")
    assert len(widths) == 7
    assert all(260 <= width <= 360 for width in widths)


def test_printing_opens_everything(show: Show, report: Path) -> None:
    page = show(report)
    closed = page.locator("details:not([open])").count()
    assert closed > 7
    shut = "document.querySelectorAll('details:not([open])').length"
    page.evaluate(f"() => addEventListener('beforeprint', () => {{ window.shut = {shut} }})")
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("window.shut") == 0
    assert page.locator("details:not([open])").count() == closed


def test_charts_are_described_for_screen_readers(show: Show, report: Path) -> None:
    page = show(report)
    for name in ("title", "desc"):
        found = texts(page, f".plot > svg > {name}")
        assert len(found) == 7
        assert all(len(text) > 10 for text in found)
    described = "all => all.flatMap(svg => svg.getAttribute('aria-labelledby').split(' '))"
    ids = page.locator(".plot > svg").evaluate_all(described)
    assert len(ids) == 2 * 7
    assert all(page.locator(f"#{id_}").count() == 1 for id_ in ids)
    assert all(texts(page, "button"))
    dashes = page.locator("[data-chart=over] .line").evaluate_all(
        "all => all.map(line => line.getAttribute('stroke-dasharray'))"
    )
    looks = [look_of(name) for name in ("rkr", "ewc", NASTY)]
    assert len(set(dashes)) == len({look.dashes for look in looks}) > 1  # methods differ in more than colour
    assert len({look.marker for look in looks}) == 3


def test_zero_shot_tasks(show: Show, run_folder: Callable[..., Path], tmp_path: Path) -> None:
    for seed in (0, 1):
        run_folder(ISOLATED, method="rkr", order="fixed", zero_shot=True, seed=seed, isolated=True)
        run_folder([[0.5], [0.4, 0.5], [0.3, 0.4, 0.5]], method="sft", order="fixed", zero_shot=True, seed=seed)
    page = show(write_report([tmp_path / "runs"], tmp_path / "report", figures=False).page)
    assert page.locator("[data-chart=zero] .bar").count() == 2 * 3 * 3
    rows = table(page, "[data-chart=zero] table")
    assert rows[0] == ["method", *(f"toy-{i} {name}" for i in (1, 2, 3) for name in "USH")]
    assert rows[1][:4] == ["rkr", "70.00 ± 0.00", "85.00 ± 0.00", "80.00 ± 0.00"]
    assert rows[2][:4] == ["sft", "20.00 ± 0.00", "35.00 ± 0.00", "30.00 ± 0.00"]


def test_the_committed_results(show: Show, tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "results"
    page = show(write_report([results], tmp_path, figures=False).page)
    last = json.loads((results / "digits" / "rkr" / "fixed" / "results.jsonl").read_text().splitlines()[-2])
    place = texts(page, "h2").index("digits")
    (rkr,) = [row for row in table(page, f"#recipe-{place} [data-table=headline]") if row[0] == "rkr"]
    assert rkr[2] == f"{100 * sum(last['accuracy']) / 5:.2f}"

"""The page in headless Chromium, driven by Playwright, on a real server.

Every test fails if the page logs anything or loads anything from elsewhere.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.pictures import draw_classes
from helpers.servers import Served, served
from helpers.waiting import until
from helpers.zoos import CLASSES, make_zoo, picture

from rkr.pictures.zoo import open_zoo

api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("Chromium is not installed", allow_module_level=True)

ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
DROP = """([zone, files]) => {
  const data = new DataTransfer();
  for (const [name, text] of files) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    data.items.add(new File([bytes], name, { type: "image/png" }));
  }
  const event = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
  document.querySelector(zone).dispatchEvent(event);
}"""
Open = Callable[..., "api.Page"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[api.Browser]:
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=60_000)
        except api.Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    folder = tmp_path_factory.mktemp("page") / "zoo"
    make_zoo(folder)
    with served(folder, "--allow-changes", "--max-batch", "1") as found:
        yield found, folder


@pytest.fixture
def show(chromium: api.Browser) -> Iterator[Open]:
    complaints: list[str] = []
    contexts = []

    def opened(url: str, width: int = 1200, scheme: str = "light", expected: str = "$^") -> api.Page:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, is_mobile=width < 500
        )
        contexts.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("console", lambda said: re.search(expected, said.text) or complaints.append(f"console: {said.text}"))
        page.on("dialog", lambda dialog: dialog.accept())
        page.on("request", lambda asked: asked.url.startswith((url, "blob:", "data:")) or complaints.append(asked.url))
        page.goto(url)
        page.locator("html[data-ready]").wait_for(state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def drop(page: api.Page, files: list[tuple[str, bytes]]) -> None:
    page.evaluate(DROP, ["#drop", [(name, base64.b64encode(data).decode()) for name, data in files]])


def answers(page: api.Page) -> list[dict[str, float]]:
    page.locator("#answers article [data-probabilities]").first.wait_for()
    text = page.locator("#answers article [data-probabilities]").first.get_attribute("data-probabilities")
    return json.loads(text or "[]")


def test_a_picture_is_dropped_and_answered(show: Open, server: tuple[Served, Path], tmp_path: Path) -> None:
    found, folder = server
    data = picture(tmp_path)
    page = show(found.url, expected="422")
    page.locator("#task").select_option("birds")
    drop(page, [("a<b>.png", data)])
    (expected,) = open_zoo(folder, device="cpu").predict(data, task="birds", top=3)
    assert answers(page) == [
        {"class": c, "probability": p} for c, p in zip(expected.classes, expected.probabilities, strict=True)
    ]
    assert page.locator("#answers h3").text_content() == "a<b>.png"
    assert page.locator("#answers meter").count() == 3
    assert page.locator("#answers .task").text_content() == "Task: birds"
    shares = page.locator("#answers .share").all_text_contents()
    assert shares == [f"{100 * p:.1f} %" for p in expected.probabilities]
    page.locator("#task").select_option("auto")
    page.locator("#files").set_input_files(
        [{"name": f"{n}.png", "mimeType": "image/png", "buffer": picture(tmp_path, n)} for n in range(3)]
    )
    until(lambda: page.locator("#answers article .task").count() == 3)
    drop(page, [("broken.png", b"nothing")])
    page.locator("#answers .error").wait_for()
    assert "not a picture" in (page.locator("#answers .error").text_content() or "")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_it_fits_and_can_be_used_without_a_mouse(
    show: Open, server: tuple[Served, Path], width: int, scheme: str
) -> None:
    page = show(server[0].url, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    rows = page.locator("#tasks tbody tr").all()
    assert [row.locator("th").text_content() for row in rows] == list(CLASSES)
    assert page.locator("#tasks tbody tr td").nth(1).text_content() == "75.0 %"
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]
    assert (light[0] < light[1]) is (scheme == "light")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"task", "top", "files"} <= set(seen)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, button')].filter(e => !e.labels?.length && !e.ariaLabel && "
        "!e.textContent.trim()).map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_a_task_is_learned_from_the_page(show: Open, server: tuple[Served, Path], tmp_path: Path) -> None:
    """It answers afterwards, and earlier answers keep their bits."""
    found, _ = server
    data = picture(tmp_path)
    page = show(found.url)
    page.locator("#task").select_option("birds")
    drop(page, [("a.png", data)])
    before = answers(page)
    draw_classes(tmp_path / "colours", {"red": 12, "blue": 12})
    page.locator("#folder").set_input_files(str(tmp_path / "colours"))
    until(lambda: page.locator("#name").input_value() == "colours")
    assert page.locator("#chosen").text_content() == "24 pictures in 2 classes: blue, red"
    page.locator("#start").click()
    page.locator("#jobs li[data-state=learned]").wait_for(timeout=120_000)
    page.locator("#task option[value=colours]").wait_for(state="attached")
    page.locator("#task").select_option("colours")
    drop(page, [("a.png", data)])
    until(lambda: page.locator("#answers .task").all_text_contents() == ["Task: colours"])
    assert {one["class"] for one in answers(page)} == {"red", "blue"}
    page.locator("#task").select_option("birds")
    drop(page, [("a.png", data)])
    until(lambda: page.locator("#answers .task").all_text_contents() == ["Task: birds"])
    assert answers(page) == before
    until(lambda: float(page.locator("[data-live=batch_pictures]").text_content() or 0) == 1)
    page.get_by_role("button", name="Drop colours").click()
    until(lambda: "colours" not in [task["name"] for task in found.client().tasks()])


def test_the_token_is_asked_for(show: Open, tmp_path: Path) -> None:
    make_zoo(tmp_path / "zoo", ["birds"])
    token = tmp_path / "token"
    token.write_text("a-long-secret")
    token.chmod(0o600)
    with served(tmp_path / "zoo", "--token-file", str(token)) as found:
        page = show(found.url, expected="401")
        page.locator("#login").wait_for()
        page.locator("#token").fill("a-long-secret")
        page.keyboard.press("Enter")
        page.locator("#tasks tbody tr").wait_for()
        drop(page, [("a.png", picture(tmp_path))])
        until(lambda: page.locator("#answers .task").count() == 1)
        assert not page.locator("#learn").is_visible()
        page.context.close()  # before the server ends


def test_the_documentation_shows_every_route(show: Open, server: tuple[Served, Path], chromium: api.Browser) -> None:
    page = chromium.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text))
    page.goto(f"{server[0].url}/docs")
    routes = page.locator("article h3 code").all_text_contents()
    assert "POST /v1/predict" in routes
    assert "PUT /v1/tasks/{name}" in routes
    assert complaints == []
    page.close()

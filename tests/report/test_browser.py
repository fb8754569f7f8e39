"""The report page in a real browser: Chromium without a window, driven over its debugging protocol."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rkr.report import summary_json
from rkr.report.html import write_report
from rkr.report.scan import scan

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium on this machine", allow_module_level=True)
client = pytest.importorskip("websockets.sync.client", reason="needs the package websockets")

ISOLATED = [[0.8], [0.8, 0.7], [0.8, 0.7, 0.6]]
NASTY = "<script>alert(1)</script>\"'"
ENOUGH = 60  # seconds for one answer of the browser


class Browser:
    """One page of a Chromium of our own; what it logs, asks for and complains of is in `events`."""

    def __init__(self, folder: Path) -> None:
        arguments = ["--headless=new", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
        arguments += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command = [str(CHROMIUM), *arguments, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack = contextlib.ExitStack()
        self._session: str | None = None
        self._number = 0
        self.events: list[dict[str, Any]] = []
        try:
            port, path = self._listening(folder / "DevToolsActivePort")
            connection = client.connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None)
            self._socket = self._stack.enter_context(connection)
            target = self("Target.createTarget", url="about:blank")["targetId"]
            self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _listening(self, file: Path) -> list[str]:
        for _ in range(10 * ENOUGH):
            if file.exists() and len(lines := file.read_text().split()) == 2:
                return lines
            if self._process.poll() is not None:
                pytest.skip(f"Chromium does not start here: exit code {self._process.returncode}")
            time.sleep(0.1)
        raise TimeoutError("Chromium does not listen")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer: dict[str, Any] = json.loads(self._socket.recv(timeout=ENOUGH))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def js(self, expression: str) -> Any:
        answer = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        for _ in range(20 * ENOUGH):
            if self.js(expression):
                return
            time.sleep(0.05)
        raise TimeoutError(expression)

    def show(self, page: Path, width: int = 1200, scheme: str = "light") -> None:
        """Open a page from disk; the events are then those of this page alone."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self("Emulation.setDeviceMetricsOverride", **size)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.events.clear()
        self("Page.navigate", url=page.absolute().as_uri())
        self.wait("document.readyState === 'complete' && document.documentElement?.dataset.ready !== undefined")

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        codes = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "End": 35, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def complaints(self) -> list[Any]:
        """Errors and dialogs of the page, and whatever it asked the network for."""
        bad = [e for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")]
        bad += [e for e in self.events if e["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled")]
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return bad + [url for url in asked if not url.startswith(("file:", "blob:", "data:", "about:"))]

    def close(self) -> None:
        self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def page(run_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """Three methods in two orders, one of them with a name that would do harm; and a run that goes on."""
    worse = [[0.9], [0.7, 0.8], [0.5, 0.7, 0.9]]
    run_folder(method="ewc", order="A")
    run_folder(worse, method="ewc", order="B")
    for order in "AB":
        run_folder(ISOLATED, method="rkr", order=order, isolated=True)
        run_folder([[0.66625], [0.66625] * 2, [0.66625] * 3], method=NASTY, order=order, isolated=True)
    run_folder([[0.5], [0.5, 0.6]], tasks=3, method="rkr", order="C", isolated=True)
    return write_report([tmp_path / "runs"], tmp_path / "report", figures=False).page


def count(browser: Browser, selector: str) -> int:
    found: int = browser.js(f"document.querySelectorAll({json.dumps(selector)}).length")
    return found


def table(browser: Browser, selector: str) -> list[list[str]]:
    """The cells of a table that are not hidden."""
    rows = f"[...document.querySelector({json.dumps(selector)}).rows].filter(row => !row.hidden)"
    found: list[list[str]] = browser.js(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent.trim()))")
    return found


def test_nothing_goes_wrong_and_nothing_is_loaded(browser: Browser, page: Path) -> None:
    for scheme in ("light", "dark"):
        browser.show(page, scheme=scheme)
        assert browser.complaints() == []
        assert count(browser, "figure[data-chart]") == count(browser, ".plot > svg[role=img]") == 7


def test_the_tables_have_the_numbers_of_the_runs(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.show(page)
    header, *rows = table(browser, "[data-table=headline]")
    shown = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    summary = summary_json(scan(tmp_path / "runs").results)
    assert len(summary["methods"]) == 3
    for method in summary["methods"]:
        accuracy = method["accuracy"]
        expected = f"{accuracy['mean']:.2f} ± {accuracy['half_width']:.2f}"
        assert shown[method["method"]]["accuracy"] == expected
    assert shown["ewc"]["accuracy"] == "73.33 ± 42.35"
    assert shown[NASTY]["accuracy"] == "66.62 ± 0.00"  # exactly between 66.62 and 66.63: to the even one
    assert shown["rkr C, unfinished"]["accuracy"] == "2 of 3 tasks"
    values = {(row[0], row[1]): row[2:] for row in table(browser, "[data-chart=over] table")}
    assert values[("ewc", "3 toy-3")] == ["73.33", "42.35"]
    assert values[(NASTY, "3 toy-3")] == ["66.62", "0.00"]
    assert values[("rkr C, unfinished", "2 toy-2")] == ["55.00", "–"]
    assert table(browser, "[data-chart=forgetting] table")[1] == [NASTY, "0.00", "0.00", "0.00", "0.00", "2"]
    assert table(browser, "[data-chart=cost] table")[3] == [NASTY, "3 toy-3", "103.00", "+1.00", "7 kB", "+1 kB"]
    assert browser.js("document.querySelector('#recipe-0 [data-proof] .same').textContent") == "✓ same"


def test_names_are_shown_and_do_nothing(browser: Browser, page: Path) -> None:
    browser.show(page)
    assert NASTY in browser.js("[...document.querySelectorAll('[data-switch]')].map(b => b.textContent.trim())")
    assert count(browser, "script") == 2
    assert browser.complaints() == []


def test_a_method_is_switched_off_and_on(browser: Browser, page: Path) -> None:
    browser.show(page)
    marks = {chart: count(browser, f"[data-chart={chart}] .mark") for chart in ("over", "tradeoff", "orders")}
    assert count(browser, "[data-chart=over] .line") == 4  # three methods and a run that goes on
    assert count(browser, "[data-chart=over] .band") == 0  # no method has three runs
    assert count(browser, "[data-chart=during] .bar") == 3 * 2 * 3
    assert count(browser, "[data-chart=forgetting] .bar") == 3
    rkr = "[...document.querySelectorAll('[data-switch]')].find(b => b.textContent.trim() === 'rkr')"
    browser.js(f"{rkr}.focus()")
    browser.press("Enter")
    assert browser.js(f"{rkr}.getAttribute('aria-pressed')") == "false"
    assert count(browser, "[data-chart=over] .line") == 2
    assert count(browser, "[data-chart=during] .bar") == 2 * 2 * 3
    assert count(browser, "[data-chart=forgetting] .bar") == 2
    for chart, before in marks.items():
        assert count(browser, f"[data-chart={chart}] .mark") < before
    for name in ("[data-table=headline]", "[data-table=runs]", "[data-table=proofs]", "[data-chart=over] table"):
        assert {row[0] for row in table(browser, name)[1:]} == {"ewc", NASTY}
    assert browser.js("[...document.querySelector('[data-chart=matrix] select').options].length") == 2
    browser.js("document.querySelector('[data-none]').click()")
    assert count(browser, "[data-chart=over] .line") == count(browser, "[data-chart=matrix] .cell") == 0
    browser.js("document.querySelector('[data-all]').click()")
    assert count(browser, "[data-chart=over] .line") == 4
    assert {chart: count(browser, f"[data-chart={chart}] .mark") for chart in marks} == marks
    assert browser.complaints() == []


def test_the_matrix_of_a_chosen_run(browser: Browser, page: Path) -> None:
    browser.show(page)
    assert count(browser, "[data-chart=matrix] .cell") == 6

    def choose(place: int, value: str) -> None:
        select = f"document.querySelectorAll('[data-chart=matrix] select')[{place}]"
        option = f"[...{select}.options].find(o => o.textContent.startsWith({json.dumps(value)})).value"
        browser.js(f"{select}.value = {option}; {select}.dispatchEvent(new Event('change'))")

    choose(0, "ewc")
    choose(1, "order B")
    assert table(browser, "[data-chart=matrix] table")[3] == ["3 toy-3", "50.0", "70.0", "90.0", "70.0"]
    choose(1, "mean of 2 runs")
    assert table(browser, "[data-chart=matrix] table")[3] == ["3 toy-3", "55.0", "72.5", "92.5", "73.3"]
    choose(0, "rkr")
    choose(1, "order C (2 of 3 tasks)")
    assert count(browser, "[data-chart=matrix] .cell") == 3


def test_headers_sort(browser: Browser, page: Path) -> None:
    browser.show(page)
    header = "document.querySelectorAll('[data-table=headline] th button')[2]"
    assert browser.js(f"{header}.textContent") == "accuracy"
    browser.js(f"{header}.focus()")
    browser.press("Enter")
    assert [row[0] for row in table(browser, "[data-table=headline]")[1:]] == ["ewc", "rkr", NASTY, "rkr C, unfinished"]
    assert browser.js(f"{header}.parentNode.getAttribute('aria-sort')") == "descending"
    browser.js(f"{header}.click()")
    assert [row[0] for row in table(browser, "[data-table=headline]")[1:]] == [NASTY, "rkr", "ewc", "rkr C, unfinished"]
    browser.js("document.querySelector('[data-table=headline] th button').click()")
    assert browser.js("document.querySelectorAll('[data-table=headline] [aria-sort]').length") == 1


def test_values_by_pointer_and_by_keyboard(browser: Browser, page: Path) -> None:
    browser.show(page)
    tip = "document.querySelector('[data-chart=during] .tip')"
    assert browser.js(f"{tip}.hidden")
    browser.js(
        "document.querySelector('[data-chart=during] .plot').scrollIntoView({behavior: 'instant', block: 'center'})"
    )
    bar = "document.querySelectorAll('[data-chart=during] .bar')[0].getBoundingClientRect()"
    x, y = browser.js(f"[{bar}.x + {bar}.width / 2, {bar}.y + 8]")
    browser("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.js(f"{tip}.textContent") == f"{NASTY}, task 1 toy-1\nright after learning: 66.62 ± 0.00 %"
    browser("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.js(f"{tip}.hidden")
    browser.js("document.querySelector('[data-chart=during] [data-save=csv]').focus()")
    browser.press("Tab")
    assert browser.js("document.activeElement.matches('[data-chart=during] .plot')")
    browser.press("ArrowRight")
    said = "document.querySelector('[data-chart=during] .said').textContent"
    assert browser.js(said) == f"{NASTY}, task 2 toy-2, right after learning: 66.62 ± 0.00 %"
    browser.press("End")
    assert browser.js(said) == "rkr, task 3 toy-3, after all tasks: 60.00 ± 0.00 %"
    assert not browser.js(f"{tip}.hidden")
    browser.press("Escape")
    assert browser.js(f"{tip}.hidden")


def test_charts_are_saved_from_a_page_on_disk(browser: Browser, page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    browser("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.show(page, scheme="dark")
    for kind in ("csv", "svg"):
        browser.js(f"document.querySelector('[data-chart=over] [data-save={kind}]').click()")
        file = folder / f"toy-over.{kind}"
        for _ in range(20 * ENOUGH):
            if file.exists():
                break
            time.sleep(0.05)
    rows = list(csv.reader(io.StringIO((folder / "toy-over.csv").read_text(encoding="utf-8-sig"))))
    assert rows[0] == ["method", "after task", "mean in %", "± 95 %"]
    assert rows[1] == [NASTY, "1 toy-1", "66.625", "0"]
    assert len(rows) == 1 + 3 * 3 + 2
    text = (folder / "toy-over.svg").read_text(encoding="utf-8")
    assert "var(" not in text
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    names = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"ewc", "rkr", NASTY, "tasks learned"} <= names
    assert browser.complaints() == []


def test_light_and_dark(browser: Browser, page: Path) -> None:
    def lightness() -> float:
        found = "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
        return sum(browser.js(found)) / 3

    browser.show(page, scheme="light")
    assert lightness() > 200
    browser.show(page, scheme="dark")
    assert lightness() < 60
    assert browser.js("document.getElementById('theme').textContent") == "Light mode"  # what it switches to
    browser.js("document.getElementById('theme').click()")
    assert lightness() > 200
    assert browser.js("document.getElementById('theme').textContent") == "Dark mode"
    browser.js("localStorage.clear()")
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_to_the_side(browser: Browser, page: Path, scheme: str) -> None:
    browser.show(page, width=360, scheme=scheme)
    browser.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.js("[innerWidth, document.documentElement.scrollWidth, document.body.scrollWidth]") == [360] * 3
    widths = browser.js("[...document.querySelectorAll('.plot > svg')].map(s => s.getBoundingClientRect().width)")
    assert len(widths) == 7
    assert all(260 <= width <= 360 for width in widths)
    assert browser.complaints() == []


def test_printing_opens_everything(browser: Browser, page: Path) -> None:
    browser.show(page)
    closed = count(browser, "details:not([open])")
    assert closed > 7
    shut = "document.querySelectorAll('details:not([open])').length"
    browser.js(f"addEventListener('beforeprint', () => {{ window.shut = {shut} }})")
    printed = browser("Page.printToPDF")
    assert printed["data"].startswith("JVBERi")  # %PDF in base64
    assert browser.js("window.shut") == 0
    assert count(browser, "details:not([open])") == closed
    assert browser.complaints() == []


def test_charts_have_names_for_those_who_do_not_see_them(browser: Browser, page: Path) -> None:
    browser.show(page)
    for name in ("title", "desc"):
        texts = browser.js(f"[...document.querySelectorAll('.plot > svg > {name}')].map(t => t.textContent)")
        assert len(texts) == 7
        assert all(len(text) > 10 for text in texts)
    assert browser.js(
        "[...document.querySelectorAll('.plot > svg')].every(s => s.getAttribute('aria-labelledby').split(' ')"
        ".every(id => document.getElementById(id)))"
    )
    assert browser.js("[...document.querySelectorAll('button')].every(b => b.textContent.trim())")
    dashes = browser.js(
        "[...document.querySelectorAll('[data-chart=over] .line')].map(l => l.getAttribute('stroke-dasharray'))"
    )
    assert len(set(dashes)) == 3  # colours are not all that tells methods apart


def test_zero_shot_tasks(browser: Browser, run_folder: Callable[..., Path], tmp_path: Path) -> None:
    for seed in (0, 1):
        run_folder(ISOLATED, method="rkr", order="fixed", zero_shot=True, seed=seed, isolated=True)
        run_folder([[0.5], [0.4, 0.5], [0.3, 0.4, 0.5]], method="sft", order="fixed", zero_shot=True, seed=seed)
    browser.show(write_report([tmp_path / "runs"], tmp_path / "report", figures=False).page)
    assert browser.complaints() == []
    assert count(browser, "[data-chart=zero] .bar") == 2 * 3 * 3
    rows = table(browser, "[data-chart=zero] table")
    assert rows[0] == ["method", *(f"toy-{i} {name}" for i in (1, 2, 3) for name in "USH")]
    assert rows[1][:4] == ["rkr", "70.00 ± 0.00", "85.00 ± 0.00", "80.00 ± 0.00"]
    assert rows[2][:4] == ["sft", "20.00 ± 0.00", "35.00 ± 0.00", "30.00 ± 0.00"]


def test_the_committed_results(browser: Browser, tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "results"
    browser.show(write_report([results], tmp_path, figures=False).page)
    assert browser.complaints() == []
    last = json.loads((results / "digits" / "rkr" / "fixed" / "results.jsonl").read_text().splitlines()[-2])
    index = browser.js("[...document.querySelectorAll('h2')].findIndex(h => h.textContent === 'digits')")
    rows = table(browser, f"#recipe-{index} [data-table=headline]")
    (rkr,) = [row for row in rows if row[0] == "rkr"]
    assert rkr[2] == f"{100 * sum(last['accuracy']) / 5:.2f}"

"""Figures: they are there, they say what they show, and they are the same each time."""

import math

import matplotlib
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from rkr import FileError, UsageError, registry
from rkr.experiment.recipes import list_recipes
from rkr.methods import METHODS, ZERO_SHOT_METHODS
from rkr.report import figures, looks
from rkr.report.looks import look_of

PNG = b"\x89PNG\r\n\x1a\n"
ISOLATED = [[0.8], [0.8, 0.7], [0.8, 0.7, 0.6]]


@pytest.fixture
def results(a_result):
    return [
        a_result(method="ewc", order="A"),
        a_result(ISOLATED, method="rkr", order="A"),
        a_result(ISOLATED, method="rkr", order="B"),
        a_result([[0.5], [0.5, 0.6]], tasks=3, method="rkr", order="C"),
        a_result([], tasks=3, method="rkr", order="D"),
    ]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written, for a look at what is in them."""
    kept = []
    write = figures.write
    monkeypatch.setattr(figures, "write", lambda figure, path: kept.append(figure) or write(figure, path))
    return kept


def test_all_figures_twice_are_the_same_bytes(results, tmp_path):
    before = dict(matplotlib.rcParams)
    first = figures.write_figures(results, tmp_path / "1")
    assert [path.name for path in first] == [
        f"{name}.{kind}"
        for name in (
            "accuracy_over_tasks",
            "accuracy_against_capacity",
            "during_after",
            "accuracy_matrix-ewc-A",
            "accuracy_matrix-rkr-A",
            "accuracy_matrix-rkr-B",
            "accuracy_matrix-rkr-C",
        )
        for kind in ("png", "svg")
    ]
    assert sorted(first) == sorted((tmp_path / "1").iterdir())  # nothing temporary is left
    for path in first:
        content = path.read_bytes()
        assert content.startswith(PNG if path.suffix == ".png" else b"<?xml")
        assert len(content) > 5000
        assert b"dc:date" not in content
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None}):  # a user's own style changes nothing
        second = figures.accuracy_over_tasks(results, tmp_path / "2" / "accuracy_over_tasks")
        second += figures.accuracy_against_capacity(results, tmp_path / "2" / "accuracy_against_capacity")
        second += figures.during_after(results, tmp_path / "2" / "during_after")
        second += figures.accuracy_matrix(results[0], tmp_path / "2" / "accuracy_matrix-ewc-A")
    for path in second:
        assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_lines_are_the_running_means(results, tmp_path, drawn):
    figures.accuracy_over_tasks(results, tmp_path / "lines.svg")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["ewc", "rkr", "rkr, order C, unfinished"]
    assert list(lines["ewc"].get_ydata()) == pytest.approx([90, 75, 230 / 3])
    assert list(lines["rkr"].get_ydata()) == pytest.approx([80, 75, 70])
    assert list(lines["rkr, order C, unfinished"].get_xdata()) == [1, 2]
    assert lines["rkr, order C, unfinished"].get_color() == lines["rkr"].get_color() != lines["ewc"].get_color()
    assert lines["rkr, order C, unfinished"].get_markerfacecolor() == "white"
    assert not axes.collections  # no bands: no method has three runs
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["ewc", "rkr", "rkr, order C, unfinished"]
    assert axes.get_title("left") == "toy"
    assert axes.get_ylabel().endswith("(%)")
    assert (tmp_path / "lines.png").exists()
    assert (tmp_path / "lines.svg").exists()


def test_bands_from_three_runs_on(a_result, tmp_path, drawn):
    first = [0.8, 0.7, 0.9]
    runs = [a_result([[a], [a, 0.7]], tasks=2, order=order) for a, order in zip(first, "ABC", strict=True)]
    figures.accuracy_over_tasks(runs, tmp_path / "bands")
    (axes,) = drawn[0].axes
    (band,) = axes.collections
    half = 4.30265 * 10 / math.sqrt(3)  # Student's 95 % with 2 degrees of freedom
    heights = [y for x, y in band.get_paths()[0].vertices if x == 1]
    assert max(heights) == 100  # clipped
    assert min(heights) == pytest.approx(80 - half, rel=1e-5)
    assert axes.get_title("left") == "toy (bands: 95 % confidence intervals over runs)"


def test_bars_are_the_diagonal_and_the_last_row(results, tmp_path, drawn):
    figures.during_after(results, tmp_path / "bars")
    ewc, rkr = drawn[0].axes
    assert [patch.get_height() for patch in ewc.patches] == pytest.approx([90, 80, 95, 60, 75, 95])
    assert [patch.get_height() for patch in rkr.patches] == pytest.approx([80, 70, 60, 80, 70, 60])
    assert (ewc.get_title("left"), rkr.get_title("left")) == ("ewc", "rkr, mean of 2 runs")
    assert ewc.get_ylim() == (0, 100)


def test_the_trade_off_has_a_point_for_each_method(results, tmp_path, drawn):
    paper, capacity = {"rkr": (69.58, 0.55), "apd": (60.74, None), "l2t": (48.73, None)}, {"rkr": 104.3, "apd": 135.0}
    figures.accuracy_against_capacity(results, tmp_path / "points", paper, capacity)
    (axes,) = drawn[0].axes
    found = {bars.get_label(): bars for bars in axes.containers}
    assert list(found) == ["ewc", "rkr", "rkr (paper)", "apd (paper)"]  # of l2t the capacity is not known
    assert found["ewc"].lines[0].get_xydata().tolist() == [[103, pytest.approx(230 / 3)]]
    assert found["rkr"].lines[0].get_xydata().tolist() == [[103, pytest.approx(70)]]
    assert found["rkr (paper)"].lines[0].get_xydata().tolist() == [[104.3, 69.58]]
    fills = [bars.lines[0].get_fillstyle() for bars in found.values()]
    assert fills == ["full", "full", "none", "none"]
    assert found["rkr"].has_yerr
    (segment,) = found["rkr (paper)"].lines[2][0].get_segments()
    assert segment[:, 1].tolist() == pytest.approx([69.03, 70.13])
    assert axes.get_xscale() == "linear"
    figures.accuracy_against_capacity(results, tmp_path / "points", paper, {"rkr": 104.3, "apd": 1000.0})
    axes = drawn[1].axes[0]
    assert axes.get_xscale() == "function"
    left, right = axes.transData.transform([(100, 70), (101, 70)])[:, 0]
    far, farther = axes.transData.transform([(999, 70), (1000, 70)])[:, 0]
    assert right - left > 100 * (farther - far)


def test_a_method_looks_the_same_in_every_figure(a_result, tmp_path, drawn):
    names = ("rkr", "ewc", "a method of one's own")
    three = [a_result(method=name) for name in names]
    for some in (three, three[:1], three[::-1]):
        figures.accuracy_over_tasks(some, tmp_path / "lines")
        figures.accuracy_against_capacity(some, tmp_path / "points")
        figures.during_after(some, tmp_path / "bars")
        lines, points, bars = drawn[-3:]
        for name in [result.method for result in some]:
            look = look_of(name)
            line = next(line for line in lines.axes[0].lines if line.get_label() == name)
            point = next(point for point in points.axes[0].containers if point.get_label() == name).lines[0]
            panel = next(axes for axes in bars.axes if axes.get_title("left") == name)
            assert {line.get_color(), point.get_color(), look.colour} == {look.colour}
            assert {line.get_marker(), point.get_marker(), look.marker} == {look.marker}
            assert line.is_dashed() == bool(look.dashes)
            assert to_hex(panel.patches[-1].get_facecolor()).upper() == look.colour


def test_looks_are_told_apart():
    known = {look_of(name) for name in looks.PUBLISHED}
    assert len(known) == len(looks.PUBLISHED)
    known |= {look_of(name) for name in registry.names("method")}
    ours = {*METHODS, *ZERO_SHOT_METHODS, *(number.method for recipe in list_recipes() for number in recipe.paper)}
    assert len({look_of(name) for name in ours}) == len(ours)
    every = [looks.Look(colour, marker) for colour in looks.COLOURS for marker in looks.MARKERS]
    assert len({(look.colour, look.dashes) for look in every}) == len(every)  # lines of one colour differ
    assert len({(look.marker, look.dashes) for look in every}) == len(every)  # so colours are not needed
    assert look_of("rkr").dashes == ()
    assert look_of("rkr") == looks.Look("#0072B2", "o")
    assert look_of("unheard-of") == look_of("unheard-of") not in known
    assert len({look_of(f"method {i}") for i in range(500)}) == len(looks.EVERY) - len(known)


def test_sizes_of_paper(results, tmp_path):
    written = figures.write_figures(results, tmp_path) + figures.accuracy_matrices(results, tmp_path / "matrices")
    inches = {}
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert round(image.info["dpi"][0]) == 300
                inches[path.stem] = image.width / 300
        else:
            assert b"<text" not in path.read_bytes()  # letters are outlines, so no font is missing anywhere
    assert inches.pop("accuracy_matrix-ewc-A") == pytest.approx(3.3)
    assert set(inches.values()) == {3.3, 6.9}
    assert inches["accuracy_over_tasks"] == inches["accuracy_against_capacity"] == inches["matrices"] == 6.9


def test_matrices_side_by_side_are_means_on_one_scale(results, tmp_path, drawn):
    figures.accuracy_matrices(results, tmp_path / "matrices")
    ewc, rkr = drawn[0].axes[:2]
    assert (ewc.get_title("left"), rkr.get_title("left")) == ("ewc", "rkr, mean of 2")
    assert ewc.collections[0].get_clim() == rkr.collections[0].get_clim() == (60, 100)
    values = rkr.collections[0].get_array()
    assert [list(row.compressed()) for row in values] == [pytest.approx([100 * a for a in row]) for row in ISOLATED]
    with pytest.raises(UsageError, match="no finished runs"):
        figures.accuracy_matrices(results[3:], tmp_path / "matrices")


def test_the_figures_of_a_report(results, tmp_path):
    written = figures.write_figures(results, tmp_path, "toy-", each_run=False)
    kinds = ("accuracy_over_tasks", "accuracy_against_capacity", "during_after", "accuracy_matrices")
    assert [path.name for path in written] == [f"toy-{name}.{kind}" for name in kinds for kind in ("png", "svg")]


def test_the_heat_map_has_every_accuracy(a_result, tmp_path, drawn):
    figures.accuracy_matrix(a_result(), tmp_path / "matrix")
    axes = drawn[0].axes[0]
    found = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts}
    assert found == {(1, 1): "90", (2, 1): "70", (2, 2): "80", (3, 1): "60", (3, 2): "75", (3, 3): "95"}
    assert axes.collections[0].get_clim() == (60, 100)


def test_many_tasks_and_few(a_result, tmp_path, drawn):
    many = a_result([[0.5] * i for i in range(1, 22)])
    one = a_result([[1.0]], recipe="one")
    for result in (many, one):
        assert len(figures.write_figures([result], tmp_path / result.recipe)) == 8
    assert not drawn[3].axes[0].texts  # no room for 231 numbers


def test_what_cannot_be_drawn(a_result, tmp_path):
    begun = a_result([], tasks=2)
    assert figures.write_figures([begun], tmp_path) == []
    with pytest.raises(UsageError, match="no run has finished a task yet"):
        figures.accuracy_over_tasks([begun], tmp_path / "a")
    with pytest.raises(UsageError, match="no finished runs"):
        figures.during_after([begun], tmp_path / "a")
    with pytest.raises(UsageError, match="no task learned yet"):
        figures.accuracy_matrix(begun, tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written"):
        figures.accuracy_matrix(a_result(order="B"), tmp_path / "file" / "a")


NAMES = ["_hidden", "$x^{$", "x" * 300, "ü" * 200, "a b", "a_b"]


def test_any_name_can_be_drawn(a_result, tmp_path, drawn):
    """A leading "_" hides a label of matplotlib, and "$" begins a formula."""
    runs = [a_result(ISOLATED, order=i) for i in range(len(NAMES))]
    for run, name in zip(runs, NAMES, strict=True):
        object.__setattr__(run, "method", name)
        object.__setattr__(run, "tasks", ("$", "_a", "c"))
    figures.write_figures(runs, tmp_path / "report", each_run=False)
    written = figures.write_figures(runs, tmp_path / "each")
    assert len({str(path).casefold() for path in written}) == 2 * (3 + len(NAMES))
    assert max(len(path.name.encode()) for path in written) < 110
    for figure in drawn[:2]:
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert {"_hidden", "$x^{$", "a b", "a_b"} <= set(texts)
        assert len(texts) == len(NAMES)
        assert max(len(line) for text in texts for line in text.split("\n")) <= figures.LABEL


def test_nothing_is_cut_off_or_beyond_100_percent(a_result, tmp_path, drawn):
    high = [a_result([[0.99], [0.99, 0.6]], method="ewc", order="fixed", seed=seed) for seed in (0, 1)]
    high.append(a_result([[0.9], [0.6, 0.7]], method="ewc", order="fixed", seed=2))
    high.append(a_result([[1.0]], tasks=2, method="a method with a very long name of its own", order="fixed"))
    figures.accuracy_over_tasks(high, tmp_path / "lines")
    figures.accuracy_against_capacity(high, tmp_path / "points")
    for figure in drawn:
        low, top = figure.axes[0].get_ylim()
        assert low >= 0
        assert top <= 100
        box = figure.legends[0].get_window_extent()
        whole = figure.bbox
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
        assert figure.axes[0].get_window_extent().x1 <= box.x0
    band = drawn[0].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == 100  # 96 ± 13 else
    (segment,) = drawn[1].axes[0].containers[0].lines[2][0].get_segments()
    assert segment[:, 1].max() <= 100


def test_a_figure_that_fails_is_told(results, tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setitem(figures.FIGURES, "during_after", broken)
    told = []
    written = figures.write_figures(
        results, tmp_path, "toy-", failed=lambda path, error: told.append((path, error)), each_run=False
    )
    assert len(written) == 6
    ((path, error),) = told
    assert path == tmp_path / "toy-during_after"
    assert str(error) == "by nothing"
    with pytest.raises(ZeroDivisionError):
        figures.write_figures(results, tmp_path)

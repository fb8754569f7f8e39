"""Figures: they are there, they say what they show, and they are the same each time."""

import matplotlib
import pytest

from rkr import FileError, UsageError
from rkr.report import figures

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
    write = figures._write
    monkeypatch.setattr(figures, "_write", lambda figure, path: kept.append(figure) or write(figure, path))
    return kept


def test_all_figures_twice_are_the_same_bytes(results, tmp_path):
    before = dict(matplotlib.rcParams)
    first = figures.write_figures(results, tmp_path / "1")
    assert [path.name for path in first] == [
        f"{name}.{kind}"
        for name in (
            "accuracy_over_tasks",
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
        second += figures.during_after(results, tmp_path / "2" / "during_after")
        second += figures.accuracy_matrix(results[0], tmp_path / "2" / "accuracy_matrix-ewc-A")
    for path in second:
        assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_lines_are_the_running_means(results, tmp_path, drawn):
    figures.accuracy_over_tasks(results, tmp_path / "lines.svg")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["ewc", "rkr", "rkr, order C, not finished"]
    assert list(lines["ewc"].get_ydata()) == pytest.approx([90, 75, 230 / 3])
    assert list(lines["rkr"].get_ydata()) == pytest.approx([80, 75, 70])
    assert list(lines["rkr, order C, not finished"].get_xdata()) == [1, 2]
    assert lines["rkr, order C, not finished"].get_color() == lines["rkr"].get_color() != lines["ewc"].get_color()
    assert len(axes.collections) == 1  # one band: the method with two orders
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "ewc",
        "rkr",
        "rkr, order C, not finished",
    ]
    assert axes.get_ylabel().endswith("(%)")
    assert (tmp_path / "lines.png").exists()
    assert (tmp_path / "lines.svg").exists()


def test_bars_are_the_diagonal_and_the_last_row(results, tmp_path, drawn):
    figures.during_after(results, tmp_path / "bars")
    ewc, rkr = drawn[0].axes
    assert [patch.get_height() for patch in ewc.patches] == pytest.approx([90, 80, 95, 60, 75, 95])
    assert [patch.get_height() for patch in rkr.patches] == pytest.approx([80, 70, 60, 80, 70, 60])
    assert (ewc.get_title("left"), rkr.get_title("left")) == ("ewc", "rkr, mean of 2 orders")
    assert ewc.get_ylim() == (0, 100)


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
        assert len(figures.write_figures([result], tmp_path / result.recipe)) == 6
    assert not drawn[2].axes[0].texts  # no room for 231 numbers


def test_what_cannot_be_drawn(a_result, tmp_path):
    begun = a_result([], tasks=2)
    assert figures.write_figures([begun], tmp_path) == []
    with pytest.raises(UsageError, match="no run has learned a task yet"):
        figures.accuracy_over_tasks([begun], tmp_path / "a")
    with pytest.raises(UsageError, match="no run is finished"):
        figures.during_after([begun], tmp_path / "a")
    with pytest.raises(UsageError, match="no task has been learned yet"):
        figures.accuracy_matrix(begun, tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written"):
        figures.accuracy_matrix(a_result(order="B"), tmp_path / "file" / "a")

"""Tables as files: the same numbers in three formats, in full where they are for machines."""

import csv
import re

import pytest

from rkr import FileError
from rkr.report import write_tables
from rkr.report.export import Sheet, latex, markdown

THIRDS = [[1 / 3], [1 / 3, 2 / 3]]


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_table_in_every_format(a_result, tmp_path):
    results = [
        a_result(THIRDS, method="ewc", order="A"),
        a_result(THIRDS, method="ewc", order="B"),
        a_result(order="A", recipe="other"),
    ]
    out = tmp_path / "tables"
    written = write_tables(results, out)
    stems = [
        *("toy-summary", "toy-tasks", "toy-matrix-ewc-A", "toy-matrix-ewc-B"),
        *("other-summary", "other-tasks", "other-matrix-rkr-A"),
    ]
    assert written == [out / f"{stem}.{kind}" for stem in stems for kind in ("md", "csv", "tex")]
    assert sorted(out.iterdir()) == sorted(written)


def test_the_summary(a_result, tmp_path):
    results = [a_result(THIRDS, order="A"), a_result([[0.5], [0.5, 0.9]], order="B", agnostic=False)]
    write_tables(results, tmp_path, {"toy": {"rkr": (69.58, 0.55)}})
    (row,) = read(tmp_path / "toy-summary.csv")
    assert float(row["accuracy"]) == (0.5 + 0.7) / 2
    assert float(row["accuracy_std"]) == pytest.approx(0.2 / 2**0.5, rel=1e-12)
    assert float(row["accuracy_half_width"]) == pytest.approx(12.7062047 * 0.1, rel=1e-8)
    assert (row["method"], row["measure"], row["runs"]) == ("rkr", "accuracy", "2")
    assert (row["paper_percent"], row["paper_half_width_percent"]) == ("69.58", "0.55")
    assert (float(row["agnostic"]), row["agnostic_std"], row["forward_transfer"]) == (0.25, "", "")
    assert row["capacity_to_learn_percent"] == "104.0"
    assert (row["capacity_percent"], row["bytes"], row["identical_pairs"], row["pairs"]) == ("102.0", "6000", "0", "2")
    text = (tmp_path / "toy-summary.md").read_text()
    assert text.splitlines()[0].startswith("| method | runs | accuracy | paper | forgetting |")
    assert text.splitlines()[2].startswith("| rkr | 2 | 60.00 ± 127.06 | 69.58 ± 0.55 | 0.00 |")
    assert r"rkr & 2 & 60.00 $\pm$ 127.06 & 69.58 $\pm$ 0.55 & 0.00 &" in (tmp_path / "toy-summary.tex").read_text()


def test_tasks_and_matrices_in_full_precision(a_result, tmp_path):
    results = [a_result(THIRDS, order="A"), a_result([[0.1 + 0.2]], tasks=2, order="B", seed=4)]
    write_tables(results, tmp_path)
    whole, open_ = read(tmp_path / "toy-tasks.csv")
    assert (float(whole["toy-1"]), float(whole["toy-2"]), whole["finished"]) == (1 / 3, 2 / 3, "True")
    assert (open_["order"], open_["seed"], open_["toy-1"], open_["toy-2"]) == ("B", "4", "0.30000000000000004", "")
    assert (tmp_path / "toy-tasks.md").read_text().splitlines()[-1] == "| rkr | B seed 4 | 30.0 | – |"
    first, second = read(tmp_path / "toy-matrix-rkr-A.csv")
    assert (first["after"], float(first["toy-1"]), first["toy-2"]) == ("toy-1", 1 / 3, "")
    assert (float(second["toy-2"]), float(second["mean"])) == (2 / 3, 0.5)
    assert "toy-2 & 33.3 & 66.7 & 50.0 \\\\\n" in (tmp_path / "toy-matrix-rkr-A.tex").read_text()
    assert (tmp_path / "toy-matrix-rkr-B_seed_4.csv").exists()


def test_zero_shot_tasks_have_u_s_and_h(a_result, tmp_path):
    runs = [a_result([[h]], method="rkr", order="fixed", seed=seed, zero_shot=True) for seed, h in ((0, 0.4), (1, 0.5))]
    write_tables(runs, tmp_path)
    u, s, h = read(tmp_path / "toy-zero-shot.csv")
    assert [row["measure"] for row in (u, s, h)] == ["U", "S", "H"]
    assert (h["task"], h["runs"], float(h["mean"])) == ("toy-1", "2", 0.45)
    assert float(u["mean"]) == pytest.approx(0.35)
    assert float(s["std"]) == pytest.approx(0.1 / 2**0.5)
    assert (tmp_path / "toy-zero-shot.md").read_text().splitlines() == [
        "| method | toy-1 U | toy-1 S | toy-1 H |",
        "|---|--:|--:|--:|",
        "| rkr | 35.0 (7.1) | 50.0 (7.1) | 45.0 (7.1) |",
    ]


def test_protocols_come_apart(a_result, tmp_path):
    results = [a_result([[0.5]], order="A"), a_result([[0.6]], order=0)]
    names = {path.name for path in write_tables(results, tmp_path) if path.name.endswith("summary.csv")}
    assert len(names) == 2
    assert all(re.fullmatch(r"toy_[0-9a-f]{12}_-summary\.csv", name) for name in names)


def test_only_runs_that_go_on_have_no_summary(a_result, tmp_path):
    written = write_tables([a_result([[0.5]], tasks=3), a_result([], tasks=3, order="B")], tmp_path)
    assert {path.stem for path in written} == {"toy-tasks", "toy-matrix-rkr-A"}
    assert write_tables([], tmp_path) == []


def test_names_that_differ_only_in_signs_have_files_of_their_own(a_result, tmp_path):
    written = write_tables([a_result([[0.5]], method="a b"), a_result([[0.6]], method="a_b")], tmp_path)
    assert len(set(written)) == len(written)
    values = {read(path)[0]["toy-1"] for path in written if "matrix" in path.name and path.suffix == ".csv"}
    assert values == {"0.5", "0.6"}


def braces_are_balanced(text: str) -> bool:
    depth = 0
    for sign in re.sub(r"\\[\\{}]", "", text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return False
    return depth == 0


NASTY = r"a_b {50%} $x$ #1 & \cmd ~ ^ <i> |"


def test_latex_has_every_special_sign_escaped():
    sheet = Sheet("", ["method", NASTY], [["[red]m", "-1.50"], ["*", "73.33 ± 42.35"], ["x\ny", "–"]], [], [])
    text = latex(sheet)
    assert braces_are_balanced(text)
    lines = text.splitlines()
    assert lines[:3] == [r"% \usepackage{booktabs}", r"\begin{tabular}{lr}", r"\toprule"]
    assert lines[3] == (
        r"method & a\_b \{50\%\} \$x\$ \#1 \& \textbackslash{}cmd \textasciitilde{} \textasciicircum{} "
        r"\textless{}i\textgreater{} \textbar{} \\"
    )
    assert lines[5:8] == [r"{[}red]m & $-$1.50 \\", r"{*} & 73.33 $\pm$ 42.35 \\", r"x y & -- \\"]
    assert lines[8:] == [r"\bottomrule", r"\end{tabular}"]
    for line in (*lines[3:4], *lines[5:8]):
        assert len(re.findall(r"(?<!\\)&", line)) == 1  # two cells
        assert not re.search(r"(?<!\\)[%#_]", line)
        assert len(re.findall(r"(?<!\\)\$", line)) % 2 == 0


def test_markdown_keeps_its_cells():
    text = markdown(Sheet("", ["a|b", "c"], [["x\ny", r"<b> \ `"]], [], []))
    assert text == "| a\\|b | c |\n|---|--:|\n| x y | \\<b> \\\\ \\` |\n"


def test_a_folder_that_cannot_be_written(a_result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        write_tables([a_result()], tmp_path / "file")

"""Listing labelled pictures, and dividing them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.pictures import draw_classes

from rkr.errors import FileError
from rkr.pictures.cache import Squares
from rkr.pictures.dataset import Checked, Labelled, Listing, divide, list_pictures
from rkr.pictures.preparation import Preparation


def files(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def found(listing: Listing) -> list[tuple[str, str, str]]:
    root = str(listing.source if listing.source.is_dir() else listing.source.parent)
    return [(p.path.removeprefix(root + "/"), p.label, p.part) for p in listing.pictures]


def test_class_folders_at_any_depth(tmp_path: Path) -> None:
    files(
        tmp_path, "b/2.JPG", "b/deep/er/1.webp", "a/x.png", "a/notes.txt", "a/.hidden.png", ".git/x/1.png", "loose.png"
    )
    listing = list_pictures(tmp_path)
    assert found(listing) == [("a/x.png", "a", ""), ("b/2.JPG", "b", ""), ("b/deep/er/1.webp", "b", "")]
    assert listing.loose == (str(tmp_path / "loose.png"),)
    assert not listing.has_parts


def test_train_val_and_test(tmp_path: Path) -> None:
    files(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/2.png", "test/a/3.png")
    listing = list_pictures(tmp_path)
    parts = [(p.label, p.part) for p in listing.pictures]
    assert parts == [("a", "train"), ("b", "train"), ("a", "validation"), ("a", "test")]
    assert listing.has_parts
    files(tmp_path, "trees/1.png")  # then `train` is a class like any other
    assert list_pictures(tmp_path).classes == ("test", "train", "trees", "val")


CSV = ("path,label\na.png,x\nsub/b.png,y\n", "file;class\na.png;x\nsub/b.png;y\n", "a.png,x\nsub/b.png,y\n",
       "\ufefflabel,extra,filename\nx,1,a.png\n\ny,2,sub/b.png\n", "path\tlabel\na.png\tx\nsub/b.png\ty\n")  # fmt: skip


@pytest.mark.parametrize("text", CSV)
def test_csv(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.csv").write_text(text, encoding="utf-8")
    assert found(list_pictures(tmp_path / "list.csv")) == [("a.png", "x", ""), ("sub/b.png", "y", "")]


def test_csv_and_json_lines_with_parts(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label,split\na.png,x,train\nb.png,x,val\nc.png,y,test\n")
    rows = [{"path": "a.png", "label": "x", "part": "training"}, {"image": "b.png", "category": "x", "split": "valid"}]
    rows.append({"file_name": "c.png", "label": "y", "set": "test"})
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    wanted = [("a.png", "x", "train"), ("b.png", "x", "validation"), ("c.png", "y", "test")]
    assert found(list_pictures(tmp_path / "list.csv")) == wanted
    assert found(list_pictures(tmp_path / "list.jsonl")) == wanted


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text('{"path": "a.png", "label": 3}\n{"path": "b.png", "label": 10}\n')
    assert list_pictures(tmp_path / "list.jsonl").classes == ("10", "3")


BAD = {
    "empty.csv": ("", "is empty"),
    "names.csv": ("a,b,c\n1,2,3\n", "must name the columns path and label"),
    "label.csv": ("path,label\na.png,\n", "line 2 needs a path and a label"),
    "part.csv": ("path,label,part\na.png,x,exam\n", "must be train, val or test, not 'exam'"),
    "bytes.csv": (b"\xff\xfe\x00", "UTF-8"),
    "bad.jsonl": ('{"path": "a.png"', "line 1 is not JSON"),
    "list.jsonl": ("[1, 2]", "must be an object"),
    "pictures.zip": ("", "give a folder of class folders"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lists(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError, match=message):
        list_pictures(tmp_path / name)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no pictures found"):
        list_pictures(tmp_path)
    with pytest.raises(FileError, match="not found"):
        list_pictures(tmp_path / "missing")


def listing(labels: str, parts: str = "") -> Listing:
    """A picture for each letter of `labels`; parts by letter: t, v or -."""
    names = {"t": "train", "v": "validation", "-": ""}
    parts = parts or "-" * len(labels)
    pictures = [Labelled(f"{i}.png", label, names[p]) for i, (label, p) in enumerate(zip(labels, parts, strict=True))]
    return Listing(Path("here"), tuple(pictures))


def divided(labels: str, content: str = "", parts: str = "", share: float = 0.25) -> Checked:
    found: list[str | FileError] = [
        FileError("broken") if c == "!" else c for c in content or map(str, range(len(labels)))
    ]
    return divide(listing(labels, parts), found, share, seed=0)


def test_the_split_is_stratified() -> None:
    checked = divided("a" * 40 + "b" * 20 + "c" * 4 + "d")
    held = torch.bincount(checked.y[checked.validation], minlength=4).tolist()
    assert held == [10, 5, 1, 0]
    assert checked.counts() == [40, 20, 4, 1]
    other = divide(listing("a" * 40 + "b" * 20), [str(i) for i in range(60)], 0.25, seed=1)
    same = divide(listing("a" * 40 + "b" * 20), [str(i) for i in range(60)], 0.25, seed=1)
    assert torch.equal(other.validation, same.validation)
    assert not torch.equal(other.validation, checked.validation[:60])


def test_a_class_that_is_missing_in_validation_does_not_shift_labels() -> None:
    checked = divided("abcabc", parts="tttvtv")
    assert checked.classes == ("a", "b", "c")
    assert checked.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert checked.y[checked.validation].tolist() == [0, 2]
    with pytest.raises(FileError, match="class 'd' of the validation part is not in training"):
        divided("abd", parts="ttv")


def test_copies_are_kept_in_one_part() -> None:
    checked = divided("aaabbb", "112345", "tvtttv")
    assert checked.rows.tolist() == [1, 2, 3, 4, 5]  # 0 is a copy of 1, which the source wants for validation
    assert checked.copies == ("0.png",)
    assert checked.validation.tolist() == [True, False, False, False, True]
    many = divided("a" * 20 + "b" * 20, "".join(chr(65 + i // 2) for i in range(40)))
    assert len(many.rows) == len(many.copies) == 20


def test_the_same_picture_in_two_classes_is_left_out() -> None:
    checked = divided("aabbb", "12134")
    assert checked.contradictions == ("0.png", "2.png")
    assert checked.rows.tolist() == [1, 3, 4]


def test_broken_files_are_listed() -> None:
    checked = divided("aabb", "1!34")
    assert checked.broken == (("1.png", "broken"),)
    assert checked.rows.tolist() == [0, 2, 3]
    with pytest.raises(FileError, match="none of its 4 files can be used, for instance broken"):
        divided("aabb", "!!!!")
    with pytest.raises(FileError, match="has 1 class with pictures"):
        divided("aabb", "12!!")


def test_squares_are_the_same_wherever_they_are_kept(tmp_path: Path) -> None:
    draw_classes(tmp_path / "p", {"red": 5, "disc": 4})
    (tmp_path / "p/red/9.png").write_bytes(b"nothing")
    paths = [p.path for p in list_pictures(tmp_path / "p").pictures]
    preparation = Preparation(16, 20)
    stores = [
        Squares(paths, preparation),
        Squares(paths, preparation, tmp_path / "cache", memory=100),
        Squares(paths, preparation, memory=100),
    ]
    assert [store.kept_in for store in stores] == ["memory", "file", "nowhere"]
    contents = [store.load() for store in stores]
    good = torch.tensor([i for i, c in enumerate(contents[0]) if isinstance(c, str)])
    assert len(good) == len(paths) - 1
    rows = good[[3, 0, 7, 3]]
    first, *others = (store.read(rows) for store in stores)
    assert torch.equal(first[0], preparation.square(paths[rows[0]]))
    assert all(torch.equal(first, other) for other in others)
    assert (tmp_path / "cache/squares.bin").stat().st_size == len(paths) * 20 * 20 * 3
    stores[1].close()
    assert not (tmp_path / "cache/squares.bin").exists()
    broken = [str(c) for c in contents[2] if isinstance(c, FileError)]
    assert len(broken) == 1
    assert "p/red/9.png: not a picture" in broken[0]

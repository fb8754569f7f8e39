"""Zero-shot datasets: small ones in both of MATLAB's formats that are written here, and the real ones of $RKR_DATA."""

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat
from sklearn.preprocessing import MinMaxScaler

import rkr
from rkr.data import ZeroShotSource, load_xlsa17, validation_source, zero_shot_stream
from rkr.data.mat import read_mat
from rkr.data.xlsa17 import require_files
from rkr.errors import DataWarning

REAL = Path(os.environ.get("RKR_DATA", "")) / "xlsa17" / "data"
SEEN, UNSEEN, VALIDATION = (1, 4, 5, 7), (2, 6), (5,)  # of 8 published classes; 3 is in no part, 8 has no rows
ROWS = 10  # of each class
PARTS = ("trainval", "test_seen", "test_unseen")
pytestmark = pytest.mark.filterwarnings("ignore::rkr.errors.DataWarning")  # of class 3

Content = dict[str, Any]


def column(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64).reshape(-1, 1)


def cell(strings: list[str]) -> np.ndarray:
    made = np.empty((len(strings), 1), dtype=object)
    made[:, 0] = strings
    return made


def content() -> Content:
    """Both files of a dataset. Dimension 0 of the features is the row, dimension 1 is constant."""
    random = np.random.default_rng(0)
    labels = random.permutation(np.repeat([*SEEN, *UNSEEN, 3], ROWS))
    where = {label: np.flatnonzero(labels == label) + 1 for label in range(1, 9)}
    features = random.normal(3, 2, (5, len(labels)))
    features[0], features[1] = np.arange(len(labels)), 7
    return {
        "features": features,
        "labels": column(labels),
        "att": random.normal(size=(3, 8)),
        "sent": random.normal(size=(4, 8)),
        "allclasses_names": cell([f"{label:03}.Möwe 𝄞"[: 5 + label] for label in range(1, 9)]),
        "trainval_loc": column(np.concatenate([where[label][2:] for label in SEEN])),
        "test_seen_loc": column(np.concatenate([where[label][:2] for label in SEEN])),
        "test_unseen_loc": column(np.concatenate([where[label] for label in UNSEEN])),
        "train_loc": column(np.concatenate([where[label] for label in SEEN if label not in VALIDATION])),
        "val_loc": column(np.concatenate([where[label] for label in VALIDATION])),
        "original_att": [{"a": 1.0}],  # never wanted
    }


def write_5(path: Path, variables: Content, compress: bool = True) -> None:
    savemat(path, variables, do_compression=compress)


def write_73(path: Path, variables: Content) -> None:
    """As MATLAB writes it: dimensions in the opposite order, strings as UTF-16 units that a cell refers to."""
    with h5py.File(path, "w", userblock_size=512) as file:

        def put(group: Any, name: str, value: Any) -> Any:
            if isinstance(value, str):
                units = np.frombuffer(value.encode("utf-16-le"), "<u2")
                made = group.create_dataset(name, data=units.reshape(-1, 1))
                made.attrs["MATLAB_class"] = np.bytes_("char")
            elif isinstance(value, np.ndarray) and value.dtype == object:
                refs = file.require_group("#refs#")
                items = [put(refs, f"{name}{i}", item).ref for i, item in enumerate(value.ravel())]
                table = np.array(items, dtype=h5py.ref_dtype).reshape(value.shape).T
                made = group.create_dataset(name, data=table, dtype=h5py.ref_dtype)
                made.attrs["MATLAB_class"] = np.bytes_("cell")
            elif isinstance(value, np.ndarray) and not value.size:  # h5py would write no shape
                made = group.create_dataset(name, data=np.array(value.shape, dtype=np.uint64))
                made.attrs["MATLAB_class"], made.attrs["MATLAB_empty"] = np.bytes_("double"), np.uint8(1)
            elif isinstance(value, np.ndarray):
                made = group.create_dataset(name, data=value.T, compression="gzip")
                made.attrs["MATLAB_class"] = np.bytes_("double")
            else:
                made = group.create_group(name)  # a struct
            return made

        for name, value in variables.items():
            put(file, name, value)
    with open(path, "r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64, HDF5 schema 1.00 .".ljust(124) + b"\x00\x02IM")


WRITERS = {"5": write_5, "7.3": write_73}


def put(folder: Path, variables: Content, version: str = "5", features: str = "res101") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    samples = {name: variables[name] for name in ("features", "labels") if name in variables}
    WRITERS[version](folder / f"{features}.mat", samples)
    WRITERS[version](folder / "att_splits.mat", {n: v for n, v in variables.items() if n not in samples})


@pytest.fixture
def source(tmp_path: Path, alone: Path) -> ZeroShotSource:
    put(tmp_path / "BIRDS", content())
    return load_xlsa17("BIRDS", tmp_path)


def tensors(source: ZeroShotSource) -> dict[str, torch.Tensor]:
    return {n: v for n, v in vars(source).items() if isinstance(v, torch.Tensor)}


def assert_equal(a: ZeroShotSource, b: ZeroShotSource) -> None:
    """Bit for bit."""
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype
            assert value.is_contiguous()
            assert other.is_contiguous()
            assert torch.equal(value, other), name
        else:
            assert value == other, name


# ---------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("version", WRITERS)
def test_content(version: str, tmp_path: Path, alone: Path) -> None:
    made = content()
    made["att"][:, [2, 7]] = made["att"][:, :1]  # classes 3 and 8 are in no part: how they are described is all one
    put(tmp_path / "xlsa17" / "data" / "BIRDS", made, version)
    source = load_xlsa17("BIRDS", tmp_path)
    assert source.name == "BIRDS"
    assert source.numbers == (1, 2, 4, 5, 6, 7)
    assert source.class_names == tuple(str(made["allclasses_names"][n - 1, 0]) for n in source.numbers)
    assert source.class_names[-1] == "007.Möwe 𝄞"  # beyond 16 bits
    assert (source.seen, source.unseen, source.validation_classes) == ((0, 2, 3, 5), (1, 4), (3,))
    assert torch.equal(source.features, torch.tensor(made["features"].T, dtype=torch.float32))
    for label, published in zip(source.labels.tolist(), made["labels"][:, 0], strict=True):
        assert label == (-1 if published == 3 else source.numbers.index(published))
    expected = torch.tensor(made["att"].T[[n - 1 for n in source.numbers]], dtype=torch.float32)
    assert torch.equal(source.attributes, expected)
    for part in PARTS:
        rows = getattr(source, part)
        assert rows.dtype == torch.int64
        assert (rows + 1).tolist() == made[f"{part}_loc"][:, 0].tolist()
    assert load_xlsa17("BIRDS", tmp_path, embedding="sent").attributes.shape == (6, 4)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_formats_are_equal(dtype: Any, tmp_path: Path, alone: Path) -> None:
    made = content()
    made["features"] = made["features"].astype(dtype)
    made["labels"] = made["labels"].astype(np.int32)
    for name in ("trainval_loc", "val_loc"):
        made[name] = made[name].astype(np.uint16)
    put(tmp_path / "a" / "BIRDS", made, "5")
    put(tmp_path / "b" / "BIRDS", made, "7.3")
    made["test_seen_loc"] = made["test_seen_loc"].T  # a row is as good as a column
    put(tmp_path / "c" / "BIRDS", made, "5")
    write_5(tmp_path / "c" / "BIRDS" / "res101.mat", made, compress=False)
    sources = [load_xlsa17("BIRDS", tmp_path / folder) for folder in "abc"]
    assert_equal(sources[0], sources[1])
    assert_equal(sources[0], sources[2])
    for value in tensors(sources[2]).values():  # memory of our own, also where nothing had to be converted
        value += 1


@pytest.mark.parametrize("version", WRITERS)
def test_class_names(version: str, tmp_path: Path, alone: Path) -> None:
    """Without names, or with numbers in their place, classes are called as by the features, or else numbered."""
    plain = tuple(f"class {n}" for n in (1, 2, 4, 5, 6, 7))
    made = content()
    for number, names in enumerate((None, column(range(8)))):
        changed = {name: value for name, value in made.items() if name != "allclasses_names"}
        if names is not None:
            changed["allclasses_names"] = names
        put(tmp_path / str(number) / "BIRDS", changed, version)
        assert load_xlsa17("BIRDS", tmp_path / str(number)).class_names == plain
    named = {**{n: made[n] for n in ("features", "labels")}, "allclasses_names": cell(list("abcde"))}
    WRITERS[version](tmp_path / "0" / "BIRDS" / "res101.mat", named)
    assert load_xlsa17("BIRDS", tmp_path / "0").class_names == ("a", "b", "d", "e", "class 6", "class 7")


@pytest.mark.parametrize("version", WRITERS)
def test_features_and_attributes_mean_the_same_classes(version: str, tmp_path: Path, alone: Path) -> None:
    """Where features name their classes, as those of `rkr features` do, a mix-up is not learned from."""
    made = content()
    names = [str(name) for name in made["allclasses_names"][:, 0]]
    swapped = [*names[:3], names[4], names[3], *names[5:]]
    cases = {
        "same": (names, None),
        "fewer": (names[:-1], None),  # a class without images
        "swapped": (swapped, r"class 4 is '005.*' in .*res101\.mat, but '004.*' in .*att_splits\.mat"),
        "more": ([*names, "x"], r"res101\.mat names 9 classes, but .*att_splits\.mat only 8"),
    }
    for case, (there, words) in cases.items():
        folder = tmp_path / case / "BIRDS"
        put(folder, made, version)
        WRITERS[version](
            folder / "res101.mat", {**{n: made[n] for n in ("features", "labels")}, "allclasses_names": cell(there)}
        )
        if words is None:
            assert load_xlsa17("BIRDS", tmp_path / case).class_names[0] == names[0]
        else:
            with pytest.raises(rkr.FileError, match=words):
                load_xlsa17("BIRDS", tmp_path / case)


def test_character_matrix(tmp_path: Path) -> None:
    savemat(tmp_path / "a.mat", {"names": np.array(["ab ", "c  ", "   "])})
    with h5py.File(tmp_path / "b.mat", "w", userblock_size=512) as file:
        units = np.array([[ord(c) for c in row] for row in ("ab ", "c  ", "   ")], dtype=np.uint16)
        file.create_dataset("names", data=units.T).attrs["MATLAB_class"] = np.bytes_("char")
    for name in ("a.mat", "b.mat"):
        assert read_mat(tmp_path / name, ["names"]).texts == {"names": ("ab", "c", "")}


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_5(tmp_path / "a.mat", content())
    seen: list[Any] = []

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(list(options["variable_names"]))
        return loadmat(*args, **options)

    monkeypatch.setattr("scipy.io.loadmat", spy)
    read = read_mat(tmp_path / "a.mat", ["att", "nothing"])
    assert seen == [["att"]]
    assert list(read.numbers) == ["att"]
    assert "original_att" in read.names


def test_places(tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--data, then $RKR_DATA, then the cache; in each the three layouts."""
    made = content()

    def first() -> float:
        return float(load_xlsa17("BIRDS", tmp_path / "mine").features[0, 1])

    places = [
        alone / "BIRDS",
        alone / "data" / "BIRDS",
        tmp_path / "env" / "BIRDS",
        tmp_path / "mine" / "BIRDS",
        tmp_path / "mine" / "data" / "BIRDS",
        tmp_path / "mine" / "xlsa17" / "data" / "BIRDS",
    ]
    monkeypatch.setenv("RKR_DATA", str(tmp_path / "env"))
    for number, place in enumerate(places):
        made["features"][1] = number
        put(place, made)
        assert first() == number


def test_missing_files(tmp_path: Path, alone: Path) -> None:
    with pytest.raises(
        rkr.FileError, match=r"BIRDS/res101\.mat not found in .*mine, .*cache.rkr\. Xian et al\. publish it .*xlsa17"
    ) as it:
        load_xlsa17("BIRDS", tmp_path / "mine")
    assert "--data" in str(it.value)
    with pytest.raises(
        rkr.FileError, match=r"BIRDS/own\.mat not found in .* not published: .*`rkr features`.* \(--data or"
    ):
        load_xlsa17("BIRDS", tmp_path / "mine", features="own")
    put(tmp_path / "mine" / "BIRDS", content(), features="vit")
    with pytest.raises(rkr.FileError, match=r"BIRDS has other features: vit\."):
        load_xlsa17("BIRDS", tmp_path / "mine")
    assert load_xlsa17("BIRDS", tmp_path / "mine", features="vit").name == "BIRDS"
    (tmp_path / "mine" / "BIRDS" / "att_splits.mat").unlink()
    with pytest.raises(rkr.FileError, match=r"att_splits\.mat: not found next to vit\.mat\. .*xlsa17"):
        load_xlsa17("BIRDS", tmp_path / "mine", features="vit")
    for name, features in (("../BIRDS", "vit"), ("", "vit"), ("..", "vit"), ("BIRDS", "a/vit")):
        with pytest.raises(rkr.UsageError, match="must not be a path: "):
            load_xlsa17(name, tmp_path / "mine", features)


def test_without_h5py(tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "BIRDS", content(), "7.3")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(rkr.FileError, match=r"att_splits\.mat is a MATLAB 7\.3 file.*pip install 'rkr\[matlab73\]'"):
        load_xlsa17("BIRDS", tmp_path)
    put(tmp_path / "BIRDS", content(), "5")
    assert load_xlsa17("BIRDS", tmp_path).name == "BIRDS"


@pytest.mark.parametrize("version", WRITERS)
def test_damaged_files(version: str, tmp_path: Path, alone: Path) -> None:
    put(tmp_path / "BIRDS", content(), version)
    path = tmp_path / "BIRDS" / "res101.mat"
    whole = path.read_bytes()
    for damaged in (b"", b"no MATLAB file" * 100, whole[: len(whole) // 2], whole[:600]):
        path.write_bytes(damaged)
        with pytest.raises(rkr.FileError, match=r"res101\.mat: (damaged, or not a MATLAB file|no variable)"):
            load_xlsa17("BIRDS", tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(rkr.FileError, match=r"res101\.mat: cannot be read"):
        load_xlsa17("BIRDS", tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Checks

GONE = object()


def with_value(name: str, at: tuple[int, int], value: float) -> Any:
    """A change of one number."""

    def change(made: Content) -> Content:
        array = made[name].copy()
        array[at] = value
        return {name: array}

    return change


def moved(name: str, other: str) -> Any:
    """The first row of one part also in another."""
    return lambda made: {other: np.concatenate((made[name][:1], made[other]))}


def only(name: str, *labels: int) -> Any:
    """A part without the rows of all but some classes."""
    return lambda made: {name: made[name][np.isin(made["labels"][made[name][:, 0].astype(int) - 1, 0], labels)]}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"features": GONE}, r"res101\.mat: no variable 'features'; the file has labels"),
        ({"labels": GONE}, r"res101\.mat: no variable 'labels'"),
        ({"att": GONE}, r"att_splits\.mat: no variable 'att'; the file has allclasses_names, .*, sent, "),
        ({"trainval_loc": GONE}, r"att_splits\.mat: no variable 'trainval_loc'"),
        ({"test_unseen_loc": GONE}, r"att_splits\.mat: no variable 'test_unseen_loc'"),
        (
            {"features": cell(["a", "b"])},
            r"res101\.mat: 'features' must be a matrix of numbers, but has another type",
        ),
        ({"att": {"a": 1.0}}, r"att_splits\.mat: 'att' must be a matrix of numbers, but has another type"),
        ({"features": np.zeros((2, 3, 4))}, r"'features' must be a matrix of numbers, but has 3 dimensions"),
        (
            {"features": np.zeros((5, 70), dtype=complex)},
            r"'features' must be a matrix of numbers, but has another type",
        ),
        ({"features": np.zeros((5, 69))}, r"'features' must be dimensions x samples; it is 5 x 69, but .* 70 samples$"),
        ({"features": np.zeros((70, 5))}, r"it is 70 x 5, but 'labels' has 70 samples: it looks transposed"),
        ({"features": np.zeros((0, 70))}, r"res101\.mat: 'features' is empty: 0 x 70"),
        ({"labels": np.ones((35, 2))}, r"res101\.mat: 'labels' must be one column, but is 35 x 2"),
        (with_value("features", (2, 3), np.nan), r"res101\.mat: 'features' has values that are NaN, infinite"),
        (with_value("features", (2, 3), -np.inf), r"res101\.mat: 'features' has values that are NaN, infinite"),
        (with_value("features", (2, 3), 1e39), r"res101\.mat: 'features' has values .* too large for float32"),
        (
            with_value("features", (2, 3), -3e38),
            r"res101\.mat: 'features' has values up to 3e\+38, but at most 1e\+18 is",
        ),
        (
            with_value("att", (0, 7), 1e30),
            r"att_splits\.mat: 'att' has values up to 1e\+30, but at most 10000 is allowed",
        ),
        (with_value("att", (0, 7), np.nan), r"att_splits\.mat: 'att' has values that are NaN, infinite"),
        (with_value("labels", (4, 0), 1.5), r"res101\.mat: 'labels' must be whole numbers"),
        (with_value("labels", (4, 0), np.nan), r"res101\.mat: 'labels' must be whole numbers"),
        (with_value("labels", (4, 0), np.inf), r"res101\.mat: 'labels' must be whole numbers"),
        (with_value("labels", (4, 0), 0), r"res101\.mat: 'labels' must be classes 1, 2, \.\.\., but has 0"),
        (
            with_value("labels", (4, 0), 9),
            r"res101\.mat: 'labels' has class 9, but 'att' of .*att_splits\.mat describes only 8: it must be "
            r"attributes x classes and is 3 x 8$",
        ),
        (
            {"att": np.zeros((8, 3)), "allclasses_names": GONE},
            r"'labels' has class 7, .* only 3: it must be attributes x classes and is 8 x 3; it looks transposed",
        ),
        (
            {"att": np.zeros((8, 30))},
            r"'att' must be attributes x classes; it is 8 x 30, but allclasses_names has 8 .*: it looks transposed",
        ),
        (
            {"allclasses_names": cell(["a", "b"])},
            r"att_splits\.mat: 'att' describes 8 classes, but allclasses_names has 2$",
        ),
        (
            with_value("trainval_loc", (0, 0), 0),
            r"att_splits\.mat: 'trainval_loc' must have rows from 1 to 70, but has 0",
        ),
        (with_value("test_seen_loc", (0, 0), 71), r"'test_seen_loc' must have rows from 1 to 70, but has 71"),
        (with_value("val_loc", (0, 0), 71), r"'val_loc' must have rows from 1 to 70, but has 71"),
        (with_value("test_unseen_loc", (0, 0), 2.5), r"'test_unseen_loc' must be whole numbers"),
        (moved("trainval_loc", "trainval_loc"), r"att_splits\.mat: 'trainval_loc' has row \d+ more than once"),
        (moved("trainval_loc", "test_seen_loc"), r"row \d+ is both in 'trainval_loc' and in 'test_seen_loc'"),
        (moved("trainval_loc", "test_unseen_loc"), r"row \d+ is both in 'trainval_loc' and in 'test_unseen_loc'"),
        (moved("test_seen_loc", "test_unseen_loc"), r"row \d+ is both in 'test_seen_loc' and in 'test_unseen_loc'"),
        (
            lambda made: {
                "trainval_loc": np.concatenate((made["trainval_loc"], made["test_unseen_loc"][:1])),
                "test_unseen_loc": made["test_unseen_loc"][1:],
            },
            r"att_splits\.mat: class 2 is both seen \('trainval_loc'\) and unseen \('test_unseen_loc'\)",
        ),
        (only("trainval_loc", 4, 5, 7), r"class 1 of 'test_seen_loc' has no training rows in 'trainval_loc'"),
        (
            {"trainval_loc": np.zeros((0, 1))},
            r"att_splits\.mat: 'trainval_loc' has no rows, so the training set is empty",
        ),
        (
            {"test_seen_loc": np.zeros((0, 1))},
            r"att_splits\.mat: 'test_seen_loc' has no rows, so the seen set is empty",
        ),
        (
            {"test_unseen_loc": np.zeros((0, 0))},
            r"att_splits\.mat: 'test_unseen_loc' has no rows, so the unseen set is empty",
        ),
        (
            {"att": np.zeros((3, 8))},
            r"att_splits\.mat: 'att' describes class 1 \(001\.M.*\) and class 2 \(002\.M.*\) by the same values",
        ),
        (moved("val_loc", "train_loc"), r"att_splits\.mat: class 5 is both in 'train_loc' and in 'val_loc'"),
        (lambda made: {"val_loc": made["test_unseen_loc"]}, r"class 2 of 'val_loc' has no training rows in 'trainval"),
        ({"val_loc": np.zeros((0, 1))}, r"'val_loc' has 0 of 4 seen classes; it must have some, but not all"),
        (
            lambda made: {"train_loc": made["test_unseen_loc"], "val_loc": made["trainval_loc"]},
            r"'val_loc' has 4 of 4 seen classes; it must have some, but not all",
        ),
    ],
)
@pytest.mark.parametrize("version", WRITERS)
def test_checks(change: Any, match: str, version: str, tmp_path: Path, alone: Path) -> None:
    made = content()
    made |= change(made) if callable(change) else change
    put(tmp_path / "BIRDS", {name: value for name, value in made.items() if value is not GONE}, version)
    with pytest.raises(rkr.FileError, match=match) as it:
        load_xlsa17("BIRDS", tmp_path)
    assert "\n" not in str(it.value)


def test_a_class_in_no_split_is_named(tmp_path: Path, alone: Path) -> None:
    """It is left out, as its attributes alone would be."""
    put(tmp_path / "BIRDS", content())
    with pytest.warns(DataWarning, match=r"att_splits\.mat: no split has rows of class 3 \(003\.M.*\); skipped"):
        source = load_xlsa17("BIRDS", tmp_path)
    assert source.numbers == (1, 2, 4, 5, 6, 7)
    made = content()
    made["labels"][:5] = 8
    kept = {f"{name}_loc": np.setdiff1d(made[f"{name}_loc"], np.arange(1, 6)) for name in PARTS}
    put(tmp_path / "FISH", {n: v for n, v in (made | kept).items() if n not in ("train_loc", "val_loc")})
    with pytest.warns(DataWarning, match=r"no split has rows of class 3 \(003\.M.*\), 8 \(008\.M.*\); skipped"):
        load_xlsa17("FISH", tmp_path)


def test_unknown_embedding(tmp_path: Path, alone: Path) -> None:
    put(tmp_path / "BIRDS", content())
    with pytest.raises(
        rkr.FileError, match=r"att_splits\.mat: no variable 'w2v'; the file has allclasses_names, att, "
    ):
        load_xlsa17("BIRDS", tmp_path, embedding="w2v")


# ---------------------------------------------------------------------------------------------------------
# Validation


def ids(source: ZeroShotSource, part: str) -> set[int]:
    """The rows of the original source, which dimension 0 has."""
    return {int(i) for i in source.features[getattr(source, part), 0]}


def check_validation(source: ZeroShotSource, seed: int) -> ZeroShotSource:
    """What holds for every source whose dimension 0 is the row."""
    made = validation_source(source, seed)
    parts = [ids(made, part) for part in PARTS]
    assert set.union(*parts) == set(source.trainval.tolist())  # and so no test row
    assert sum(map(len, parts)) == len(source.trainval) == len(made.features)
    assert made.name == source.name
    assert made.numbers == tuple(source.numbers[label] for label in source.seen)
    assert made.class_names == tuple(source.class_names[label] for label in source.seen)
    assert torch.equal(made.attributes, source.attributes[list(source.seen)])
    for i, label in zip(made.features[:, 0].long().tolist(), made.labels.tolist(), strict=True):
        assert torch.equal(made.features[made.features[:, 0] == i][0], source.features[i])
        assert made.numbers[label] == source.numbers[source.labels[i]]
    assert set(made.seen).isdisjoint(made.unseen)
    assert sorted((*made.seen, *made.unseen)) == list(range(len(made.class_names)))
    for part in (made.trainval, made.test_seen):
        assert set(made.labels[part].tolist()) == set(made.seen)
    for value in tensors(made).values():
        others = [other.untyped_storage().data_ptr() for other in tensors(source).values()]
        assert value.untyped_storage().data_ptr() not in others
    return made


def test_published_validation_classes(source: ZeroShotSource, tmp_path: Path) -> None:
    made = check_validation(source, 0)
    assert made.unseen == (2,)  # class 5 as published, class 3 in the source
    assert [len(getattr(made, part)) for part in PARTS] == [3 * 6, 3 * 2, 8]
    assert made.validation_classes is None
    assert_equal(made, validation_source(source, 0))
    other = check_validation(source, 1)
    assert other.unseen == made.unseen
    assert ids(other, "test_seen") != ids(made, "test_seen")


def test_published_validation_rows_are_a_trap(source: ZeroShotSource, tmp_path: Path) -> None:
    """The rows of train_loc and val_loc are also test rows; nothing of them is used but their classes."""
    published = loadmat(tmp_path / "BIRDS" / "att_splits.mat")
    for name, count in (("train_loc", 6), ("val_loc", 2)):
        assert len(np.intersect1d(published[name], published["test_seen_loc"])) == count
    tests = {*source.test_seen.tolist(), *source.test_unseen.tolist()}
    made = validation_source(source)
    for part in PARTS:
        assert ids(made, part).isdisjoint(tests)


def test_validation_does_not_depend_on_test_rows(source: ZeroShotSource) -> None:
    for without in (source, dataclasses.replace(source, validation_classes=None)):
        features, labels = without.features.clone(), without.labels.clone()
        features[torch.cat((without.test_seen, without.test_unseen))] = 1e9
        labels[without.test_seen] = 0
        attributes = without.attributes.clone()
        attributes[list(without.unseen)] = 1e9
        spoilt = dataclasses.replace(without, features=features, labels=labels, attributes=attributes)
        assert_equal(validation_source(spoilt, 3), validation_source(without, 3))


@pytest.mark.parametrize(
    ("seen", "unseen", "held_out"), [(12, 8, 5), (150, 50, 38), (10, 1, 1), (40, 1, 1), (3, 9, 1), (6, 94, 4)]
)
def test_random_validation_classes(seen: int, unseen: int, held_out: int) -> None:
    """As large a share of the seen classes as the unseen ones are of all, but 1 at least and all but 2 at most."""
    rows = torch.arange(5 * (seen + unseen))
    labels = torch.randperm(seen + unseen, generator=torch.Generator().manual_seed(0)).repeat(5)
    x = torch.stack((rows.float(), torch.rand(len(rows))), 1)
    is_seen, first = labels < seen, rows < seen + unseen
    source = ZeroShotSource(
        "X",
        tuple(f"c{i}" for i in range(seen + unseen)),
        tuple(range(1, seen + unseen + 1)),
        x,
        labels,
        torch.rand(seen + unseen, 3),
        rows[is_seen & ~first],
        rows[is_seen & first],
        rows[~is_seen],
    )
    made = check_validation(source, 0)
    assert len(made.unseen) == held_out
    assert made.labels[made.test_seen].bincount().max() == 1  # of 4
    chosen = {validation_source(source, seed).unseen for seed in range(8)}
    assert len(chosen) > 1


def test_validation_of_small_classes(source: ZeroShotSource) -> None:
    """Two rows are one to train on and one to test on; a single row is for training."""
    y = source.labels[source.trainval]
    keep = torch.cat([(y == label).nonzero().squeeze(1)[:count] for label, count in ((0, 1), (2, 2), (3, 3), (5, 8))])
    tested = source.test_seen[source.labels[source.test_seen] == 0][:1]
    made = validation_source(dataclasses.replace(source, trainval=source.trainval[keep], test_seen=tested))
    assert made.labels[made.trainval].bincount().tolist() == [1, 1, 0, 6]
    assert made.labels[made.test_seen].bincount().tolist() == [0, 1, 0, 2]
    assert made.labels[made.test_unseen].bincount().tolist() == [0, 0, 3]
    single = torch.cat([(y == label).nonzero().squeeze(1)[:1] for label in (0, 2, 3, 5)])
    with pytest.raises(rkr.UsageError, match="a seen class with at least 2 training rows"):
        validation_source(dataclasses.replace(source, trainval=source.trainval[single], test_seen=tested))


def test_validation_needs_classes(source: ZeroShotSource) -> None:
    for classes in ((), (1,), source.seen):
        with pytest.raises(rkr.UsageError, match="must be some of the seen classes, but not all"):
            validation_source(dataclasses.replace(source, validation_classes=classes))
    rows = [torch.tensor(part) for part in ([0, 1], [2], [3])]
    labels = torch.tensor([0, 1, 0, 2])
    two = ZeroShotSource("X", ("a", "b", "c"), (1, 2, 3), torch.rand(4, 2), labels, torch.eye(3), *rows)
    with pytest.raises(rkr.UsageError, match="needs at least 3 seen classes, not 2"):
        validation_source(two)


def test_all_missing_data_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(rkr.FileError, match=r"^APY: APY/res101\.mat not found .* Also missing: AWA1, SUN$"):
        require_files(("APY", "AWA1", "SUN"), tmp_path, "res101")
    with pytest.raises(rkr.FileError, match=r"^APY: .* put it in xlsa17/data/APY[^.]*$"):
        require_files(("APY",), tmp_path, "res101")
    with pytest.raises(rkr.UsageError, match=r"name the feature file without \.mat: 'res101'"):
        require_files(("APY",), tmp_path, "res101.mat")


# ---------------------------------------------------------------------------------------------------------
# Streams


def test_stream(source: ZeroShotSource) -> None:
    other = dataclasses.replace(validation_source(source), name="FEW")
    stream = zero_shot_stream([source, other], scaler="none")
    assert stream.name == "zero-shot"
    assert [task.name for task in stream.tasks] == ["BIRDS", "FEW"]
    assert (stream.mean, stream.std, stream.input_shape) == ((), (), (5,))
    assert stream.order == ((1, 2, 4, 5, 6, 7), (1, 4, 5, 7))
    assert stream.measures == ("H", "U", "S")
    for task, made in zip(stream.tasks, (source, other), strict=True):
        training = task.training
        rows = torch.cat((made.test_seen, made.test_unseen))
        assert torch.equal(training.train.x, made.features[made.trainval])
        assert torch.equal(training.train.y, made.labels[made.trainval])
        assert torch.equal(task.test.x, made.features[rows])
        assert torch.equal(task.test.y, made.labels[rows])
        assert training.validation is None
        assert training.attributes is not None
        assert torch.equal(training.attributes, made.attributes)
        assert (training.unseen, training.class_names) == (made.unseen, made.class_names)
    assert stream.describe()["tasks"][0]["images"] == {"train": 32, "test": 28}
    assert stream.describe() == zero_shot_stream([source, other], scaler="none").describe()


def test_scalers_are_those_of_sklearn(source: ZeroShotSource) -> None:
    before = source.features.clone()
    train, seen, unseen = (source.features[getattr(source, part)].numpy() for part in PARTS)

    def scaled(scaler: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        (task,) = zero_shot_stream([source], scaler).tasks
        x = task.test.x.numpy()
        assert x.dtype == np.float32
        return task.training.train.x.numpy(), x[: len(seen)], x[len(seen) :]

    def close(made: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(made, expected, rtol=0, atol=5e-7)

    fitted = MinMaxScaler().fit(train)
    made = scaled("train")
    for part, raw in zip(made, (train, seen, unseen), strict=True):
        close(part, fitted.transform(raw))
    assert (made[0].min(0) == 0).all()
    assert made[0].max(0).tolist() == [1, 0, 1, 1, 1]  # dimension 1 is constant
    assert min(made[1].min(), made[2].min()) < 0  # tests are not clipped
    assert max(made[1].max(), made[2].max()) > 1
    for part, raw in zip(scaled("each"), (train, seen, unseen), strict=True):
        close(part, MinMaxScaler().fit_transform(raw))
        assert (part.min(), part.max()) == (0, 1)
    for part, raw in zip(scaled("none"), (train, seen, unseen), strict=True):
        assert np.array_equal(part, raw)
    assert torch.equal(source.features, before)


def test_scaler_of_nearly_constant_dimensions(source: ZeroShotSource) -> None:
    """A constant of the training rows that tests do not keep to, and one that is constant but for rounding."""
    x = source.features.clone()
    x[source.test_unseen, 1] = 9
    x[:, 2] = 1e-8 * torch.rand(len(x))
    changed = dataclasses.replace(source, features=x)
    (task,) = zero_shot_stream([changed]).tasks
    fitted = MinMaxScaler().fit(x[source.trainval].numpy())
    np.testing.assert_allclose(
        task.test.x[:, 1:3], fitted.transform(x[torch.cat((source.test_seen, source.test_unseen))])[:, 1:3], atol=1e-7
    )
    assert task.test.x[:, 1].unique().tolist() == [0, 2]
    assert task.test.x[:, 2].abs().max() < 1e-7


def test_training_does_not_depend_on_test_rows(source: ZeroShotSource) -> None:
    """With the scalers "train" and "none", no test feature reaches the learner; with "each" only tests are affected."""
    spoilt = source.features.clone()
    spoilt[torch.cat((source.test_seen, source.test_unseen))] = 1e6
    for scaler in ("train", "each", "none"):
        clean, other = (
            zero_shot_stream([dataclasses.replace(source, features=x)], scaler) for x in (source.features, spoilt)
        )
        assert torch.equal(clean.tasks[0].training.train.x, other.tasks[0].training.train.x)


def test_stream_errors(source: ZeroShotSource) -> None:
    narrow = dataclasses.replace(source, name="FEW", features=source.features[:, :3])
    with pytest.raises(rkr.UsageError, match="features of BIRDS have 5 dimensions, those of FEW 3"):
        zero_shot_stream([source, narrow])
    for twin in (source, validation_source(source)):
        with pytest.raises(rkr.UsageError, match="BIRDS occurs twice"):
            zero_shot_stream([source, twin])
    with pytest.raises(rkr.UsageError, match="scaler must be one of train, each, none, not 'all'"):
        zero_shot_stream([source], "all")
    with pytest.raises(rkr.UsageError, match="no tasks"):
        zero_shot_stream([])


# ---------------------------------------------------------------------------------------------------------
# Real data

KNOWN = {  # classes seen and unseen, rows, attributes, classes of the validation source
    "CUB": ((150, 50), (7057, 1764, 2967), 312, (100, 50)),
    "FLO": ((82, 20), (5631, 1403, 1155), 1024, (62, 20)),
    "aPascal": ((12, 8), (4534, 1135, 7015), 64, (7, 5)),
}


@pytest.fixture(scope="module")
def real() -> dict[str, ZeroShotSource]:
    missing = [name for name in KNOWN if not (REAL / name / "efflite2.mat").is_file()]
    if missing:
        pytest.skip(f"$RKR_DATA has no xlsa17/data/{missing[0]}/efflite2.mat")
    return {name: load_xlsa17(name, REAL, features="efflite2") for name in KNOWN}


@pytest.mark.parametrize("name", KNOWN)
def test_real_numbers(name: str, real: dict[str, ZeroShotSource]) -> None:
    source = real[name]
    classes, rows, attributes, held_out = KNOWN[name]
    assert (len(source.seen), len(source.unseen)) == classes
    assert tuple(len(getattr(source, part)) for part in PARTS) == rows
    assert source.features.shape == (sum(rows), 1280)
    assert source.attributes.shape == (sum(classes), attributes)
    assert source.numbers == tuple(range(1, sum(classes) + 1))
    assert int(source.labels.min()) == 0
    assert (source.validation_classes is None) == (name == "aPascal")
    made = validation_source(source)
    assert (len(made.seen), len(made.unseen)) == held_out
    assert sum(len(getattr(made, part)) for part in PARTS) == len(made.features) == rows[0]
    assert torch.equal(made.features, source.features[source.trainval])


def test_real_names(real: dict[str, ZeroShotSource]) -> None:
    assert real["CUB"].class_names[0] == "002.Laysan_Albatross"
    assert real["FLO"].class_names[-1] == "class 102"
    assert real["aPascal"].class_names[:2] == ("aeroplane", "bicycle")


def test_real_trap(real: dict[str, ZeroShotSource]) -> None:
    """1173 of the 5875 rows that CUB has for choosing hyper-parameters are rows of the test."""
    source = real["CUB"]
    published = loadmat(REAL / "CUB" / "att_splits.mat", variable_names=["train_loc", "val_loc"])
    train, held_out = (
        torch.from_numpy(published[name].astype(np.int64).ravel() - 1) for name in ("train_loc", "val_loc")
    )
    assert len(train) == 5875
    assert int(torch.isin(train, source.test_seen).sum()) == 1173
    assert set(source.labels[held_out].tolist()) == set(source.validation_classes or ())
    made = validation_source(source)
    expected = source.trainval[torch.isin(source.labels[source.trainval], source.labels[held_out])]
    assert torch.equal(made.features[made.test_unseen], source.features[expected])
    assert len(made.test_unseen) == 2355 < len(held_out)


def test_real_stream(real: dict[str, ZeroShotSource]) -> None:
    stream = zero_shot_stream(list(real.values()))
    assert [len(group) for group in stream.order] == [200, 102, 20]
    for task in stream.tasks:
        x = task.training.train.x
        assert (float(x.min()), float(x.max())) == (0, 1)
        assert float(task.test.x.max()) > 1


def test_real_features_that_are_missing(real: dict[str, ZeroShotSource]) -> None:
    with pytest.raises(rkr.FileError, match=re.escape("CUB has other features: efflite2.")):
        load_xlsa17("CUB", REAL)

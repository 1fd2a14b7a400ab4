"""Tables for ``attlas regress``: the csv module of the standard library writes them, and says what is in them."""

import csv
import io
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attlas.cli.regress_cells import is_number, numbers
from attlas.cli.regress_csv import Form, open_records
from attlas.cli.regress_table import open_table, read_table
from attlas.cli.terminal import UsageError
from attlas.errors import AttlasError

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)


def read(path: Path, features: list[str], target: str, form: Form | None = None, drop: bool = False) -> np.ndarray:
    with open_table(path, form or Form()) as table:
        return read_table(table, features, target, drop_missing=drop).numbers


def refused(path: Path, features: list[str], target: str, form: Form | None = None, drop: bool = False) -> str:
    with pytest.raises(AttlasError) as caught:
        read(path, features, target, form, drop)
    return str(caught.value)


def put(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "data.csv"
    path.write_bytes(text.encode(encoding))
    return path


# ------------------------------------------------------------------------------------------------- what can be read


@quick
@given(
    rows=st.lists(st.tuples(finite, words, finite), min_size=1, max_size=8),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_what_csv_writes_is_read(
    tmp_path: Path, rows: list[tuple[float, str, float]], delimiter: str, quoting: int, end: str, encoding: str
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=end)
    writer.writerows([("a", "note, or; not", "y"), *rows])
    path = put(tmp_path, text.getvalue(), encoding)
    for given_delimiter in (None, delimiter):
        found = read(path, ["a"], "y", Form(delimiter=given_delimiter))
        np.testing.assert_array_equal(found, [[a, y] for a, _, y in rows])


@quick
@given(rows=st.lists(st.tuples(finite, finite), min_size=1, max_size=8), header=st.booleans())
def test_decimal_commas_are_read_when_asked_for(tmp_path: Path, rows: list[tuple[float, float]], header: bool) -> None:
    lines = [";".join(repr(value).replace(".", ",") for value in row) for row in rows]
    path = put(tmp_path, "\n".join((["a;y"] if header else []) + lines))
    names = ("a", "y") if header else ("1", "2")
    np.testing.assert_array_equal(read(path, [names[0]], names[1], Form(decimal=",")), rows)


@quick
@given(cell=st.one_of(words, st.text("0123456789.,eE+-_ ", max_size=8), finite.map(repr)))
def test_a_number_is_what_float_takes_and_nothing_stranger(cell: str) -> None:
    values, wrong = numbers([cell])
    assert wrong[0] == (not is_number(cell) or math.isinf(float(cell)))
    if is_number(cell):
        assert values[0] == float(cell) or wrong[0]
    else:
        assert math.isnan(values[0])
        allowed = set("0123456789.eE+- \t\n")
        if set(cell.strip()) <= allowed:
            with pytest.raises(ValueError):
                float(cell)


@quick
@given(cells=st.lists(st.sampled_from(["1", " 2.5 ", "-1e3", "NA", "", "1_000", "inf", "1e999", "x", "١"]), max_size=9))
def test_a_column_is_its_cells(cells: list[str]) -> None:
    values, wrong = numbers(cells)
    each = [numbers([cell]) for cell in cells]
    np.testing.assert_array_equal(values, [value[0] for value, _ in each])
    np.testing.assert_array_equal(wrong, [bad[0] for _, bad in each])


def test_blanks_may_stand_between_and_around(tmp_path: Path) -> None:
    path = put(tmp_path, "a  b   y\n  1  2  3\n4 5 6  \n\n 7   8 9\n")
    np.testing.assert_array_equal(read(path, ["a", "b"], "y"), [[1, 2, 3], [4, 5, 6], [7, 8, 9]])


def test_columns_without_names_are_called_by_their_places(tmp_path: Path) -> None:
    path = put(tmp_path, "2019,2020\n1,2\n3,4\n")
    np.testing.assert_array_equal(read(path, ["1"], "2"), [[2019, 2020], [1, 2], [3, 4]])
    np.testing.assert_array_equal(read(path, ["2019"], "2020", Form(header="yes")), [[1, 2], [3, 4]])
    assert "line 3, column 1" in refused(put(tmp_path, "\n\na,y\n1,2\n"), ["1"], "2", Form(header="no"))


def test_a_long_file_is_read_in_parts(tmp_path: Path) -> None:
    rows = [(i, i / 3) for i in range(70_000)]
    path = put(tmp_path, "a,y\n" + "".join(f"{a},{y!r}\n" for a, y in rows))
    with open_table(path, Form()) as table:
        assert table.parts() == 2
        sizes = [len(batch.numbers) for batch in table.batches(["a"], "y", drop_missing=False)]
    assert sizes == [65_536, 70_000 - 65_536]
    np.testing.assert_array_equal(read(path, ["a"], "y"), rows)
    bad = put(tmp_path, path.read_text() + "1,x\n")
    assert "line 70002, column y" in refused(bad, ["a"], "y")


def test_a_pipe_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffa;y\n1;2\n".encode())))
    np.testing.assert_array_equal(read(Path("-"), ["a"], "y"), [[1, 2]])


def test_missing_values_may_be_left_out(tmp_path: Path) -> None:
    path = put(tmp_path, "a,b,y\n1,,2\n3,x,NA\n5,y,6\n,z,8\nnull,z,?\n")
    with open_table(path, Form()) as table:
        found = read_table(table, ["a"], "y", drop_missing=True)
    np.testing.assert_array_equal(found.numbers, [[1, 2], [5, 6]])
    assert found.dropped == 3


def test_a_quoted_cell_may_hold_lines_and_errors_name_the_first(tmp_path: Path) -> None:
    path = put(tmp_path, 'note,a,y\n"one\ntwo",1,2\n"three\n\nfour",x,3\n')
    assert "data.csv: line 4, column a\n  found: 'x'\n" in refused(path, ["a"], "y")


# ---------------------------------------------------------------------------------------------------- what is refused

RULE = "regress: every cell that is used must be a number.\n"
REFUSED = [
    ("a,y\n1,2\n,4\n", Form(), RULE + "  data.csv: line 3, column a\n  found: an empty cell\n"
     "  fix: --drop-missing, which leaves such rows out"),
    ("a,y\n1,2\n3,n/a\n", Form(), RULE + "  data.csv: line 3, column y\n  found: 'n/a', a missing value\n"
     "  fix: --drop-missing, which leaves such rows out"),
    ("a;y\n1;2\n3,5;4\n", Form(), RULE + "  data.csv: line 3, column a\n  found: '3,5', which has a comma\n"
     "  fix: --decimal , if the comma is the decimal sign"),
    ("a;y\n1,5;2\n1.234;4\n", Form(decimal=","), RULE + "  data.csv: line 3, column a\n"
     "  found: '1.234', which has a point and no comma\n  fix: --decimal . if the point is the decimal sign"),
    ("a,y\n1e400,2\n", Form(), RULE + "  data.csv: line 2, column a\n"
     "  found: '1e400', which is beyond the range of float64\n  fix: a file whose columns hold numbers"),
    ("a,b,y\n1,2,3\n4,Rome,5\n", Form(), RULE + "  data.csv: line 3, column b\n  found: 'Rome'\n  fix: --features a"),
    ("a,y\n1,2\n4,high\n", Form(), RULE + "  data.csv: line 3, column y\n  found: 'high'\n"
     "  fix: another --target, or numbers in that column"),
    ("a,y\n1,2\n3\n", Form(), "regress: every row must have as many cells as the first.\n  data.csv: line 3\n"
     "  found: 1 cell, 2 columns (the delimiter is ',')\n  fix: mend that row, or name another --delimiter"),
    ("a,y\n1,2\n3,4,5\n", Form(), "regress: every row must have as many cells as the first.\n  data.csv: line 3\n"
     "  found: 3 cells, 2 columns (the delimiter is ',')\n  fix: mend that row, or name another --delimiter"),
    ('a,y\n1,2\n"3,4\n5,6\n', Form(), "regress: quotes must enclose whole cells, and be closed.\n  data.csv: line 3\n"
     "  found: unexpected end of data\n  fix: write a quote within quotes twice"),
    ("", Form(), "regress: the table must not be empty.\n  found: data.csv has no text\n"
     "  fix: a file with a header and some rows"),
    ("\n \n", Form(), "regress: the table must not be empty.\n  found: data.csv has no text\n"
     "  fix: a file with a header and some rows"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "form", "told"), REFUSED)
def test_what_is_no_table_of_numbers_is_refused(tmp_path: Path, text: str, form: Form, told: str) -> None:
    features = [name for name in ("a", "b") if name in text.partition("\n")[0]] or ["a"]
    assert refused(put(tmp_path, text), features, "y", form) == told


def test_other_encodings_are_named(tmp_path: Path) -> None:
    path = put(tmp_path, "größe,y\n1,2\n", "latin1")
    assert refused(path, ["größe"], "y") == (
        "regress: the table must be text in UTF-8.\n  found: byte 0xf6 in data.csv\n"
        f"  fix: iconv -f latin1 -t utf-8 {path} > table.csv"
    )


def test_a_file_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    assert refused(path, ["a"], "y") == (
        "regress: the table must be a file that can be read.\n"
        f"  found: No such file or directory: {path}\n  fix: a file that exists"
    )


@quick
@given(text=st.text(st.sampled_from('ay1.5,;"\n\r\t |é\0'), max_size=40))
def test_no_text_breaks_the_reader(tmp_path: Path, text: str) -> None:
    """Either a table of even rows, or an error in words; the cells are those that csv finds."""
    path = put(tmp_path, text)
    try:
        with open_records(path, Form()) as records:
            rows = [cells for _, cells in records.rows]
    except UsageError:  # anything else is a crash
        return
    assert all(len(row) == len(records.names) for row in rows)
    known = csv.reader(io.StringIO(text, newline=""), delimiter=records.delimiter, strict=True, skipinitialspace=True)
    expected = [cells for cells in known if cells and (len(cells) > 1 or cells[0].strip())]
    if records.delimiter != " ":
        assert rows == expected[records.named :]


# ------------------------------------------------------------------------------------------------------------ Parquet


def test_parquet_is_read_as_the_same_numbers(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="Parquet is read through polars or pyarrow")
    path = tmp_path / "data.parquet"
    frame = {"a": [1.5, None, 3.0], "b": [True, False, True], "y": [1, 2, 3], "city": ["x", "y", "z"]}
    polars.DataFrame(frame).write_parquet(path)
    np.testing.assert_array_equal(read(path, ["b", "a"], "y", drop=True), [[1, 1.5, 1], [1, 3.0, 3]])
    assert refused(path, ["b", "a"], "y") == (
        RULE + "  data.parquet: row 2, column a\n  found: a missing value\n"
        "  fix: --drop-missing, which leaves such rows out"
    )
    assert refused(path, ["city", "b"], "y") == (
        RULE + "  data.parquet: column city\n  found: the column holds string\n  fix: --features b"
    )
    path.write_text("a,y\n1,2\n")
    assert refused(path, ["a"], "y").startswith("regress: the file must be Parquet.\n")

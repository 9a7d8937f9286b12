"""Classes of images that are not told by folders: by a pattern of their names, or from a table beside them.

- a pattern is a regular expression that is searched in each name below the folder; its group `class` is the class
- a table is a CSV or TSV file with a first line of column names; one column names images, with or without their folders
  and suffix, another their class. Rows of images that are elsewhere do not matter, images without a row do
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TextIO

from vitrail.data.files.paths import base_name, open_file
from vitrail.data.sources import IMAGE_SUFFIXES
from vitrail.errors import BadData, UserError
from vitrail.foreign import read_pattern, search_all

TABLES = (".csv", ".tsv")
MOST_LINE = 2**20  # characters of a line
MOST_ROWS = 2000  # of a table whose columns are looked into
MOST_SHOWN = 40  # columns of a table, and letters of each, in an error
# Columns of tables as they are usually called, in lower case and without what is no letter.
IMAGE_COLUMNS = (
    "image", "filename", "file", "imagename", "imageid", "imagepath", "filepath", "imagefile", "path", "name", "img",
    "idcode", "id",
)  # fmt: skip
CLASS_COLUMNS = ("class", "label", "classname", "labelname", "category", "target", "diagnosis", "species", "breed", "y")


def classes_by_pattern(pattern: str, names: Sequence[str], path: str) -> list[str]:
    """Return the class of each image, which a regular expression finds in its name."""
    where = f"class_pattern = {pattern!r}"
    try:
        groups = read_pattern(pattern).groupindex
    except ValueError as error:
        raise UserError(f"{where} is no regular expression ({error}); mend it") from error
    if "class" not in groups:
        raise UserError(f"{where} has no group called class; mark what the class is, such as (?P<class>cat|dog)")
    found = search_all(pattern, names, "class", where=where)
    lost = [name for name, each in zip(names, found, strict=True) if not each]
    if lost:
        raise UserError(
            f"{where} finds no class in {len(lost)} of {len(names)} names of images of {path}, such as {lost[0]!r}; "
            "mend it, or name the others alone with stars in `path`"
        )
    return [str(each) for each in found]


def classes_by_table(table: str, columns: tuple[str, str] | None, names: Sequence[str], path: str) -> list[str]:
    """Return the class of each image, which a row of a table tells."""
    wanted = {form for name in names for form in _spellings(name)}  # all that is kept of a table of any length
    known: dict[str, str] = {}
    several: set[str] = set()  # names without folder or suffix that other images have, too
    whole: dict[str, str] = {}
    folders: dict[str, set[str]] = {}  # of the images of a name without folder
    for name in names:
        for form in _spellings(base_name(name)):
            folders.setdefault(form, set()).add(name.rpartition("/")[0])
    several |= {form for form, some in folders.items() if len(some) > 1}
    unclear: set[str] = set()  # of those, the ones that rows give more than one class
    for line, (image, label) in read_columns(table, columns):
        forms = _spellings(image)
        if forms[0] in wanted and whole.setdefault(forms[0], label) != label:
            before = whole[forms[0]]
            raise UserError(
                f"{table}, line {line}: {image!r} is {label!r}, but {before!r} before; give each image one class"
            )
        for name in forms:
            if name in wanted and known.setdefault(name, label) != label:
                several.add(name)
                unclear.add(name)
    found = [next((known[n] for n in _spellings(name) if n in known and n not in several), "") for name in names]
    lost = [name for name, each in zip(names, found, strict=True) if not each]
    if lost:
        tells, remedy = "no class", "add their rows"
        if unclear.intersection(_spellings(lost[0])):
            tells, remedy = "no single class", "give each one class, in a row with its folder below that of the images"
        raise UserError(
            f"class_table = {table!r} tells {tells} of {len(lost)} of the {len(names)} images of {path}, such as "
            f"{lost[0]!r}; {remedy}, say which columns count with class_columns, or name the others alone with "
            "stars in `path`"
        )
    return found


def _spellings(name: str) -> list[str]:
    """List the ways to write the name of an image, the longest first."""
    name = name.replace("\\", "/").removeprefix("./")
    forms = [name, base_name(name)]
    shorter = [form.rpartition(".")[0] for form in forms if form.lower().endswith(IMAGE_SUFFIXES)]
    return list(dict.fromkeys((forms[0], *shorter[:1], forms[1], *shorter[1:])))


def read_columns(table: str, columns: tuple[str, str] | None) -> Iterator[tuple[int, tuple[str, str]]]:
    """Read the lines of a table that name an image and its class, each with its number."""
    try:
        with open_file(table) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            first = text.readline(MOST_LINE)
            head = next(csv.reader([first], delimiter=_delimiter(first)), [])
            chosen = _choose([name.strip() for name in head], columns, table)
            rows = csv.reader(_lines(text, table), delimiter=_delimiter(first))
            for row in rows:
                if not row:
                    continue
                if len(row) <= max(chosen):
                    raise BadData(
                        f"{table}, line {rows.line_num + 1}: {len(row)} values, but there are {len(head)} columns; "
                        "restore it"
                    )
                image, label = (row[number].strip() for number in chosen)
                if image and label:
                    yield rows.line_num + 1, (image, label)
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadData(f"{table} is no table of text in UTF-8 ({error}); restore or convert it") from error


def guess_columns(table: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Find the columns of a table by what is in them: names of images, and few other words; None if that is unclear."""
    wanted = {form for name in names for form in _spellings(name)}
    try:
        with open_file(table) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            first = text.readline(MOST_LINE)
            head = [name.strip() for name in next(csv.reader([first], delimiter=_delimiter(first)), [])]
            rows = list(islice(csv.reader(_lines(text, table), delimiter=_delimiter(first)), MOST_ROWS))
    except (csv.Error, UnicodeDecodeError, BadData):
        return None
    columns = [[row[number].strip() for row in rows if len(row) == len(head)] for number in range(len(head))]
    known = [sum(any(form in wanted for form in _spellings(word)) for word in column) for column in columns]
    if not rows or len(set(head)) < len(head) or not any(known):
        return None
    image = known.index(max(known))
    plain = [re.sub(r"[^a-z]", "", name.lower()) for name in head]
    usual = [n for n, name in enumerate(plain) if n != image and name in CLASS_COLUMNS]
    few = [n for n, column in enumerate(columns) if n != image and 1 < len(set(column)) <= max(2, len(column) // 2)]
    chosen = usual if len(usual) == 1 else few
    return (head[image], head[chosen[0]]) if len(chosen) == 1 else None


def _lines(text: TextIO, table: str) -> Iterator[str]:
    while line := text.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise BadData(f"{table} has a line of more than {MOST_LINE:,} characters, and is no table; restore it")
        yield line


def _delimiter(line: str) -> str:
    return max(",\t;", key=line.count)


def _choose(head: list[str], columns: tuple[str, str] | None, table: str) -> tuple[int, int]:
    """Return the numbers of the columns of images and classes."""
    shown = ", ".join(name[:MOST_SHOWN] for name in head[:MOST_SHOWN]) or "none"
    more = f" and {len(head) - MOST_SHOWN} more" if len(head) > MOST_SHOWN else ""
    has = f"{table} has the columns {shown}{more}"
    if columns is not None:
        lost = [name for name in columns if name not in head]
        if lost:
            raise UserError(f"class_columns = {list(columns)}: {has}, but no {lost[0]!r}; choose from these")
        return head.index(columns[0]), head.index(columns[1])
    plain = [re.sub(r"[^a-z]", "", name.lower()) for name in head]
    known = [next((name for name in usual if name in plain), "") for usual in (IMAGE_COLUMNS, CLASS_COLUMNS)]
    found = [plain.index(name) if plain.count(name) == 1 else None for name in known]
    if found[0] is None or found[1] is None:
        what = "images" if found[0] is None else "classes"
        raise UserError(
            f"class_table = {table!r}: which column is that of the {what} is not clear: {has}; say it with "
            "class_columns: [column of images, column of classes]"
        )
    return found[0], found[1]

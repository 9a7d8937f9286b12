"""The strict YAML reader and its writer: what words mean, what is refused, and the way there and back."""

import math
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vitrail.errors import UserError
from vitrail.recipe import yaml


def same(a, b) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def refusal(text: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        yaml.parse(text, "r.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-4", 1e-4),
        ("1e3", 1000.0),
        ("-1E+2", -100.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("2.0e-3", 2e-3),
        ("+12", 12),
        ("-7", -7),
        ("010", 10),
        ("-010", -10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-0x1F", "-0x1F"),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("12:30:00", "12:30:00"),
        ("190:20:30", "190:20:30"),
        ("2024-01-01", "2024-01-01"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("NO", "NO"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("tRUE", "tRUE"),
        ("null", None),
        ("~", None),
        ("", None),
        ("nUll", "nUll"),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("inf", "inf"),
        ("nan", "nan"),
        ("1e", "1e"),
        (".", "."),
        ("1.2.3", "1.2.3"),
        ("５", "５"),
        ("5%", "5%"),
        ("32/rank", "32/rank"),
        ("L/16", "L/16"),
        ("=", "="),
        ("'1e-4'", "1e-4"),
        ('"true"', "true"),
        ("|-\n  010", "010"),
    ],
)
def test_words_mean_what_yaml_12_says(word, value):
    assert same(yaml.parse(f"key: {word}"), {"key": value})


def test_nan_is_a_number():
    assert math.isnan(yaml.parse(".nan"))


def test_structures():
    text = "# a comment\na: {b: [1, 2.5, x], c: }\nd:\n- e: f\n  g: h\n- []\n"
    assert same(yaml.parse(text), {"a": {"b": [1, 2.5, "x"], "c": None}, "d": [{"e": "f", "g": "h"}, []]})
    assert yaml.parse("") is None
    assert yaml.parse("# nothing\n") is None
    assert yaml.parse("%YAML 1.2\n---\na: 1\n") == {"a": 1}
    assert yaml.parse(b"\xef\xbb\xbfa: 1") == {"a": 1}
    assert yaml.parse(b"a: 1\r\nb: 2\r\n") == {"a": 1, "b": 2}


def test_a_key_given_twice():
    assert refusal("run:\n  seed: 1\n  name: x\n  seed: 2\n") == (
        "r.yaml:4: key 'seed' is given twice, first on line 2; keep one"
    )
    assert refusal("{a: 1, 'a': 2}") == "r.yaml:1: key 'a' is given twice, first on line 1; keep one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5: a", "r.yaml:1: key '1.5' is not text; put it in quotes"),
        ("true: a", "r.yaml:1: key 'true' is not text; put it in quotes"),
        ("a: 1\n~: b", "r.yaml:2: key '~' is not text; put it in quotes"),
        ("? [a, b]\n: c", "r.yaml:1: a key must be a word, not a list, a mapping or an alias"),
        ("a: &x y\n*x : z", "r.yaml:2: a key must be a word, not a list, a mapping or an alias"),
        (
            "a: &x {b: 1}\nc:\n  <<: *x",
            "r.yaml:3: merge keys (<<) are not part of YAML 1.2; write the keys out or use extends",
        ),
    ],
)
def test_keys_are_words(text, message):
    assert refusal(text) == message


def test_whole_numbers_as_keys_are_text():
    assert yaml.parse("labels: {255: 1, 0: 0}") == {"labels": {"255": 1, "0": 0}}
    assert "'255'" in refusal("{255: 1, '255': 2}")


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("a: !!python/object/apply:os.system [x]", "!!python/object/apply:os.system"),
        ("a: 1\nb: !!str 5", "!!str"),
        ("a: !mine {}", "!mine"),
        ("a: ! x", "!"),
        ("!!map {a: 1}", "!!map"),
        ("!!set {a, b}", "!!set"),
    ],
)
def test_tags_are_refused(text, tag):
    line = text.count("\n") + 1
    assert refusal(text) == f"r.yaml:{line}: tags are not allowed, but {tag} is given; remove it"


def test_directives_and_second_documents_are_refused():
    words = "only YAML 1.2 without %TAG lines is read; remove the % lines"
    assert refusal("%YAML 1.1\n---\na: 1") == f"r.yaml:1: {words}"
    assert refusal("%TAG ! tag:x,2000:\n---\na: 1") == f"r.yaml:1: {words}"
    assert refusal("a: 1\n---\nb: 2\n") == "r.yaml:2: a second document starts here (---); a file holds one"


def test_aliases():
    tree = yaml.parse("a: &x [1, {b: 2}]\nc: *x\n")
    assert tree == {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}
    assert tree["a"] is not tree["c"]
    assert refusal("a: *x") == "r.yaml:1: alias *x has no anchor &x before it"
    assert refusal("a: &x [1, *x]") == "r.yaml:1: alias *x stands inside the value that it names"


def test_an_alias_bomb_is_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    message = refusal("\n".join(lines))
    assert message.endswith(": the file holds more than 100000 values once its aliases are written out")
    # Just short of the limit is read: 9 lists of 9,000 values and their anchor.
    text = f"a: &a [{', '.join(['1'] * 9_000)}]\nb: [{', '.join(['*a'] * 9)}]"
    assert len(yaml.parse(text)["b"]) == 9
    refusal(text + "\nc: [*a, *a]")


def test_limits():
    assert refusal("a: " + "[" * 5000) == "r.yaml:1: values are nested more than 64 deep"
    assert refusal(b"#" * ((1 << 20) + 1)) == "r.yaml: the file is larger than 1024 KiB, more than a recipe can need"
    assert yaml.parse(b"#" * (1 << 20)) is None
    assert refusal("a: " + "9" * 5000) == "r.yaml:1: the number 99999999999999999999... has more than 100 digits"
    assert refusal("a: 1\nb: 1e999") == "r.yaml:2: the number 1e999 is too large"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: 1\nb: \xff", "r.yaml:2: the file is not UTF-8 text; save it as UTF-8"),
        ("a: b".encode("utf-16"), "r.yaml:1: the file is not UTF-8 text; save it as UTF-8"),
        ("a: 1\nb: \x07", "r.yaml:2: the character U+0007 is not allowed in YAML; remove it"),
        ("a: b\0", "r.yaml:1: the character U+0000 is not allowed in YAML; remove it"),
        ('a: "\\ud800"', "r.yaml:1: the text holds half of a surrogate pair; write the whole character"),
        ("a:\n\t- b", "r.yaml:2: not valid YAML: a tab cannot indent; use spaces"),
        ("a: b: c", "r.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: [1, 2", "r.yaml:1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_broken_text(text, message):
    assert refusal(text) == message


def test_files(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes("a: é\nb: 010\n".encode())
    assert yaml.read(path) == {"a": "é", "b": 10}
    path.write_text("a: 1\na: 2\n")
    with pytest.raises(UserError) as caught:
        yaml.read(str(path))
    assert str(caught.value) == f"{path}:2: key 'a' is given twice, first on line 1; keep one"
    with pytest.raises(UserError) as caught:
        yaml.read(tmp_path / "none.yaml")
    assert str(caught.value) == f"{tmp_path}/none.yaml: there is no such file"
    with pytest.raises(UserError) as caught:
        yaml.read(tmp_path)
    assert str(caught.value) == f"{tmp_path}: expected a YAML file, but it is a folder"


words = st.sampled_from(
    [
        *("1e-4", "NO", "no", "off", "010", "0x10", "0o17", "12:30:00", "2024-01-01", "true", "True", "null", "~", ""),
        *(".inf", ".nan", "<<", "=", "1_000", "5.", "+1", "- x", "a: b", "#x", "x #y", "%x", "@x", "`x", "!x", "&x"),
        *("*x", "? x", "'", '"', "\\", "---", "...", "\n", "a\n b\n", "\t", " x ", "\x85", "\u2028", "\ufeff", "\x7f"),
        *(
            "[",
            "]",
            "{",
            "}",
            ",",
            "|",
            ">",
            "é",
            "日本",
            "😀",
            "a  b",
            "x" * 200,
            "word " * 60,
            "line one\nline two\n\n",
        ),
    ]
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False)
    | words
    | st.text(st.characters(exclude_categories=["Cs"]))
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words | st.text("abz_-: #'\n", max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(trees)
@settings(max_examples=200, deadline=None, derandomize=True)
@example({"a": "1e-4", "b": "NO", "c": "010", "d": ["off", "", "null"], "e": 1e-5, "f": 1e16, "g": -0.0})
@example({"\x85": "\x85 x"})
@example({"x" * 300: ["word " * 80, " lead", "trail "]})
def test_what_is_written_reads_back_the_same(tree):
    assert same(yaml.parse(yaml.dump(tree)), tree)


def test_what_is_written_is_readable():
    tree = {"name": "NO", "lr": 0.0001, "betas": (0.9, 0.95), "note": "1e-4", "deep": {"inner": {"a": 1}}, "e": {}}
    assert yaml.dump(tree) == (
        "name: 'NO'\nlr: 0.0001\nbetas: [0.9, 0.95]\nnote: '1e-4'\ndeep:\n  inner: {a: 1}\ne: {}\n"
    )
    shared = [1, 2]
    assert yaml.dump({"a": shared, "b": shared}) == "a: [1, 2]\nb: [1, 2]\n"


def test_only_plain_values_are_written():
    with pytest.raises(UserError, match=r"^a\.0: expected a mapping, list, text, number, boolean or null, got object$"):
        yaml.dump({"a": [object()]})
    with pytest.raises(UserError, match=r"^a: expected text as keys, got 1$"):
        yaml.dump({"a": {1: 2}})


def test_other_readers_agree_on_what_is_written():
    """YAML 1.1 readers, which most tools are, read the same from what is written here."""
    import yaml as pyyaml

    tree = {
        "a": "1e-4",
        "b": "NO",
        "c": "010",
        "d": "12:30:00",
        "e": "2024-01-01",
        "f": 1e-5,
        "g": "off",
        "on": [True, None],
    }
    assert same(pyyaml.safe_load(yaml.dump(tree)), tree)


def test_reading_imports_no_torch():
    code = "import sys, vitrail.recipe.yaml; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

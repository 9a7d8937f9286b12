"""Reads configurations of other systems: which system a file is of, and what its command line changes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.convert import study, torchtitan, ucf
from vitrail.convert.engine import UNKNOWN, Converted, Row, convert_tree
from vitrail.errors import UserError
from vitrail.foreign import read_plain
from vitrail.recipe import yaml
from vitrail.recipe.yaml import show

MOST = 1 << 20  # bytes of a configuration
MOST_PARTS = 32  # of a dotted key of TOML, whose reader takes time by the square of them
SYSTEMS = ("ucf-vit", "torchtitan-mae", "torchditan", "vit-fsdp-study")
QUOTES = "\"'"
TASKS = tuple(ucf.TASKS)


def convert(
    path: str | Path,
    *,
    system: str | None = None,
    task: str | None = None,
    words: Sequence[str] = (),
    script: str | Path | None = None,
) -> Converted:
    """Turn another system's configuration into a recipe.

    `system` is one of SYSTEMS, found out by the file if None; `task`, one of TASKS, says what a file of UCF-VIT trains
    where its folder does not. `words` are what its script is called with beside the file; a `script` that calls it may
    hold more of them.
    """
    path = Path(path)
    text = read(path)
    system = system or find_system(path, text)
    if task is not None and system != "ucf-vit":
        raise UserError(f"--as {task}: only files of UCF-VIT leave open what they train; leave it out")
    called, told = read_words(read(Path(script)), str(script)) if script is not None else ([], [])
    told = [row for row in told if not any(re.split("[= ]", word)[0] == row.old for word in words)]
    called += words
    tree: Any
    if system == "ucf-vit":
        if called:
            raise UserError(
                f"{called[0]!r}: UCF-VIT's scripts take nothing but the file and the launcher; leave it out"
            )
        tree = yaml.parse(text, str(path))
        if not isinstance(tree, dict):
            raise UserError(f"{path}: expected a mapping with trainer, model and data")
        return convert_tree(tree, ucf.TABLE, find_task(path, tree, task), name_of(path))
    if system == "vit-fsdp-study":
        return convert_tree(study.read_script(text) | study.read_flags(called), study.TABLE, "", path.name)
    table = torchtitan.DITAN if system == "torchditan" else torchtitan.MAE
    return convert_tree(override(read_toml(text, path), called), table, "", path.name, told)


# Texts and comments of TOML, each to its end or that of the file, so that all is gone through once.
_TEXT = re.compile(
    r'''"""(?:\\.|[^"\\]|"(?!""))*+(?:"{3,5}|\Z)|"(?:\\.|[^"\\\n])*+"?'''
    r"""|'''(?:[^']|'(?!''))*+(?:'{3,5}|\Z)|'[^'\n]*'?|#[^\n]*""",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])[\w-]+(?:[ \t]*\.[ \t]*[\w-]+){{{MOST_PARTS}}}")


def read_toml(text: str, path: Path) -> dict[str, Any]:
    """Read a tree of TOML within the bounds that YAML has here."""
    if _LONG_KEY.search(_TEXT.sub(lambda found: "" if found[0][0] == "#" else "text", text)):
        raise UserError(f"{path}: a key in it has more than {MOST_PARTS} parts; mend the file")
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML ({error}); mend the file") from None
    level: list[Any] = [tree]
    for _ in range(yaml.MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
        if any(isinstance(value, int) and abs(value) >= 10**yaml.MAX_DIGITS for value in level):
            raise UserError(f"{path}: a number in it has more than {yaml.MAX_DIGITS} digits; mend the file")
    if level:
        raise UserError(f"{path}: values are nested more than {yaml.MAX_DEPTH} deep; mend the file")
    plain: dict[str, Any] = yaml.plain(tree)
    return plain


def override(tree: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Put what torchtitan is called with over a tree: `--section.key=value`, `--section.key value`, `--section.key`.

    A list is several words, or one in brackets.
    """
    place: dict[str, Any] = {}
    last = ""
    bare = False  # whether more words of the same key may follow
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            section, dot, last = key.partition(".")
            if not dot or not isinstance(tree.setdefault(section, {}), dict):
                raise UserError(f"{word!r}: expected --section.key or --section.key=value, as torchtitan takes it")
            place, bare = tree[section], not equals
            place[last] = valued(value) if equals else True
        elif bare and place[last] is True:
            place[last] = valued(word)
        elif bare:
            place[last] = [*(place[last] if isinstance(place[last], list) else [place[last]]), valued(word)]
        else:
            raise UserError(f"{word!r}: expected --section.key or --section.key=value, as torchtitan takes it")
    return tree


def valued(word: str) -> Any:
    """Return what a word of a command line means: a number, a list in brackets, or text."""
    return yaml.parse(f"a: {word}")["a"] if re.fullmatch(r"\[[\w., -]*\]", word) else yaml.resolve(word)


def read_words(text: str, name: str) -> tuple[list[str], list[Row]]:
    """Return the `--section.key=value` of a script, and rows for those whose value it leaves open."""
    text = re.sub(r"^[^\S\n]*#.*$|\s#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ").replace('\\"', '"')
    value = r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"';&|]+"
    found: dict[str, set[str]] = {}
    for key, said, after in re.findall(
        rf"(?<![^\s\"'=])--([a-z_0-9]+\.[a-z_0-9]+)(?:=({value})|[ \t]+(?![-;&|<>]|\d*[<>])({value}))?", text
    ):
        found.setdefault(key, set()).add((said or after).strip(QUOTES))
    words: list[str] = []
    told: list[Row] = []
    for key, values in found.items():
        if key == "job.config_file":
            continue
        made = any("$" in said for said in values)
        if made or len(values) > 1:
            why = f"{name} makes the value as it runs" if made else f"{name} says it more than once"
            shown = ", ".join(show(said) for said in sorted(values))
            told.append(Row(f"--{key}", shown, UNKNOWN, "", f"{why}; give it: -- --{key}=VALUE"))
        else:
            words += [f"--{key}={said}" if said else f"--{key}" for said in values]
    return words, told


def read(path: Path) -> str:
    try:
        return read_plain(path, MOST).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: the file is not UTF-8 text; give the configuration itself") from None
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror})") from None


def find_system(path: Path, text: str) -> str:
    """Tell whose configuration a file is."""
    kind = path.suffix.lower()
    if kind in (".yaml", ".yml"):
        return "ucf-vit"
    if kind == ".toml":
        return "torchditan" if re.search(r"^[^\S\n]*\[dataset\]|diffusion", text, re.MULTILINE) else "torchtitan-mae"
    if "main_training.py" in text or "--model_size" in text:
        return "vit-fsdp-study"
    raise UserError(
        f"{path}: it is not clear whose configuration this is; expected a .yaml file of UCF-VIT, a .toml file of "
        f"torchtitan-mae or TorchDiTan, or a script of the ViT-FSDP study. Say so with --from ({', '.join(SYSTEMS)})"
    )


def find_task(path: Path, tree: dict[str, Any], task: str | None) -> str:
    """Tell what a file of UCF-VIT trains: by `model.type` of the newer layout, or the folder that it lies in."""
    model = tree.get("model")
    named = ucf.TYPES.get(str(model.get("type"))) if isinstance(model, dict) else None
    found = task or named or next((name for name in reversed(path.absolute().parts[:-1]) if name in TASKS), None)
    if found is None:
        raise UserError(
            f"{path}: neither the file nor its folders say what it trains; add --as with one of {', '.join(TASKS)}"
        )
    if isinstance(model, dict) and named is not None and found != named:
        raise UserError(f"--as {task}: the file's model.type is {model['type']!r}; leave --as out")
    return found


def name_of(path: Path) -> str:
    """Return a file's name with the folders that UCF-VIT and others tell their configurations apart by."""
    return "/".join(path.absolute().parts[-3:]).lstrip("/")

"""Modules of your own that `--plugin` names, by a dotted name or the path of a file, and errors in them in words.

- a dotted name is looked for where Python looks, and then in the current folder; a file's neighbours are found, too
- both are so while the plugin is imported, and no longer: what lies in a folder by chance is not taken for a library
- an error in a plugin is a sentence with its file and line; VITRAIL_TRACEBACK=1 shows how it came about
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from vitrail.contents import begun_with
from vitrail.errors import UserError
from vitrail.recipe.kinds import registered

TRACEBACK = "VITRAIL_TRACEBACK"
_ours = {"vitrail", "builtins", "__main__"}
_named: dict[str, str] = {}  # plugins that were loaded, by what they are to be called: the names of their modules


def load_plugin(given: str) -> None:
    """Import a plugin named on the command line; its `register` calls add its kinds."""
    is_file = given.endswith(".py") or "/" in given
    if not is_file and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", given):
        raise UserError(
            f"--plugin {given!r}: expected a module's dotted name, such as my_lab.beamline, or the path of a file, "
            "such as my_lab/beamline.py"
        )
    if is_file and not Path(given).is_file():
        raise UserError(f"--plugin {given}: there is no such file")
    module = re.sub(r"\W", "_", Path(given).stem) if is_file else given
    told = str(Path(given).resolve()) if is_file else given
    before = _named.get(told)
    _named[told] = module
    try:
        with _looking_in(Path(given).resolve().parent if is_file else Path.cwd()):
            if is_file:
                _import_file(given, module)
            else:
                importlib.import_module(module)
    except BaseException as error:
        words = None if isinstance(error, UserError) else _import_words(error, module)
        if before is None:
            del _named[told]
        if words is None or os.environ.get(TRACEBACK):
            raise
        raise UserError(f"--plugin {given}: cannot be imported: {words}") from error


def loaded() -> list[str]:
    """List the plugins of this process: dotted names, and whole paths of files."""
    return list(_named)


@contextmanager
def asked_for(run: Path) -> Iterator[None]:
    """Say with which plugins a run was begun, where its recipe names a kind that is not known without them."""
    try:
        yield
    except UserError as error:
        lacking = [name for name in begun_with(run) if name not in _named]
        if not lacking or "--plugin" not in str(error):
            raise
        words = shlex.join(word for name in lacking for word in ("--plugin", name))
        raise UserError(f"{run} was begun with {words}, and no run imports code unasked; add these words") from error


def _import_file(given: str, module: str) -> None:
    path = Path(given).resolve()
    there = sys.modules.get(module)
    spec = getattr(there, "__spec__", None) if there is not None else importlib.util.find_spec(module)
    if there is not None and _is_same(getattr(there, "__file__", None), path):
        return
    if (there is not None or spec is not None) and not _is_same(getattr(spec, "origin", None), path):
        raise UserError(f"--plugin {given}: another module has the name {module}, too; rename the file")
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise UserError(f"--plugin {given}: expected a file of Python, whose name ends with .py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[module] = made
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[module]
        raise


def _is_same(origin: Any, path: Path) -> bool:
    return isinstance(origin, str) and os.path.exists(origin) and os.path.samefile(origin, path)


@contextmanager
def _looking_in(folder: Path) -> Iterator[None]:
    """Let Python find modules in a folder, too, after all others."""
    importlib.invalidate_caches()
    sys.path.append(str(folder))
    try:
        yield
    finally:
        for place in range(len(sys.path) - 1, -1, -1):  # the last: the plugin may have changed the list
            if sys.path[place] == str(folder):
                del sys.path[place]
                break


def _import_words(error: BaseException, module: str) -> str | None:
    """Say why a plugin cannot be imported; None for what is no fault of its code, such as Ctrl-C."""
    if not isinstance(error, Exception | SystemExit):
        return None
    hint = ""
    if isinstance(error, ModuleNotFoundError) and error.name and (module + ".").startswith(error.name + "."):
        hint = "; it is neither in the current folder nor installed: give the path of its file, or set PYTHONPATH"
        return f"{_message(error)}{hint}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return in_words(error) or f"{type(error).__name__}: {_message(error)}"


def in_words(error: BaseException) -> str | None:
    """Say where in a plugin an error arose, or what a plugin's object lacks; None where no plugin has a part in it."""
    tops = {name.partition(".")[0] for name in (*_named.values(), *(cls.__module__ for cls in registered()))} - _ours
    found: tuple[CodeType, int] | None = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] in tops:
            found = trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next
    what = f"{type(error).__name__}: {_message(error)}"
    if found is not None:
        code, line = found
        text = linecache.getline(code.co_filename, line).strip()
        where = "" if code.co_name == "<module>" else f", in {code.co_name}"
        return f"{_shown(code.co_filename)}:{line}{where}: {what}" + (f" (the line: {text[:100]})" if text else "")
    owner = getattr(error, "obj", None)  # of an AttributeError
    cls = owner if isinstance(owner, type) else type(owner)
    if isinstance(error, AttributeError) and cls.__module__.partition(".")[0] in tops:
        return f"{cls.__module__}: {cls.__qualname__} has no {error.name!r}, which is asked of it; see docs/plugins.md"
    return None


@contextmanager
def telling() -> Iterator[None]:
    """Turn an error in a plugin, inside of the block, into one sentence."""
    try:
        yield
    except Exception as error:
        words = told(error)
        if words is error:  # "raise error from error" would lose what it came from
            raise
        raise words from error


def told(error: BaseException) -> BaseException:
    """Return an error in a plugin as one sentence, and any other as it is."""
    from vitrail.errors import is_out_of_memory

    if not isinstance(error, Exception) or isinstance(error, UserError) or os.environ.get(TRACEBACK):
        return error
    words = in_words(error)
    if words is None or is_out_of_memory(error):
        return error
    made = UserError(words)
    made.__cause__ = error
    return made


def _shown(path: str) -> str:
    """Return a path as one would type it here."""
    here = os.path.relpath(path)
    return path if here.startswith("..") else here


def _message(error: BaseException) -> str:
    """Return an error's message on one line, without its final stop."""
    return " ".join(str(error).split()).rstrip(".")[:300] or "no message"

"""Nothing in src/ replaces, renames, removes or overwrites anything by itself: disk.py does, and is tested for it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitrail

SRC = Path(vitrail.__file__).parent
MODULES = {
    "os": {"link", "remove", "removedirs", "rename", "renames", "replace", "rmdir", "symlink", "truncate", "unlink"},
    "shutil": {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree", "unpack_archive"},
    "tempfile": {"NamedTemporaryFile", "TemporaryDirectory", "mkdtemp", "mkstemp", "mktemp"},
}
METHODS = {  # of paths and files, and of libraries that write a file under a name that they are given
    *("hardlink_to", "link_to", "rename", "rmdir", "rmtree", "symlink_to", "touch", "truncate", "unlink"),
    *("write_bytes", "write_text", "imsave", "imwrite", "save", "savefig", "savetxt", "savez", "savez_compressed"),
    *("save_file", "tofile"),
}
OPENERS = {"open", "open_array", "open_group", "fdopen", "memmap", "File", "TarFile", "ZipFile", "Dataset"}
FLAGS = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND")
PROGRAMS = {"rm", "mv", "cp", "rsync", "ln", "truncate", "dd", "install"}

# Calls that look alike and write into memory, or into a draft that disk.py has made and will publish or remove.
ALLOWED = {
    ("cost/page.py", "figure.savefig"): "into memory",
    ("data/order/filter.py", "np.save"): "into a file of disk.replacing",
    ("data/generate.py", "Image.fromarray(image).save"): "into a draft of disk.new_folder",
    ("data/sources/image_folder.py", "np.save"): "into memory",
    ("data/latents/store.py", "save_file"): "into a draft of disk.new_folder",
    ("data/latents/store.py", "zarr.open_group"): "of a draft of disk.new_folder",
    ("data/formats/ngff.py", "metadata.write_text"): "in a draft of disk.new_folder",
    ("exports/export.py", "save_file"): "into a draft of disk.new_folder",
    ("exports/export.py", "torch.export.save"): "into memory",
    ("infer/features.py", "torch.save"): "into memory",
    ("infer/folder.py", "Image.fromarray(pixels).save"): "into memory",
    ("infer/folder.py", "np.save"): "into memory",
    ("infer/folder.py", "tifffile.imwrite"): "into memory",
    (
        "infer/files.py",
        "Image.fromarray(np.ascontiguousarray(values[...])).save",
    ): "into a file of disk.replacing",
    ("infer/files.py", "tifffile.imwrite"): "into a file of disk.replacing",
    ("infer/instances.py", "kept.create_array"): "in a hidden folder, of what is made anew after a kill",
    ("infer/instances.py", "zarr.open_group"): "of a hidden folder that is removed when all is done",
    ("infer/outputs.py", "zarr.open_group"): "of a hidden folder that is published when it is whole",
    ("report/figures.py", "candidate.save"): "into memory",
    ("training/checkpoint.py", "dcp.save"): "into a draft of a checkpoint, which is published when it is whole",
    ("training/journal.py", "line.truncate"): "of a line of text",
    ("training/profiling.py", "shutil.copyfileobj"): "into a file of disk.replacing",
    ("training/session.py", "self.save"): "of the trainer",
    ("training/session.py", "trainer.save"): "of the trainer",
    ("training/trainer.py", "checkpoints.save"): "of checkpoint.py",
    ("cli/tools.py", "jobs.save"): "of launch/jobs.py",
    ("bench/sweep.py", "jobs.save"): "of launch/jobs.py",
    ("training/runfolder.py", "os.open"): "adds to the log of a run, through no link",
}


def name_of(call: ast.expr) -> str:
    return call.attr if isinstance(call, ast.Attribute) else call.id if isinstance(call, ast.Name) else ""


def text_of(nodes: list[ast.expr]) -> str:
    """The first of them, if it is a text."""
    return nodes[0].value if nodes and isinstance(nodes[0], ast.Constant) and isinstance(nodes[0].value, str) else ""


def writes(mode: object) -> bool:
    return isinstance(mode, str) and bool(set(mode) & set("wax+")) and len(mode) <= 4


def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and words of what may replace, rename, remove or overwrite something."""
    known = {module: module for module in MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in MODULES}
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                if alias.name in MODULES[node.module] | {"*"}:
                    yield node.lineno, f"from {node.module} import {alias.name}"
        if isinstance(node, ast.Attribute) and node.attr in MODULES.get(known.get(name_of(node.value), ""), ()):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.List | ast.Tuple) and text_of(node.elts[:1]) in PROGRAMS:
            yield node.lineno, ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name, method = name_of(node.func), isinstance(node.func, ast.Attribute)
        if name == "open" and [ast.unparse(argument) for argument in node.args[:1]] == ["os.devnull"]:
            continue  # where nothing lies that could be lost
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        modes = [*node.args[:2], *([given["mode"]] if "mode" in given else [])]
        suspicious = (
            (name in METHODS and (method or name == "save_file")),
            # Of a path: text has two arguments, and a dataclass names its fields.
            (name == "replace" and method and len(node.args) == 1 and not given),
            (name == "getattr" and text_of(node.args[1:]) in (METHODS - {"save"}).union(*MODULES.values())),
            ("overwrite" in given and ast.unparse(given["overwrite"]) != "False"),
            (name == "open" and any(flag in ast.unparse(node) for flag in FLAGS)),
            (name in OPENERS and any(isinstance(mode, ast.Constant) and writes(mode.value) for mode in modes)),
        )
        if any(suspicious):
            yield node.lineno, ast.unparse(node.func)


def test_no_other_module_replaces_or_removes() -> None:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        name = str(path.relative_to(SRC))
        for line, words in find(ast.parse(path.read_text())):
            if name != "disk.py" and (name, words) not in ALLOWED:
                found.append(f"{name}:{line}: {words}")
    assert not found, "use vitrail.disk instead of:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.unlink(p)",
        "import os as system\nsystem.replace(a, b)",
        "from os import rename as r",
        "from shutil import *",
        "import shutil\nf = shutil.rmtree",
        "import shutil\nshutil.move(a, b)",
        "p.unlink(missing_ok=True)",
        "p.rename(q)",
        "p.replace(q)",
        "(a / 'b').rmdir()",
        "p.write_text('x')",
        "p.open('w')",
        "p.open(mode='ab')",
        "open(p, 'r+')",
        "open(p, mode='xb')",
        "import io\nio.open(p, 'w')",
        "import os\nos.open(p, os.O_RDWR | os.O_CREAT)",
        "import os\nos.truncate(p, 0)",
        "f.truncate()",
        "zarr.open_group(p, mode='w')",
        "zarr.create_group(p, overwrite=True)",
        "h5py.File(p, 'w')",
        "zipfile.ZipFile(p, 'a')",
        "numpy.memmap(p, mode='w+')",
        "figure.savefig(p)",
        "image.save(p)",
        "values.tofile(p)",
        "getattr(os, 'unlink')(p)",
        "subprocess.run(['rm', '-r', p])",
        "import tempfile\ntempfile.TemporaryDirectory()",
        "p.symlink_to(q)",
    ],
)
def test_every_spelling_is_found(text: str) -> None:
    assert list(find(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "text.replace('a', 'b')",
        "dataclasses.replace(a, b=1)",
        "names.remove(x)",
        "open(p)",
        "open(p, 'rb')",
        "p.open('rb')",
        "zarr.open_group(p, mode='r')",
        "import os\nos.open(p, os.O_RDONLY | os.O_NOFOLLOW)",
        "import shutil\nshutil.disk_usage(p)",
        "disk.remove(p, inside=q)",
        "config.open()",
    ],
)
def test_what_only_reads_is_not(text: str) -> None:
    assert not list(find(ast.parse(text)))

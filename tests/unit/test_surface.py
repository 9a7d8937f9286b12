"""Everything that a user can name is still there: verbs and their options, recipe keys, kinds, public names.

`tests/golden/surface.txt` lists what there was; a name may be added (`python tests/unit/test_surface.py` writes the
list anew), and one that goes is a decision to be taken, not an accident of a move.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).parents[1] / "golden" / "surface.txt"
PUBLIC = ("vitrail", "vitrail.data", "vitrail.recipe", "vitrail.models")
CONTRACTS = {
    "vitrail.data.source": ("Source", "ManySource"),
    "vitrail.objectives.objective": ("Objective",),
    "vitrail.models.model": ("Model", "Stage"),
    "vitrail.data.grid": ("Entry", "GridConfig", "GridSource", "Stored"),
    "vitrail.codecs": ("Codec",),
    "vitrail.data.augment": ("Augmentation", "Crops"),
    "vitrail.diffusion.samplers": ("Sampler", "Step"),
    "vitrail.training.optimizers.optimizer": ("OptimizerConfig", "Update", "kept"),
    "vitrail.training.schedule": ("ScheduleConfig",),
    "vitrail.training.loggers": ("Facts", "Logger"),
    "vitrail.errors": ("BadData", "UserError"),
}


def verbs(command: Any, name: str) -> Iterator[str]:
    if inner := getattr(command, "commands", None):
        for word, one in inner.items():
            yield from verbs(one, f"{name} {word}")
        return
    for parameter in command.params:
        yield f"{name} {parameter.opts[0] if parameter.opts[0].startswith('-') else parameter.name.upper()}"


def keys(schema: dict[str, Any]) -> Iterator[str]:
    """Keys of a recipe by the section or kind that has them, with the words that they take."""
    for name, section in {"Recipe": schema, **schema["$defs"]}.items():
        for key, value in section.get("properties", {}).items():
            yield f"recipe {name}.{key}"
            for branch in (value, *value.get("anyOf", ())):
                yield from (f"recipe {name}.{key}={word}" for word in branch.get("enum", ()))


def surface() -> list[str]:
    from typer.main import get_command

    from vitrail.cli import app
    from vitrail.models.catalog import entries
    from vitrail.recipe import json_schema, kinds

    found = [*verbs(get_command(app), "vitrail"), *keys(json_schema())]
    found += [f"kind {slot} {name}" for slot, names in kinds.BUILT_IN.items() for name in names]
    found += [f"size {entry.model}:{entry.size}" for entry in entries()]
    for module in PUBLIC:
        found += [f"name {module}.{name}" for name in getattr(importlib.import_module(module), "__all__", ())]
    for module, names in CONTRACTS.items():
        known = vars(importlib.import_module(module))
        found += [f"name {module}.{name}" for name in names if name in known]
    return sorted(set(found))


def test_nothing_that_a_user_can_name_has_gone() -> None:
    missing = set(LIST.read_text(encoding="utf-8").splitlines()) - set(surface())
    assert not missing, sorted(missing)


if __name__ == "__main__":
    LIST.write_text("\n".join(surface()) + "\n", encoding="utf-8")

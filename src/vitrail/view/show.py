"""What `vitrail view` was asked for, as layers: paths, and runs with the data that they were judged on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.credentials import strip
from vitrail.data.chunks import decoded
from vitrail.data.look.inspect import open_source
from vitrail.errors import UserError
from vitrail.recipe.load import find_recipe
from vitrail.view.layers import Layer, image_layer, open_entry, open_path, together

CACHE = 512 << 20  # bytes of decoded chunks that are kept
MOST = 32  # layers


def gather(
    words: Sequence[str],
    *,
    labels: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    kind: str | None = None,
    item: str | None = None,
) -> list[Layer]:
    """Open all that was named, runs first; settings and kind are of the first path that is no run's."""
    decoded.shared.limit = CACHE
    layers: list[Layer] = []
    seen: set[str] = set()
    names: list[str] = []
    for word in words:
        if is_run(word):
            layers += of_run(word, seen, names, item=item)
    given = {**(settings or {}), **({} if kind is None else {"kind": kind})}
    for word in words:
        if is_run(word) or word in seen:
            continue
        seen.add(word)
        layers += open_path(word, settings=given, item=item)
        given = {}
    for word in labels:
        config, source = open_source(word, kind=None, settings={})
        layers.append(image_layer(config, source, item=item, labels=True))
    if given:
        raise UserError("--set and --kind are of a path beside those of the run, and none is given; leave them out")
    if len(layers) > MOST:
        raise UserError(f"{len(layers)} layers are more than {MOST}; name fewer paths")
    return together(layers)


def is_run(word: str) -> bool:
    """Tell whether a path is the folder of a run."""
    return "://" not in word and (Path(word) / "recipe.yaml").is_file()


def of_run(run: str, seen: set[str], names: list[str], *, item: str | None) -> list[Layer]:
    """Open the data that a run is judged on, or else was trained on, each path once and whole."""
    recipe = find_recipe(run)
    found: list[Any] = [*(recipe.data.valid or ()), *recipe.data.train] if recipe.data.valid else [*recipe.data.train]
    names += list(getattr(recipe.objective, "names", None) or ())
    layers: list[Layer] = []
    for entry in found:
        path = getattr(entry, "path", None)
        if not isinstance(path, str) or path in seen or (recipe.data.valid and entry not in recipe.data.valid):
            continue
        seen.add(path)
        layers += open_entry(entry, names=names, item=item)
    if not layers:
        raise UserError(f"{strip(run)}: its data lie at no path that could be shown; give paths instead")
    return layers

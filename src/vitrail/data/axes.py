"""Axes of arrays whose file does not name them: what their sizes suggest, and items along an axis.

- an array of two to five axes is read as y, x; z, y, x; c, z, y, x or t, c, z, y, x, since files often do not say
- where the sizes of these speak for channels at the end, or for items, a note says which line to write; `axes` in the
  recipe, also the one that was taken, ends the note
- the letter n in `axes` makes an item of each slice along it
"""

from collections.abc import Sequence
from dataclasses import replace

from vitrail.data.stored import ITEMS, Entry, Stored, by, label_axes, split_axes
from vitrail.errors import BadData, UserError

FEW = 4  # channels at most that an axis in an unusual place is taken for: grey, colours, and alpha
MANY = 16  # channels from which on an axis rather counts something else
SMALL = 256  # pixels on each side of images that are often stored one behind another in an array


def likely_axes(shape: Sequence[int]) -> str | None:
    """Return the axes that sizes speak for, where these are not the usual ones; None where they are."""

    def is_few(place: int, *others: int) -> bool:
        return shape[place] <= FEW and FEW * shape[place] <= min(shape[other] for other in others)

    def are_items(*image: int) -> bool:
        sides = [shape[axis] for axis in image]
        return max(sides) <= SMALL and max(sides) <= 2 * min(sides) and shape[0] >= 2 * max(sides)

    if len(shape) == 3:  # z, y, x
        if is_few(2, 0, 1):
            return "yxc"
        if is_few(0, 1, 2):
            return "cyx"
        return "nyx" if are_items(1, 2) else None
    if len(shape) == 4:  # c, z, y, x
        if is_few(3, 1, 2):
            return "nyxc" if are_items(1, 2) or shape[0] <= FEW else "zyxc"
        if is_few(1, 2, 3) and shape[0] > 1:
            return "ncyx"
        return "nzyx" if shape[0] > MANY else None
    if len(shape) == 5 and shape[0] > 1:  # t, c, z, y, x: of the moments one is read
        return "nzyxc" if is_few(4, 1, 2, 3) else "nczyx"
    return None


WORDS = {"n": "items", "c": "channels"}


def note_of_axes(stored: Stored) -> list[str]:
    """Say which axes to write, where the sizes of an array speak against those that are guessed."""
    likely = likely_axes(stored.shape)
    if likely is None:
        return []
    usual = "".join(stored.axes)
    counts = [f"{size} {WORDS[name]}" for name, size in zip(likely, stored.shape, strict=True) if name in WORDS]
    line = f"`axes: {likely}`"
    if likely.startswith("z"):
        line += " (`nyxc` where the first counts images, `xyzc` where x comes first)"
    return [
        f"{stored.name} does not name its axes, and {by(stored.shape)} is read as {usual}; if these are "
        f"{' and '.join(counts)}, write {line}, and if not, `axes: {usual}`"
    ]


def items_along(entries: Sequence[Entry], axes: str) -> Sequence[Entry]:
    """Return an entry for each slice along the axis n, if `axes` has one; they share their arrays."""
    names = split_axes(axes)
    if ITEMS not in names:
        return entries
    if "t" in names:
        raise UserError(f"axes = {axes!r}: n and t cannot both be given; call the moments n, and each is an item")
    found: list[Entry] = []
    for entry in entries:
        first = entry.images[0]
        if entry.moment is not None:
            raise UserError(f"axes = {axes!r}: each moment of {first.name} is an item already; leave n out")
        if len(first.shape) != len(names):  # which is told where axes are given to the array
            return entries
        counts = [image.shape[names.index(ITEMS)] for image in entry.images]
        if entry.labels is not None:
            known = label_axes(names, len(entry.labels.shape))
            counts.append(entry.labels.shape[known.index(ITEMS)] if len(known) == len(entry.labels.shape) else 0)
        if len(set(counts)) > 1:
            raise BadData(
                f"{first.name} has {counts[0]} items along n, but another of its arrays or its labels have "
                f"{next(count for count in counts if count != counts[0])}; give each item its own"
            )
        width = len(str(max(0, counts[0] - 1)))
        found += [replace(entry, name=f"{entry.name}[{number:0{width}}]", moment=number) for number in range(counts[0])]
    return found

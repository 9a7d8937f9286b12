"""Versions of what vitrail stores: each format has a number that grows when older readers would misread it."""

from typing import Any

from vitrail.errors import UserError


def check_version(found: Any, newest: int, what: str) -> int:
    """The version that something stored says of itself, from 1 to the newest that is read here.

    Readers bring older ones up to the newest themselves; `what` begins the sentence that refuses others.
    """
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise UserError(
            f"{what} says that its version is {found!r}, expected a number from 1 to {newest}; restore it, or make it "
            "anew"
        )
    if found > newest:
        known = "1" if newest == 1 else f"1 to {newest}"
        raise UserError(
            f"{what} was written by a newer vitrail: version {found}, this one reads {known}; upgrade vitrail"
        )
    return found

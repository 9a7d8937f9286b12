"""What is made but once, by a text: configs may hold what has no hash, and caches need one."""

from collections.abc import Callable
from typing import Any


class Key:
    """Equal to every key of the same text, whatever `make` is."""

    def __init__(self, text: str, make: Callable[[], Any]) -> None:
        self.text, self.make = text, make

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.text == other.text


def key_of(config: Any) -> Key:
    """Of a config, which it gives back."""
    return Key(repr(config), lambda: config)

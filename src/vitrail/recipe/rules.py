"""`Rule`: a value with its own small grammar, checked by one function and described by one phrase.

A rule is put in an annotation, `Annotated[int | str, Rule(parse, expected, ...)]`. It holds no pydantic until pydantic
asks for its schema, so modules that only name such types stay cheap to import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """How pydantic reads, writes and describes a value."""

    parse: Callable[[Any], Any]  # the value as stored; raises ValueError when it is not of the grammar
    expected: str  # completes "expected ..."
    json: Callable[[], dict[str, Any]]  # its JSON Schema
    write: Callable[[Any], Any] | None = None  # the stored value as it is written in a recipe

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def read(value: Any) -> Any:
            try:
                return self.parse(value)
            except ValueError as error:
                raise PydanticCustomError("expected", "expected {expected}", {"expected": self.expected}) from error

        writer = None if self.write is None else core_schema.plain_serializer_function_ser_schema(self.write)
        return core_schema.no_info_plain_validator_function(read, serialization=writer)

    def __get_pydantic_json_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return self.json()

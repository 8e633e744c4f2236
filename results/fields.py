"""Parsers of stored JSON fields: each returns the value or says in one line what it should have been."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from typing import Any, get_type_hints

Parser = Callable[[Any], Any]
MOST_US = 1e12  # eleven days: more is a mistake


class FieldError(ValueError):
    """A field that is missing, unknown or of the wrong form. Internal: readers add the file and raise their own."""


def parse(document: object, parsers: Mapping[str, Parser], optional_names: frozenset[str] = frozenset()) -> Any:
    """Values by field name.

    Args:
        document: what should be a JSON object.
        parsers: by field name.
        optional_names: fields that may be missing.

    Raises:
        FieldError: names the field.
    """
    if not isinstance(document, dict):
        raise FieldError(f"an object is needed, not {_shown(document)}")
    for wanted in parsers:
        if wanted not in document and wanted not in optional_names:
            raise FieldError(f"{wanted} is missing")
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in parsers:
            raise FieldError(f"{key} is not a known field")
        try:
            values[key] = parsers[key](value)
        except FieldError as error:
            raise FieldError(f"{key}: {error}") from None
    return values


def record_of(kind: type[Any]) -> Parser:
    """A parser of a flat dataclass whose fields are texts, whole numbers, flags and objects."""
    by_type: dict[Any, Parser] = {str: text, int: count, bool: flag}
    parsers = {name: by_type.get(hint, document) for name, hint in get_type_hints(kind).items()}
    optional_names = frozenset(
        f.name for f in dataclass_fields(kind) if f.default is not MISSING or f.default_factory is not MISSING
    )
    return lambda value: kind(**parse(value, parsers, optional_names))


def text(value: object) -> str:
    if not isinstance(value, str):
        raise FieldError(f"a text is needed, not {_shown(value)}")
    return value


def name(value: object) -> str:
    if not text(value):
        raise FieldError("must not be empty")
    return str(value)


def file_name(value: object) -> str:
    """A name that can stand in a path."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text(value)):
        raise FieldError(f"{_shown(value)} cannot be a file name")
    return str(value)


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise FieldError(f"true or false is needed, not {_shown(value)}")
    return value


def count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FieldError(f"a whole number from 0 up is needed, not {_shown(value)}")
    return value


def microseconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MOST_US:
        raise FieldError(f"a time in microseconds is needed, not {_shown(value)}")
    return float(value)


def interval(value: object) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise FieldError(f"a low and a high time are needed, not {_shown(value)}")
    low, high = microseconds(value[0]), microseconds(value[1])
    if low > high:
        raise FieldError(f"low {low:g} is above high {high:g}")
    return low, high


def document(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise FieldError(f"an object is needed, not {_shown(value)}")
    return value


def params(value: object) -> dict[str, int | str]:
    """Shape parameters: whole numbers and texts by name."""
    for key, item in document(value).items():
        if not isinstance(item, int | str) or isinstance(item, bool):
            raise FieldError(f"{key} must be a whole number or a text, not {_shown(item)}")
    return document(value)


def counts(value: object) -> dict[str, int]:
    """Whole numbers by name."""
    return {key: count(item) for key, item in document(value).items()}


def optional(parser: Parser) -> Parser:
    """The same, or null."""
    return lambda value: None if value is None else parser(value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."

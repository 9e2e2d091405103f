"""JSON schemas of the shapes that people send: composed at random, always the same, from fields of real documents.

Each ends soon for a model that draws at random: texts, arrays and numbers are bounded, optional parts are few.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = """title name summary status amount currency due_date email phone sku quantity unit_price notes author category
address city country postal_code severity owner labels score confidence language source target start end"""
NAMES = WORDS.split()
PATTERNS = [
    r"^\d{4}-\d{2}-\d{2}$",
    r"^[A-Z]{3}-[0-9]{4}$",
    r"^\+?[0-9]{7,12}$",
    r"^[a-f0-9]{8}$",
    "^(low|medium|high)$",
]
FORMATS = ["date", "date-time", "time", "uuid", "ipv4", "email"]
ENUMS = [
    ["open", "closed", "pending"],
    ["EUR", "USD", "GBP"],
    [1, 2, 3],
    ["a", 1, None, True],
    ["positive", "negative"],
]


def schemas(count: int = 300) -> list[Schema]:
    """So many different ones; about one in twelve is no object at the top."""
    draw = random.Random(5)
    made: list[Schema] = []
    while len(made) < count:
        top = (
            draw.choice(TOPS) if draw.random() < 0.75 else draw.choice([_tree, _linked, _event, _tuple, _union, _list])
        )
        schema = top(draw, draw.choice([1, 2, 2, 3, 4]))
        if schema not in made:
            made.append(schema)
    return made


def _text(draw: random.Random, depth: int) -> Schema:
    low = draw.choice([0, 0, 1, 3])
    return {
        "type": "string",
        "minLength": low,
        "maxLength": low + draw.choice([4, 12, 20]),
        "description": "as printed",
    }


def _pattern(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": draw.choice(PATTERNS)}


def _format(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": draw.choice(FORMATS)}


def _integer(draw: random.Random, depth: int) -> Schema:
    low = draw.choice([0, 1, -10])
    return {"type": "integer", "minimum": low, "maximum": low + draw.choice([5, 100, 5000])}


def _number(draw: random.Random, depth: int) -> Schema:
    return draw.choice(
        [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": 0, "maximum": 999}]
    )


def _enum(draw: random.Random, depth: int) -> Schema:
    return {"enum": draw.choice(ENUMS)} if draw.random() < 0.8 else {"const": draw.choice(["v1", 7, True])}


def _simple(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])} | {
        "description": "a flag"
    }


def _nullable(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_field(draw, depth - 1), {"type": "null"}]}


def _list(draw: random.Random, depth: int) -> Schema:
    low = draw.choice([0, 0, 1, 2])
    return {
        "type": "array",
        "items": _field(draw, depth - 1),
        "minItems": low,
        "maxItems": low + draw.choice([0, 1, 2]),
    }


def _tuple(draw: random.Random, depth: int) -> Schema:
    parts = [_leaf(draw, 0) for _ in range(draw.choice([2, 3]))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts), "maxItems": len(parts)}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.choice([1, 2, 3, 4]))
    needed = names if draw.random() < 0.6 else names[: len(names) // 2]
    fields = {name: _field(draw, depth - 1) for name in names}
    return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}


def _union(draw: random.Random, depth: int) -> Schema:
    """Alternatives told apart by a constant."""
    kinds = draw.sample(["text", "image", "table", "action"], 2)
    parts = []
    for kind in kinds:
        part = _object(draw, depth - 1)
        part["properties"] = {"kind": {"const": kind}} | part["properties"]
        part["required"] = ["kind", *part["required"]]
        parts.append(part)
    return {draw.choice(["anyOf", "oneOf"]): parts}


def _merged(draw: random.Random, depth: int) -> Schema:
    first, second = draw.sample(NAMES, 2)
    fields = {first: _leaf(draw, 0), second: _leaf(draw, 0)}
    return {"allOf": [{"type": "object", "properties": fields, "additionalProperties": False}, {"required": [first]}]}


def _tree(draw: random.Random, depth: int) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    fields = {"label": _leaf(draw, 0), "children": children}
    node = {"type": "object", "properties": fields, "required": ["label"], "additionalProperties": False}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _linked(draw: random.Random, depth: int) -> Schema:
    """Parts used twice by reference."""
    where = {"$ref": "#/$defs/place"}
    fields = {"from": where, "to": where, "price": _number(draw, 0)}
    place = _object(draw, 1)
    whole = {"type": "object", "properties": fields, "required": ["from", "to"], "additionalProperties": False}
    return {"$defs": {"place": place}} | whole


def _event(draw: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "description": "a calendar event",
        "properties": {
            "title": _text(draw, 0),
            "starts": {"type": "string", "format": "date-time"},
            "attendees": {"type": "array", "items": {"type": "string", "format": "email"}, "maxItems": 2},
            "place": _nullable(draw, depth),
            "repeats": {"type": ["string", "null"], "enum": ["daily", "weekly", None]},
        },
        "required": draw.choice([["title", "starts"], ["title", "starts", "attendees", "place", "repeats"]]),
        "additionalProperties": False,
    }


LEAVES: list[Callable[[random.Random, int], Schema]] = [_text, _pattern, _format, _integer, _number, _enum, _simple]
NESTED: list[Callable[[random.Random, int], Schema]] = [_nullable, _list, _tuple, _object, _object, _union, _merged]
TOPS: list[Callable[[random.Random, int], Schema]] = [_object, _object, _object, _union, _merged]


def _leaf(draw: random.Random, depth: int) -> Schema:
    return draw.choice(LEAVES)(draw, depth)


def _field(draw: random.Random, depth: int) -> Schema:
    return _leaf(draw, 0) if depth < 1 or draw.random() < 0.55 else draw.choice(NESTED)(draw, depth)

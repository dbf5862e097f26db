"""JSON schemas drawn at random, of the keywords that texts can be held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random

from jsonschema import Draft202012Validator

Schema = Mapping[str, object]
NAMES = ("name", "age", "née", "a b", "x", 'quo"te', "items")
PATTERNS = ("^[a-z]{1,4}$", "^[A-Z][a-z]*[0-9]{2}$", "(red|green)", "^[^ ]{2,5}$")
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email")


def random_schema(random: Random) -> Schema:
    """A schema of which texts are short."""
    if random.random() < 0.9:
        return _nested(random, 2)
    either = [{"$ref": "#/$defs/one"}, {"type": "null"}, {"$ref": "#"}]
    return {
        "$defs": {"one": _nested(random, 1)},
        "type": "array",
        "items": {"anyOf": either[: random.randint(2, 3)]},
        "maxItems": 3,
    }


def _nested(random: Random, depth: int) -> Schema:
    """A schema in which others are nested at most so deep."""
    kinds = [_integer, _number, _string, _enum, _const, _truth, _pattern, _format, _several]
    kinds += [_object, _object, _object, _array, _tuple, _any_of] if depth else []
    return random.choice(kinds)(random, depth)


def _integer(random: Random, depth: int) -> Schema:
    least = random.randint(-200, 200)
    bounds = random.choice(({"minimum": least}, {"minimum": least, "maximum": least + random.randint(0, 999)}, {}))
    exclusive = {"exclusiveMaximum": least + 1000} if random.random() < 0.3 else {}
    steps = {"multipleOf": random.choice((2, 5, 7))} if random.random() < 0.3 and not bounds else {}
    return {"type": "integer", **bounds, **exclusive, **steps}


def _number(random: Random, depth: int) -> Schema:
    least = random.uniform(-5, 5)
    return {"type": "number", **random.choice(({"minimum": least, "maximum": least + 3.5}, {"exclusiveMinimum": 0}, {}))}


def _string(random: Random, depth: int) -> Schema:
    least = random.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 8)}


def _enum(random: Random, depth: int) -> Schema:
    return {"enum": random.sample(("red", "é", 'a"b\\c', 1, 2.5, None, True, {"a": [1]}, "日本"), random.randint(1, 4))}


def _const(random: Random, depth: int) -> Schema:
    return {"const": random.choice(("fixed", 7, None, {"a": {"b": [True, "c"]}}))}


def _truth(random: Random, depth: int) -> Schema:
    return {"type": random.choice(("boolean", "null"))}


def _pattern(random: Random, depth: int) -> Schema:
    return {"type": "string", "pattern": random.choice(PATTERNS)}


def _format(random: Random, depth: int) -> Schema:
    return {"type": "string", "format": random.choice(FORMATS)}


def _several(random: Random, depth: int) -> Schema:
    return {"type": random.sample(("integer", "boolean", "null"), 2)}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, random.randint(0, 4))
    required = [name for name in names if random.random() < 0.6]
    more: Mapping[str, object] = random.choice(
        ({"additionalProperties": False},) * 3 + ({"additionalProperties": {"const": 0}},)
    )
    properties = {name: _nested(random, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, **more}


def _array(random: Random, depth: int) -> Schema:
    least = random.randint(0, 2)
    return {
        "type": "array",
        "items": _nested(random, depth - 1),
        "minItems": least,
        "maxItems": least + random.randint(0, 2),
    }


def _tuple(random: Random, depth: int) -> Schema:
    items = [_nested(random, depth - 1) for _ in range(random.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(random: Random, depth: int) -> Schema:
    return {"anyOf": [_nested(random, depth - 1) for _ in range(random.randint(1, 3))]}


def validated(schema: Schema, text: str) -> object:
    """The value of a text, which must be of a schema."""
    value: object = json.loads(text)
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
    return value

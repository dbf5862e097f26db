"""JSON schemas drawn at random, of the keywords that texts can be held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from jsonschema import Draft202012Validator

Schema = Mapping[str, object]
NAMES = ("name", "age", "née", "a b", "x", 'quo"te', "items")
BOUNDED_PATTERNS = ("^[a-z]{1,4}$", "^[0-9]{1,4}\\.[0-9]{2}$", "^(red|green)$", "^[^ ]{2,5}$")
PATTERNS = (*BOUNDED_PATTERNS, "^[A-Z][a-z]*[0-9]{2}$", "(red|green)")
BOUNDED_FORMATS = ("date", "ipv4", "uuid")
FORMATS = (*BOUNDED_FORMATS, "time", "date-time", "email")


def random_schema(random: Random, is_bounded: bool = False) -> Schema:
    """A schema of which texts are short. `is_bounded`: none of them can be long, as digits or names without end would be."""
    return _Drawn(random, is_bounded).whole()


@dataclass(frozen=True)
class _Drawn:
    random: Random
    is_bounded: bool

    def whole(self) -> Schema:
        if self.random.random() < 0.9:
            return self.nested(2)
        either = [{"$ref": "#/$defs/one"}, {"type": "null"}, {"$ref": "#"}]
        return {
            "$defs": {"one": self.nested(1)},
            "type": "array",
            "items": {"anyOf": either[: 2 if self.is_bounded else self.random.randint(2, 3)]},
            "maxItems": 3,
        }

    def nested(self, depth: int) -> Schema:
        """A schema in which others are nested at most so deep."""
        kinds = [self.integer, self.string, self.enum, self.const, self.truth, self.pattern, self.format]
        kinds += [] if self.is_bounded else [self.number, self.several]
        of_others = [self.object, self.object, self.object, self.array, self.tuple, self.any_of] if depth else []
        place = self.random.randrange(len(kinds) + len(of_others))
        return kinds[place]() if place < len(kinds) else of_others[place - len(kinds)](depth)

    def integer(self) -> Schema:
        random, least = self.random, self.random.randint(-200, 200)
        both = {"minimum": least, "maximum": least + random.randint(0, 999)}
        bounds = both if self.is_bounded else random.choice(({"minimum": least}, both, {}))
        exclusive = {"exclusiveMaximum": least + 1000} if random.random() < 0.3 else {}
        steps = {"multipleOf": random.choice((2, 5, 7))} if random.random() < 0.3 and not bounds else {}
        return {"type": "integer", **bounds, **exclusive, **steps}

    def number(self) -> Schema:
        least = self.random.uniform(-5, 5)
        bounds = self.random.choice(({"minimum": least, "maximum": least + 3.5}, {"exclusiveMinimum": 0}, {}))
        return {"type": "number", **bounds}

    def string(self) -> Schema:
        least = self.random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self.random.randint(0, 8)}

    def enum(self) -> Schema:
        values = ("red", "é", 'a"b\\c', 1, 2.5, None, True, {"a": [1]}, "日本")
        return {"enum": self.random.sample(values, self.random.randint(1, 4))}

    def const(self) -> Schema:
        return {"const": self.random.choice(("fixed", 7, None, {"a": {"b": [True, "c"]}}))}

    def truth(self) -> Schema:
        return {"type": self.random.choice(("boolean", "null"))}

    def pattern(self) -> Schema:
        return {"type": "string", "pattern": self.random.choice(BOUNDED_PATTERNS if self.is_bounded else PATTERNS)}

    def format(self) -> Schema:
        return {"type": "string", "format": self.random.choice(BOUNDED_FORMATS if self.is_bounded else FORMATS)}

    def several(self) -> Schema:
        return {"type": self.random.sample(("integer", "boolean", "null"), 2)}

    def object(self, depth: int) -> Schema:
        names = self.random.sample(NAMES, self.random.randint(0, 4))
        required = [name for name in names if self.random.random() < 0.6]
        is_open = not self.is_bounded and self.random.random() < 0.25
        more = {"additionalProperties": {"const": 0} if is_open else False}
        properties = {name: self.nested(depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, **more}

    def array(self, depth: int) -> Schema:
        least = self.random.randint(0, 2)
        bounds = {"minItems": least, "maxItems": least + self.random.randint(0, 2)}
        return {"type": "array", "items": self.nested(depth - 1), **bounds}

    def tuple(self, depth: int) -> Schema:
        items = [self.nested(depth - 1) for _ in range(self.random.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.nested(depth - 1) for _ in range(self.random.randint(1, 3))]}


def validated(schema: Schema, text: str) -> object:
    """The value of a text, which must be of a schema."""
    value: object = json.loads(text)
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
    return value

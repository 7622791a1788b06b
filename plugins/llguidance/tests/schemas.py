"""Schemas of many kinds, most of them with documents short enough for a model that draws at
random."""

from __future__ import annotations

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
WORD = {"type": "string", "maxLength": 8}
SCHEMAS = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer"},
    "range": {"type": "integer", "minimum": -17, "exclusiveMaximum": 1234},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7},
    "string": WORD,
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "const": {"const": {"a": "b"}},
    "types": {"type": ["integer", "null", "boolean"]},
    "object": POINT,
    "optional": {
        "type": "object",
        "properties": {"a": WORD, "b": POINT, "c": {"type": "null"}},
        "additionalProperties": False,
    },
    "additional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": {"type": "integer", "minimum": 0},
    },
    "array": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, WORD],
        "items": False,
        "minItems": 2,
    },
    "any": {"anyOf": [POINT, {"type": "array", "items": POINT, "maxItems": 2}]},
    "one": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "all": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 99}]},
    "nested": {
        "type": "object",
        "properties": {
            "name": WORD,
            "tags": {"type": "array", "items": WORD, "maxItems": 3},
            "at": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "tags", "at"],
        "additionalProperties": False,
    },
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
                },
                "required": ["value", "left"],
                "additionalProperties": False,
            }
        },
    },
}

"""Constraints that no grammar enforces are refused with what is at fault."""

from typing import Any

import pytest

from services.ingress.api.unenforced import pattern_fault, unenforced

STRING, NULL = {"type": "string"}, {"type": "null"}


def kind(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, **more}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(?i)a", "flags `(?i)` (at 0)"),
        ("a(?-i:b)", "flags `(?-i:`"),
        ("a[[:alpha:]]+", "set `[[:alpha:]` (at 1)"),
        ("a^b", "anchor `^` (at 1)"),
        ("a$b", "anchor `$` (at 1)"),
    ],
)
def test_a_construct_of_a_pattern_that_is_misread_is_named(pattern: str, fault: str) -> None:
    assert fault in pattern_fault(pattern)
    told = unenforced({"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}})
    assert told.startswith("pattern of $.properties.x: ")
    assert fault in told


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a|b)$", "^a$|^b$", "(^a|b$)", "((a$)|c)$", "[^\\]]+", "[]", "[", "a\\", "(?=a)b",
        "(?:^a)b", "(?<name>^a)b", r"^\d{4}-\d{2}(\.\w+)?\s*$", r"[\w.-]+@[\w-]+\.[a-z]{2,9}",
        r"\u0041\x41\cA\/\$", "a+?b*?",
    ],
)  # fmt: skip
def test_a_pattern_without_such_is_taken(pattern: str) -> None:
    assert not pattern_fault(pattern)


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "string", "not": {"const": "a"}}, "`not` is not enforced"),
        ({"type": "object", "if": {}, "then": {}}, "`if` is not enforced"),
        ({"type": "object", "properties": {}, "dependentRequired": {"a": ["b"]}}, "`dependentRequired`"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
        ({"type": ["integer", "null"], "multipleOf": 3}, "`multipleOf`"),
        ({"minimum": 3}, "`minimum` is not enforced without `type`"),
        ({"anyOf": [STRING], "properties": {"a": NULL}}, "`properties` is not enforced beside `anyOf`"),
        ({"const": "a", "minLength": 5}, "`minLength` is not enforced beside `const`"),
        ({"enum": ["a", 1], "type": "string"}, "`type` is not enforced beside `enum`"),
        ({"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": STRING}}, "`maxLength` is not enforced beside `$ref`"),
        ({"anyOf": [STRING, NULL], "type": "string"}, "`type` is not enforced beside `anyOf`"),
        ({"allOf": [STRING, {"maxLength": 3}]}, "`allOf` of more than one schema"),
        ({"oneOf": [STRING, {"type": "string", "maxLength": 3}]}, "`oneOf` whose schemas may hold at once"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "`oneOf`"),
        ({"oneOf": [kind("a"), {"type": "object"}]}, "`oneOf`"),
        ({"type": "string", "format": "color"}, "`format` `color`"),
        ({"type": "string", "pattern": "a*", "maxLength": 3}, "`pattern` and `maxLength`"),
        ({"type": "object", "properties": {"a": NULL}, "required": ["b"]}, "`required` names `b`"),
        ({"type": "object", "patternProperties": {"a": NULL}, "properties": {"b": NULL}}, "`patternProperties` and"),
        ({"type": "object", "patternProperties": {"(?i)a": NULL}}, "flags"),
    ],
    ids=str,
)  # fmt: skip
def test_a_keyword_that_would_be_ignored_is_named_with_its_place(schema: dict[str, Any], fault: str) -> None:
    assert fault in unenforced(schema)
    assert fault in unenforced({"type": "array", "items": {"anyOf": [schema, NULL]}, "$defs": schema.get("$defs", {})})
    if " (at $)" in unenforced(schema):
        assert "(at $.items.anyOf[0])" in unenforced({"type": "array", "items": {"anyOf": [schema]}})


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"title": "T", "description": "d", "default": None, "examples": [1], "x-mine": 1, "nullable": True},
        {"type": "string", "minimum": 3, "uniqueItems": True},
        {"type": "array", "items": STRING, "uniqueItems": False, "minItems": 1, "maxItems": 9},
        {"type": "string", "enum": ["a", "b"], "default": "a"},
        {"type": "number", "enum": [1, 2.5]},
        {"type": ["string", "null"], "maxLength": 9},
        {"type": "object", "anyOf": [kind("a"), kind("b")]},
        {"oneOf": [STRING, NULL, {"type": "array"}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": kind("a"), "b": kind("b", c=NULL)}},
        {"allOf": [{"$ref": "#/$defs/a"}], "title": "T", "$defs": {"a": STRING}},
        {"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": {"type": "integer"}},
        {"properties": {"not": STRING, "if": {"format": "date", "type": "string"}}, "required": ["not"]},
        {"type": "string", "format": "uuid"},
    ],
    ids=str,
)
def test_a_schema_that_is_enforced_whole_is_taken(schema: dict[str, Any]) -> None:
    assert not unenforced(schema)


@pytest.mark.parametrize("text", ["[", "(", "{", "{1", "\\", "(?<a", "{" + "1" * 40, "a{1,"])
def test_a_long_pattern_is_read_in_one_pass(text: str) -> None:
    pattern_fault(text * (200_000 // len(text)))
    pattern_fault(text * (200_000 // len(text)) + "\\")
    pattern_fault(text + "1" * 200_000)

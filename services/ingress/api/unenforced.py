"""Keywords of a JSON Schema that a grammar would not enforce: refused, since nothing of a request is ignored.

xgrammar reads of each schema object the first of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf``,
``type`` that it has, and only what belongs to that; the rest is left out in silence. So a keyword is refused where it
would restrict a value and is not read. Keywords of a type that the value cannot have restrict nothing, and annotations
never do. What its compiler refuses, or leaves out with a warning, a worker's trial refuses (``grammar_check.py``): it
takes place beside the engine.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from services.ingress.api.schema_references import located, target

#: Parts of a pattern: escapes, sets, and what is not enforced, since it is read as something else. No part is begun in
#: vain, so a long pattern is read in one pass.
_PATTERN = re.compile(
    r"\\.|(?P<set>\[\^?(?:\\.?|[^\]\\])*(?:\]|\Z))"
    r"|(?P<flags>\(\?[a-z-]+[):])|(?P<anchor>(?<=[^(|^:>])\^|\$(?=[^)|$]))",
    re.DOTALL,
)
_encode = msgspec.json.Encoder(order="sorted").encode
_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
#: Type -> (keywords that restrict such values and are read, those that are not).
_KEYWORDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "object": (
        frozenset({
            "properties", "required", "patternProperties", "additionalProperties", "propertyNames",
            "unevaluatedProperties", "minProperties", "maxProperties",
        }),
        frozenset({"dependentRequired", "dependentSchemas", "dependencies"}),
    ),
    "array": (
        frozenset({"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"}),
        frozenset({"contains", "minContains", "maxContains", "uniqueItems", "additionalItems"}),
    ),
    "string": (frozenset({"pattern", "format", "minLength", "maxLength"}), frozenset()),
    "number": (frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}), frozenset({"multipleOf"})),
}  # fmt: skip
_KEYWORDS["integer"] = _KEYWORDS["number"]
#: Keywords that restrict values of any type and are never read.
_NEVER = frozenset({"not", "if", "then", "else", "$dynamicRef", "$recursiveRef"})
_TYPED = frozenset().union(*(read | unread for read, unread in _KEYWORDS.values()))
#: Type -> pairs of its keywords of which at most one is read.
_PAIRS = (
    ("string", "pattern", "minLength"), ("string", "pattern", "maxLength"), ("string", "format", "minLength"),
    ("string", "format", "maxLength"), ("string", "format", "pattern"), ("object", "patternProperties", "properties"),
    ("object", "propertyNames", "properties"), ("object", "propertyNames", "patternProperties"),
    ("object", "propertyNames", "unevaluatedProperties"),
)  # fmt: skip
_FORMATS = frozenset({
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
})  # fmt: skip


def unenforced(schema: dict[str, Any]) -> str:
    """The first thing in a valid schema that no grammar would enforce, with its place; empty for none."""
    for place, node in located(schema):
        fault = _unread(schema, node, named=place.endswith(".propertyNames"))
        if fault:
            return f"{fault} (at {place})."
        for pattern in (node.get("pattern", ""), *node.get("patternProperties", ())):
            if fault := pattern_fault(pattern):
                return f"pattern of {place}: {fault}."
    return ""


def pattern_fault(pattern: str) -> str:
    """The first construct of a pattern that is not enforced, as part of a sentence; empty for none."""
    for part in _PATTERN.finditer(pattern):
        if part.lastgroup in ("flags", "anchor") or "[:" in (part["set"] or "")[1:]:
            return f"{part.lastgroup} `{part[0]}` (at {part.start()}) is not enforced"
    return ""


def _unread(root: dict[str, Any], node: dict[str, Any], *, named: bool) -> str:
    """A keyword that restricts a value and is not read; ``named``: the schema is one of names, thus of strings."""
    never = node.keys() & _NEVER
    if never:
        return f"`{min(never)}` is not enforced"
    form = next((form for form in _FORMS if form in node), "")
    if form:
        return _beside(root, node, form)
    types = _types(node) or _implied(node, named=named)
    for kind in sorted(types & _KEYWORDS.keys()):
        for keyword in sorted(node.keys() & _KEYWORDS[kind][1]):
            if node[keyword] is not False:
                return f"`{keyword}` is not enforced"
    if not types and (typed := node.keys() & _TYPED):
        return f"`{min(typed)}` is not enforced without `type`"
    return _clash(node, types)


def _clash(node: dict[str, Any], types: frozenset[str]) -> str:
    """Keywords that are read and yet not enforced, because of what stands beside them."""
    if "string" in types and node.get("format", "date") not in _FORMATS:
        return f"`format` `{node['format'][:40]}` is not enforced"
    for kind, first, second in _PAIRS:
        if kind in types and first in node and second in node:
            return f"`{first}` and `{second}` of one schema are not enforced together"
    if "object" in types:
        if len(node.get("patternProperties", ())) > 1:
            return "more than one pattern in `patternProperties` is not enforced"
        for name in node.get("required", ()):
            if name not in node.get("properties", {}):
                return f"`required` names `{name[:40]}`, which is not in `properties`: that is not enforced"
    return ""


def _beside(root: dict[str, Any], node: dict[str, Any], form: str) -> str:
    """The fault of keywords beside one that is read alone."""
    for keyword in sorted(node.keys() & (_TYPED | {*_FORMS, "type"})):
        if keyword != form and not (keyword == "type" and _fits(root, node, form)):
            return f"`{keyword}` is not enforced beside `{form}`"
    if form == "allOf" and len(node["allOf"]) > 1:
        return "`allOf` of more than one schema is not enforced"
    if form == "oneOf":
        for index, first in enumerate(node["oneOf"]):
            for second in node["oneOf"][index + 1 :]:
                if not _apart(target(root, first), target(root, second)):
                    return "`oneOf` whose schemas may hold at once is not enforced; use `anyOf`"
    return ""


def _fits(root: dict[str, Any], node: dict[str, Any], form: str) -> bool:
    """Whether all that a keyword allows has a type that stands beside it."""
    if form in ("const", "enum"):
        branches = [frozenset({_kind(value)}) for value in node.get("enum", [node.get("const")])]
    else:
        branches = [_types(target(root, each)) for each in (node[form] if form != "$ref" else [node])]
    allowed = _types(node)
    return all(types and types <= allowed for types in branches)


def _apart(first: Any, second: Any) -> bool:
    """Whether no value can be of both schemas: of other types, or objects with other constants for one name."""
    types, others = _types(first), _types(second)
    if not types or not others:
        return False
    if types == others == frozenset({"object"}):
        known = _constants(second)
        return any(name in known and not values & known[name] for name, values in _constants(first).items())
    return not types & others


def _constants(schema: dict[str, Any]) -> dict[str, set[bytes]]:
    """The values of each required property that has a fixed set of them."""
    properties = {name: schema.get("properties", {}).get(name) for name in schema.get("required", ())}
    return {
        name: {_encode(value) for value in each.get("enum", [each.get("const")])}
        for name, each in properties.items()
        if isinstance(each, dict) and ("const" in each or "enum" in each)
    }


def _types(schema: Any) -> frozenset[str]:
    """The types that a schema names; numbers can be integers."""
    told = schema.get("type", []) if isinstance(schema, dict) else []
    types = frozenset([told] if isinstance(told, str) else told)
    return types | {"integer"} if "number" in types else types


def _implied(node: dict[str, Any], *, named: bool) -> frozenset[str]:
    """The type that xgrammar takes a schema for that names none."""
    if named:
        return frozenset({"string"})
    if node.keys() & {"properties", "additionalProperties", "unevaluatedProperties"}:
        return frozenset({"object"})
    return frozenset({"array"}) if node.keys() & {"items", "prefixItems", "unevaluatedItems"} else frozenset()


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"

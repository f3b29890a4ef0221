"""Request bodies to Structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from services.ingress.api.errors import ApiError
from services.ingress.api.unsupported import without_unsupported

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")
_PATH = re.compile(r" - at (`key` in )?`\$(?P<path>[^`]*)`$")
_ENUM = re.compile(r"^Invalid (enum )?value (?P<value>.*)$", re.DOTALL)
_BOUND = re.compile(r"` (?P<bound>>=|<=) ")
#: The names of pydantic's errors, by which clients of vLLM know them.
_BOUNDS = {">=": "greater_than_equal", "<=": "less_than_equal"}
_STEP = re.compile(r"(?P<name>[^.\[\]]+)|\[(?P<index>[0-9.]*)\]")
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}


def decode_body(body: bytes, kind: type[T]) -> T:
    """Read a JSON body.

    Raises:
        ApiError: 400 for what is no JSON, no UTF-8, an unknown or missing field, a value of the wrong type or out of
            bounds, or a parameter that is not supported.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        try:
            return cast("T", decoder.decode(body))
        except msgspec.ValidationError as error:
            supported = without_unsupported(body, kind) if _UNKNOWN.match(str(error)) else None
            if supported is None:
                raise _invalid(str(error), kind) from None
        return decode_body(supported, kind)
    except msgspec.DecodeError as error:
        reason = "The body is empty" if not body else f"The body is not valid JSON: {error}"
        raise ApiError(400, f"{reason}.", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8: {error.reason}.", code="invalid_utf8") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def _invalid(text: str, kind: type[Any]) -> ApiError:
    at = _PATH.search(text)
    path = at["path"].lstrip(".").removesuffix("[...]") if at else ""  # of an entry whose key is the client's
    sentence = text[: at.start()] if at else text
    for pattern, word, code in ((_UNKNOWN, "Unknown", "unknown_parameter"), (_MISSING, "Missing", "missing_parameter")):
        named = pattern.match(sentence)
        if named:
            param = f"{path}.{named['name']}" if path else named["name"]
            return ApiError(400, f"{word} parameter: `{param}`.", param=param, code=code)
    if not path:
        return ApiError(400, f"The body is wrong: {sentence}.", code="invalid_type")
    if enum := _ENUM.match(sentence):
        sentence = f"{enum['value'][:100]} is none of {', '.join(sorted(map(repr, _allowed(kind, path))))}"
    elif bound := _BOUND.search(sentence):
        sentence += f" ({_BOUNDS[bound['bound']]})"
    return ApiError(400, f"Invalid value for `{path}`: {sentence}.", param=path, code="invalid_value")


def _allowed(kind: type[Any], path: str) -> set[Any]:
    """Values of the literals that may stand at a path of a body."""
    types = [inspect.type_info(kind)]
    for step in _STEP.finditer(path):
        types = [inner for each in _flat(types) for inner in _inside(each, step["name"])]
    return {value for each in _flat(types) if isinstance(each, inspect.LiteralType) for value in each.values}


def _flat(types: list[inspect.Type]) -> list[inspect.Type]:
    """The types without annotations, and members in place of unions."""
    flat: list[inspect.Type] = []
    for each in types:
        if isinstance(each, inspect.Metadata):
            flat += _flat([each.type])
        elif isinstance(each, inspect.UnionType):
            flat += _flat(list(each.types))
        else:
            flat.append(each)
    return flat


def _inside(kind: inspect.Type, name: str | None) -> list[inspect.Type]:
    """Types of a named field, or of the items of an array."""
    if isinstance(kind, inspect.StructType):
        tag: list[inspect.Type] = [inspect.LiteralType((kind.tag,))] if name == kind.tag_field is not None else []
        return tag + [field.type for field in kind.fields if field.encode_name == name]
    return [kind.item_type] if isinstance(kind, inspect.ListType) and name is None else []

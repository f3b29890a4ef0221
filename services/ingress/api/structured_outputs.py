"""Output constraints: response_format and structured_outputs, checked before anything uses them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jsonschema_rs
import msgspec
from millrace.contracts.worker import StructuredOutput

from services.ingress.api.errors import bad_value
from services.ingress.api.requests import ResponseFormat, Shared, StructuredOutputs
from services.ingress.api.unenforced import pattern_fault, unenforced

#: Longest schema, bytes of JSON. Checking one this long takes a few ms, once: checked schemas are remembered.
SCHEMA_BYTES_MAX = 32_768
#: Dialects that are known here. The checker would try to fetch any other from its URL.
DIALECTS = frozenset(
    f"{base}{end}"
    for base in (
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-04/schema",
    )
    for end in ("", "#")
)

_encode = msgspec.json.Encoder().encode


def structured_output(request: Shared) -> StructuredOutput | None:
    """The request's constraint; None for free text.

    Raises:
        ApiError: 400 for two constraints at once, a missing or wrong schema.
    """
    form, own = request.response_format, request.structured_outputs
    wanted = _from_format(form) if form is not None else None
    if own is None:
        return wanted
    if wanted is not None:
        raise bad_value("structured_outputs", "Give `response_format` or `structured_outputs`, not both.")
    return _from_structured(own)


def enforced_schema(schema: Any, param: str) -> str:
    """JSON text of a schema that a grammar enforces whole.

    Raises:
        ApiError: 400 saying what is wrong with it, or not enforced.
    """
    text = checked_schema(schema, param)
    fault = _unenforced(text)
    if fault:
        raise bad_value(param, f"`{param}` cannot be enforced: {fault}", "invalid_json_schema")
    return text


def checked_schema(schema: Any, param: str) -> str:
    """JSON text of a schema that is one.

    Raises:
        ApiError: 400 saying what is wrong with it.
    """
    try:
        text = _encode(schema)
    except RecursionError:
        raise bad_value(param, f"`{param}` is nested too deeply.") from None
    if len(text) > SCHEMA_BYTES_MAX:
        raise bad_value(param, f"`{param}` is {len(text)} bytes long, at most {SCHEMA_BYTES_MAX} are taken.")
    fault = _schema_fault(text)
    if fault:
        raise bad_value(param, f"`{param}` is no valid JSON Schema: {fault}", "invalid_json_schema")
    return text.decode()


def _from_format(form: ResponseFormat) -> StructuredOutput | None:
    if form.type != "json_schema":
        if form.json_schema is not None:
            raise bad_value(
                "response_format.json_schema", "`json_schema` is only for `response_format.type` `json_schema`."
            )
        return StructuredOutput(json_object=True) if form.type == "json_object" else None
    param = "response_format.json_schema"
    if form.json_schema is None:
        raise bad_value(param, f"`{param}` is missing.", "missing_parameter")
    if form.json_schema.schema is None:
        raise bad_value(f"{param}.schema", f"`{param}.schema` is missing.", "missing_parameter")
    return StructuredOutput(json_schema=enforced_schema(form.json_schema.schema, f"{param}.schema"))


def _from_structured(own: StructuredOutputs) -> StructuredOutput:
    given = [name for name in own.__struct_fields__ if getattr(own, name) not in (None, False)]
    if len(given) != 1:
        raise bad_value("structured_outputs", f"Give exactly one constraint, not {len(given)}.")
    if own.regex is not None and (fault := pattern_fault(own.regex)):
        raise bad_value("structured_outputs.regex", f"`structured_outputs.regex` cannot be enforced: {fault}.")
    if own.json is None:
        return StructuredOutput(
            json_object=bool(own.json_object), regex=own.regex, choice=own.choice, grammar=own.grammar
        )
    param = "structured_outputs.json"
    schema: Any = own.json
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_value(param, f"`{param}` is no valid JSON: {error}") from None
    return StructuredOutput(json_schema=enforced_schema(schema, param))


@lru_cache(maxsize=256)
def _unenforced(text: str) -> str:
    return unenforced(msgspec.json.decode(text))


@lru_cache(maxsize=256)
def _schema_fault(text: bytes) -> str:
    schema = msgspec.json.decode(text)
    if not isinstance(schema, dict):
        return "it is not an object."
    dialect = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    if not isinstance(dialect, str) or dialect not in DIALECTS:
        return "its `$schema` is no dialect that is known here."
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        where = "/".join(map(str, error.instance_path))
        return f"{error.message[:300]} (at `{where}`)." if where else f"{error.message[:300]}."
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        return f"{str(error)[:300]}."
    return ""

"""The verifier: an answer that breaks its own constraint is wrong. It vetoes only; it never calls an answer right.

Expressions and schemas come from clients. Both are matched by an engine of linear time (jsonschema-rs on Rust's regex),
so that none can stop the judge. What that engine does not know (look-around, back-references) is not checked.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import jsonschema_rs
import msgspec
from millrace.contracts.judge import JudgeAnswer

#: Checkers kept, the least recently used one is dropped. A schema takes some 10 KB.
CHECKERS_MAX = 256

#: Longest answer that is checked, characters; a longer one is left to other kinds.
ANSWER_MAX = 1_000_000

#: Longest constraint, characters; ingress takes schemas up to 32 KiB.
CONSTRAINT_MAX = 65_536

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def veto(question: JudgeAnswer) -> str:
    """Reason why the answer cannot be right; empty where none was found."""
    for index, answer in enumerate(question.answer):
        if len(answer) > ANSWER_MAX or len(question.constraint) > CONSTRAINT_MAX:
            continue
        fault = _constraint_fault(question, answer) or _tool_fault(question.tools, answer)
        if fault:
            return fault if len(question.answer) == 1 else f"choice {index}: {fault}"
    return ""


def _constraint_fault(question: JudgeAnswer, answer: str) -> str:
    match question.structured:
        case "json_schema":
            return _schema_fault(question.constraint, answer)
        case "json_object":
            told = _parsed(answer)
            return "" if isinstance(told, dict) else "the answer is no JSON object"
        case "regex":
            return _regex_fault(question.constraint, answer)
        case "choice":
            return _choice_fault(question.constraint, answer)
        case _:
            return ""


def _schema_fault(schema: str, answer: str) -> str:
    checker = _checker(schema)
    if checker is None:
        return ""
    told = _parsed(answer)
    if isinstance(told, _NotJson):
        return "the answer is no JSON"
    try:
        checker.validate(told)
    except jsonschema_rs.ValidationError as error:
        where = "/".join(map(str, error.instance_path))
        return f"the answer breaks its schema at /{where}: {error.message[:200]}"
    return ""


def _regex_fault(expression: str, answer: str) -> str:
    checker = _checker(json.dumps({"type": "string", "pattern": f"^(?:{expression})$"}))
    return "" if checker is None or checker.is_valid(answer) else "the answer does not match its regular expression"


def _choice_fault(constraint: str, answer: str) -> str:
    choices = _parsed(constraint)
    if not isinstance(choices, list):
        return ""
    return "" if answer in choices else "the answer is none of the choices"


def _tool_fault(tools: list[str], answer: str) -> str:
    """A call that does not parse, or calls what there is not. No call at all is no fault: text may answer, too."""
    if not tools:
        return ""
    for call in _TOOL_CALL.findall(answer):
        told = _parsed(call)
        name = told.get("name") if isinstance(told, dict) else None
        if name is None:
            return "a tool call does not parse"
        if name not in tools:
            return f"a tool call names {str(name)[:80]!r}, which is not offered"
    return ""


class _NotJson:
    """Marker for text that does not parse."""


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _NotJson()


@lru_cache(maxsize=CHECKERS_MAX)
def _checker(schema: str) -> Any:
    """A validator; None for a schema that cannot be checked here."""
    try:
        return jsonschema_rs.validator_for(schema, pattern_options=jsonschema_rs.RegexOptions())
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError):
        return None

"""Errors of engines in a client's words: the request field at fault, and no path of a source file."""

from __future__ import annotations

import re

import msgspec
from millrace.contracts.worker import SequenceRefused

from services.ingress.calls.messages import Call

#: Time stamp and source location with which xgrammar's C++ begins an error.
_LOCATION = re.compile(r"(?:\[\d\d:\d\d:\d\d\]\s*)?(?:[\w.+-]*/)+[\w.+-]+\.(?:cc|cpp|cu|h|hpp|py)(?::\d+)?:?\s*")
#: Words by which an engine speaks of the output constraint.
_CONSTRAINT = re.compile(r"constraint|grammar|regex|json|schema|structured|choice|guided", re.IGNORECASE)


class EngineRefusal(msgspec.Struct, frozen=True):
    """A refusal as a client gets it; ``param`` is empty where no field is at fault."""

    detail: str
    param: str = ""


def engine_error(call: Call, answer: SequenceRefused) -> EngineRefusal:
    """The refusal of an engine that every engine would repeat."""
    detail = _LOCATION.sub("", answer.detail).strip()
    if not detail:
        return EngineRefusal(f"The engine refuses the request: {answer.reason.value}.")
    param = call.constraint_param if _CONSTRAINT.search(detail) else ""
    return EngineRefusal(detail, param)

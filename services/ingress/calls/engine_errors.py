"""Errors of engines in a client's words: the request field at fault, and no path of a source file."""

from __future__ import annotations

import re

from millrace.contracts.worker import SequenceRefused

from services.ingress.calls.messages import Call

#: Time stamp and source location with which xgrammar's C++ begins an error.
_LOCATION = re.compile(r"(?:\[\d\d:\d\d:\d\d\]\s*)?(?:[\w.+-]*/)+[\w.+-]+\.(?:cc|cpp|cu|h|hpp|py)(?::\d+)?:?\s*")
#: Words by which an engine speaks of the output constraint.
_CONSTRAINT = re.compile(r"constraint|grammar|regex|json|schema|structured|choice|guided", re.IGNORECASE)


def engine_error(call: Call, answer: SequenceRefused) -> tuple[str, str]:
    """Text and request field of a refusal that every engine would repeat; the field is empty where none is at fault."""
    detail = _LOCATION.sub("", answer.detail).strip()
    if not detail:
        return f"The engine refuses the request: {answer.reason.value}.", ""
    return detail, call.constraint_param if _CONSTRAINT.search(detail) else ""

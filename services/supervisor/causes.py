"""Finds in the log of a process that did not start the one exception that says why. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Before each line that vLLM's logger writes.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?(\[\w+\] )?([A-Z]+ [\d-]+ [\d:]+ \[\S+\] ?)?")
_RAISED = re.compile(r"^((?:\w+\.)*[A-Z]\w*)(?:: (.*))?$")
#: The last line of a service that did not start.
_OWN = re.compile(r"^[a-z][a-z-]*: (.+)$")
#: These say no more than that the cause was logged before, mostly by another process.
_ELSEWHERE = re.compile(r"See root cause above|check the logs for more details|^Error raised in subprocess|^$")


def failure_cause(lines: Iterable[str]) -> str:
    """Return what the service said at its end, or where that only names the log, the last exception logged before;
    empty where there is neither.
    """
    raised = own = ""
    code, open_traceback = "", False
    for line in (_PREFIX.sub("", line.rstrip()) for line in lines):
        if line.startswith("Traceback (most recent call last)"):
            open_traceback, code = True, ""
        elif open_traceback and line.startswith("    ") and line.strip(" ^~"):
            code = line.strip()
        elif open_traceback and (match := _RAISED.match(line)):
            open_traceback = False
            kind, text = match[1].rpartition(".")[2], match[2] or (f"`{code}`" if match[1] == "AssertionError" else "")
            raised = raised if _ELSEWHERE.search(text) else f"{kind}: {text}"
        elif match := _OWN.match(line):
            own = match[1]
    return raised if raised and (not own or _ELSEWHERE.search(own)) else own

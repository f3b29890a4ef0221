"""Parser of output that may hold tool calls, whole or as it comes.

A call is told as soon as its name is complete and its arguments begin; the arguments follow as they come, up to the
brace that closes them, as vLLM streams them. What is between tags and not such a call is text, once that is certain.
An output that ends early leaves its last call with the arguments so far. A forced call is never text.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from services.ingress.api.tools import CLOSE_TAG, OPEN_TAG, ToolMode, ToolPlan, tagged_call
from services.ingress.calls.messages import CallPart

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LIST_HEAD = re.compile(r"[\s,\[]*" + _HEAD.pattern)


class _State(Enum):
    TEXT = "text"
    HEAD = "head"
    ARGUMENTS = "arguments"
    TAIL = "tail"


class ToolCallParser:
    """Parser of one choice's output."""

    __slots__ = ("_begun", "_depth", "_escaped", "_held", "_in_string", "_parts", "_plan", "_state", "_text")

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._held = self._text = ""
        self._parts: list[CallPart] = []
        self._begun = 0
        self._state = _State.TEXT if plan.mode is ToolMode.TAGGED else _State.HEAD
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def calls(self) -> int:
        return min(self._begun, 1) if self._plan.single else self._begun

    def push(self, text: str, *, finished: bool = False) -> tuple[str, list[CallPart]]:
        """Parse a further part of the output, which may be its last; what is certain now of text and of calls."""
        if self._plan.mode is ToolMode.NAMED:
            if text:
                self._tell("" if self._begun else self._plan.function, text)
                self._begun = 1
        else:
            self._held += text
            while self._advance():
                pass
            if finished:
                self._end()
        told, self._text, self._parts = (self._text, self._parts), "", []
        return told

    def _end(self) -> None:
        """Tell what is held and no call as text, but for a list's end, and a forced call without a whole name."""
        held, self._held = self._held, ""
        if self._plan.mode is not ToolMode.TAGGED or self._state in (_State.ARGUMENTS, _State.TAIL):
            return
        if self._state is _State.HEAD or not self._begun or held.strip():
            self._text += (OPEN_TAG if self._state is _State.HEAD else "") + held

    def _advance(self) -> bool:
        """Take what is certain off what is held; whether there may be more."""
        match self._state:
            case _State.TEXT:
                return self._take_text()
            case _State.HEAD:
                return self._take_head()
            case _State.ARGUMENTS:
                return self._take_arguments()
            case _State.TAIL:
                return self._take_tail()

    def _take_text(self) -> bool:
        at = self._held.find(OPEN_TAG)
        shown = self._held[: at if at >= 0 else len(self._held) - _tag_begun(self._held)]
        if not self._begun or shown.strip():  # blanks between calls are no text
            self._text += shown
            self._held = self._held[len(shown) :]
        if at < 0:
            return False
        self._held = self._held.partition(OPEN_TAG)[2]
        self._state = _State.HEAD
        return True

    def _take_head(self) -> bool:
        tagged = self._plan.mode is ToolMode.TAGGED
        found = (_HEAD if tagged else _LIST_HEAD).match(self._held)
        if found:
            self._begin(msgspec.json.decode(found[1].encode(), type=str))
            self._held = self._held[found.end() :]
            self._state, self._depth, self._in_string, self._escaped = _State.ARGUMENTS, 0, False, False
            return True
        if not tagged or CLOSE_TAG not in self._held:
            return False
        # Fields in another order, no arguments, or no call at all.
        inner, _, self._held = self._held.partition(CLOSE_TAG)
        call = tagged_call(inner)
        if call is None:
            self._text += OPEN_TAG + inner + CLOSE_TAG
        else:
            self._begin(*call)
        self._state = _State.TEXT
        return True

    def _take_arguments(self) -> bool:
        end = self._end_of_object()
        self._tell("", self._held[:end])
        self._held = self._held[end:]
        if self._depth == 0:
            self._state = _State.TAIL
            return True
        return False

    def _end_of_object(self) -> int:
        """Index behind the brace that closes the arguments; the whole length while it is open."""
        for i, character in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    return i + 1
        return len(self._held)

    def _take_tail(self) -> bool:
        tagged = self._plan.mode is ToolMode.TAGGED
        _, found, rest = self._held.partition(CLOSE_TAG if tagged else "}")
        if not found:
            return False
        self._held = rest
        self._state = _State.TEXT if tagged else _State.HEAD
        return True

    def _begin(self, name: str, arguments: str = "") -> None:
        self._begun += 1
        self._tell(name, arguments)

    def _tell(self, name: str, arguments: str) -> None:
        """A further part of the latest call, which begins with its name."""
        index = max(0, self._begun - 1)
        if (self._plan.single and index > 0) or not (name or arguments):
            return
        if not name and self._parts and self._parts[-1].index == index:
            arguments = self._parts[-1].arguments + arguments
            name = self._parts.pop().name
        self._parts.append(CallPart(index, name, arguments))


def _tag_begun(text: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a tag."""
    return next((n for n in range(len(OPEN_TAG) - 1, 0, -1) if text.endswith(OPEN_TAG[:n])), 0)

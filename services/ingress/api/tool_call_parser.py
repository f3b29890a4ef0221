"""Parser of output that may hold tool calls, whole or as it comes.

A call is told as soon as its name is complete and its arguments begin; the arguments follow as they come, up to the
brace that closes them, as vLLM streams them. What is between tags and not such a call is text, once that is certain.
An output that ends early leaves its last call with the arguments so far. A forced call is never text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import msgspec

from services.ingress.api.tools import CLOSE_TAG, OPEN_TAG, ParsedCall, ToolMode, ToolPlan, tagged_call

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LIST_HEAD = re.compile(r"[\s,\[]*" + _HEAD.pattern)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The name of the call with this index is known."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """The next part of a call's arguments, JSON text."""

    index: int
    text: str


Piece = TextPiece | CallBegun | ArgumentsPiece


class _State(Enum):
    TEXT = "text"
    HEAD = "head"
    ARGUMENTS = "arguments"
    TAIL = "tail"


class ToolCallParser:
    """Parser of one choice's output; ``push`` what comes, then ``close``."""

    __slots__ = ("_begun", "_depth", "_escaped", "_held", "_in_string", "_plan", "_state")

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._held = ""
        self._begun = 0
        self._state = _State.TEXT if plan.mode is ToolMode.TAGGED else _State.HEAD
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def calls(self) -> int:
        """Number of calls told."""
        return min(self._begun, 1) if self._plan.single else self._begun

    def push(self, text: str) -> list[Piece]:
        """Parse a further part of the output."""
        if self._plan.mode is ToolMode.NAMED:
            return self._named(text)
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """The output has ended: what is held and no call is text."""
        held, self._held = self._held, ""
        if self._state is _State.ARGUMENTS or self._state is _State.TAIL or (self._begun and not held.strip()):
            return []
        if self._plan.mode is not ToolMode.TAGGED:
            return []  # the list's end, or a call without a whole name
        opening = OPEN_TAG if self._state is _State.HEAD else ""
        return [TextPiece(opening + held)] if opening + held else []

    def _named(self, text: str) -> list[Piece]:
        if not text:
            return []
        begun, self._begun = self._begun, 1
        opening: list[Piece] = [] if begun else [CallBegun(0, self._plan.function)]
        return [*opening, ArgumentsPiece(0, text)]

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take what is certain off what is held; whether there may be more."""
        step = {
            _State.TEXT: self._text,
            _State.HEAD: self._head,
            _State.ARGUMENTS: self._arguments,
            _State.TAIL: self._tail,
        }[self._state]
        return step(pieces)

    def _text(self, pieces: list[Piece]) -> bool:
        at = self._held.find(OPEN_TAG)
        shown = self._held[: at if at >= 0 else len(self._held) - _tag_begun(self._held)]
        if not self._begun or shown.strip():  # blanks between calls are no text
            if shown:
                pieces.append(TextPiece(shown))
            self._held = self._held[len(shown) :]
        if at < 0:
            return False
        self._held = self._held.partition(OPEN_TAG)[2]
        self._state = _State.HEAD
        return True

    def _head(self, pieces: list[Piece]) -> bool:
        tagged = self._plan.mode is ToolMode.TAGGED
        found = (_HEAD if tagged else _LIST_HEAD).match(self._held)
        if found:
            self._begin(pieces, msgspec.json.decode(found[1].encode(), type=str))
            self._held = self._held[found.end() :]
            self._state, self._depth, self._in_string, self._escaped = _State.ARGUMENTS, 0, False, False
            return True
        if not tagged or CLOSE_TAG not in self._held:
            return False
        # Fields in another order, no arguments, or no call at all.
        inner, _, self._held = self._held.partition(CLOSE_TAG)
        call = tagged_call(inner)
        if call is None:
            pieces.append(TextPiece(OPEN_TAG + inner + CLOSE_TAG))
        else:
            self._whole(pieces, call)
        self._state = _State.TEXT
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        end = self._end_of_object()
        if self._held[:end]:
            self._tell(pieces, ArgumentsPiece(self._begun - 1, self._held[:end]))
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

    def _tail(self, pieces: list[Piece]) -> bool:
        end = CLOSE_TAG if self._plan.mode is ToolMode.TAGGED else "}"
        _, found, rest = self._held.partition(end)
        if not found:
            return False
        self._held = rest
        self._state = _State.TEXT if self._plan.mode is ToolMode.TAGGED else _State.HEAD
        return True

    def _begin(self, pieces: list[Piece], name: str) -> None:
        self._begun += 1
        self._tell(pieces, CallBegun(self._begun - 1, name))

    def _whole(self, pieces: list[Piece], call: ParsedCall) -> None:
        self._begin(pieces, call.name)
        self._tell(pieces, ArgumentsPiece(self._begun - 1, call.arguments))

    def _tell(self, pieces: list[Piece], piece: CallBegun | ArgumentsPiece) -> None:
        if not (self._plan.single and piece.index > 0):
            pieces.append(piece)


def parse_calls(plan: ToolPlan, output: str) -> tuple[str, list[ParsedCall]]:
    """Split a whole output into its text and its calls, as its stream would."""
    parser = ToolCallParser(plan)
    text, names, arguments = "", list[str](), list[str]()
    for piece in [*parser.push(output), *parser.close()]:
        match piece:
            case TextPiece(part):
                text += part
            case CallBegun(_, name):
                names.append(name)
                arguments.append("")
            case ArgumentsPiece(index, part):
                arguments[index] += part
    calls = [ParsedCall(name, text) for name, text in zip(names, arguments, strict=True)]
    return text.strip() if calls else text, calls


def _tag_begun(text: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a tag."""
    return next((n for n in range(len(OPEN_TAG) - 1, 0, -1) if text.endswith(OPEN_TAG[:n])), 0)

"""Readers of a chat's output: they move what is no text (reasoning, tool calls) of each delta to fields of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec

from services.ingress.api.tool_call_parser import ToolCallParser
from services.ingress.api.tools import ToolMode, ToolPlan
from services.ingress.calls.messages import ChoiceDelta, DeltaLogprob

#: Gets output with its parts told apart, and the reasoning tokens so far.
Told = Callable[[list[ChoiceDelta], int | None], None]


class OutputReader(Protocol):
    """Reader of one call's output. It answers in the order of its questions, at once or later."""

    @property
    def busy(self) -> bool:
        """Whether answers are due."""
        return False

    @abstractmethod
    def read(self, deltas: list[ChoiceDelta], told: Told) -> None:
        """Hand over new output."""

    def close(self) -> None:
        """The call is over: nothing more is told."""
        return


class PromptOnlyReader(OutputReader):
    """Leaves an output out: only its prompt was asked for."""

    def read(self, deltas: list[ChoiceDelta], told: Told) -> None:
        empty = [None if delta.logprobs is None else list[DeltaLogprob]() for delta in deltas]
        told([msgspec.structs.replace(d, text="", logprobs=e) for d, e in zip(deltas, empty, strict=True)], None)


class JsonCallReader(OutputReader):
    """Calls that are JSON by a grammar, or stand between ``<tool_call>`` tags: read here, at once."""

    def __init__(self, plan: ToolPlan, choices: int) -> None:
        self._plan = plan
        self._parsers = [ToolCallParser(plan) for _ in range(choices)]

    def read(self, deltas: list[ChoiceDelta], told: Told) -> None:
        told([self._read(delta) for delta in deltas], None)

    def _read(self, delta: ChoiceDelta) -> ChoiceDelta:
        parser = self._parsers[delta.index]
        text, parts = parser.push(delta.text, finished=bool(delta.finish_reason))
        return msgspec.structs.replace(
            delta, text=text, calls=parts, finish_reason=_reason(delta.finish_reason, self._plan, parser.calls)
        )


def _reason(reason: str, plan: ToolPlan, calls: int) -> str:
    """Finish reason of a choice with calls: OpenAI says ``stop`` where one function was named."""
    return "tool_calls" if reason == "stop" and calls and plan.mode is not ToolMode.NAMED else reason

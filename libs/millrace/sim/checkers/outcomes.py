"""Checker of published request outcomes: at most one outcome each, never two."""

from __future__ import annotations

from millrace.actor.effects import Effect, Publish
from millrace.contracts.message import Message
from millrace.contracts.observers import RequestFinished
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess


class OneOutcome(Checker):
    """``published`` maps a request to its outcome."""

    def __init__(self) -> None:
        self.published: dict[str, str] = {}

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(effect.body, RequestFinished):
                body = effect.body
                before = self.published.setdefault(body.request, body.outcome)
                assert before == body.outcome, f"{body.request} ended as {before} and as {body.outcome}"
                assert len(body.output_tokens) == len(body.finish_reasons), f"{body.request}: choices disagree"

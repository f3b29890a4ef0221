"""Checker of cascades: tiers rise, accepted answers scored high enough, and the books balance over attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from millrace.actor.effects import Effect, Publish
from millrace.contracts.message import Message
from millrace.contracts.observers import CascadeAttempt, RequestFinished
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess

from services.ingress.cascade.lifecycle import DeliveryReason
from simulator.soak.clients import ClientExchange


class CascadeWatch(Checker):
    """Looks at every outcome.

    Attributes:
        reasons: Of delivered answers, counted.
        attempts: By outcome, counted.
        again: Tiers that were rejected early and then ran to their end.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.again = 0
        self._children: dict[str, RequestFinished] = {}
        self._parents: dict[str, RequestFinished] = {}

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Publish) or not isinstance(effect.body, RequestFinished):
                continue
            body = effect.body
            known = self._children if body.parent else self._parents
            assert body.request not in known, f"{body.request} has two outcomes"
            known[body.request] = body
            if body.attempts:
                self._look(body)

    def _look(self, body: RequestFinished) -> None:
        early: set[str] = set()
        again: set[str] = set()
        first: list[CascadeAttempt] = []
        for attempt in body.attempts:
            if attempt.model in early:  # it may run once more, to its end
                assert attempt.model not in again, f"{body.request}: {attempt.model} three times"
                again.add(attempt.model)
                continue
            first.append(attempt)
            if attempt.outcome == "rejected_early":
                early.add(attempt.model)
        self.again += len(again)
        tiers = [attempt.tier for attempt in first]
        assert tiers == sorted(set(tiers)), f"{body.request}: tiers {tiers} do not rise"
        assert len({attempt.model for attempt in first}) == len(tiers), f"{body.request}: a model twice"
        self.attempts.update(attempt.outcome for attempt in body.attempts)
        self._check_scores(body)
        self._check_books(body)

    def _check_scores(self, body: RequestFinished) -> None:
        for attempt in body.attempts:
            score, threshold = attempt.score, attempt.threshold
            rejected = attempt.outcome in ("rejected", "rejected_early")
            if rejected and score is not None and threshold is not None and attempt is not body.attempts[-1]:
                assert score < threshold, f"{body.request}: {attempt} was rejected"
        delivered = [attempt for attempt in body.attempts if attempt.outcome == "delivered"]
        assert len(delivered) == (body.outcome == "completed"), f"{body.request}: {body.outcome}, {delivered}"
        if not delivered:
            return
        self.reasons[body.reason] += 1
        (kept,) = delivered
        if body.reason == DeliveryReason.SCORE:
            assert kept.score is not None
            assert kept.threshold is not None
            assert kept.score >= kept.threshold, f"{body.request}: {kept}"
        if body.reason == DeliveryReason.LAST_TIER:
            assert kept is body.attempts[-1], f"{body.request}: {kept} is not the last"

    def _check_books(self, body: RequestFinished) -> None:
        """Each attempt that an instance accepted has an outcome of its own, which says the same."""
        for attempt in body.attempts:
            child = self._children.get(attempt.request)
            if child is None:
                # Of a call with several choices that ended before each had an instance.
                unsettled = attempt.outcome in ("failed", "cancelled", "rejected_early")
                assert unsettled, f"{attempt} has no outcome of its own"
                continue
            assert child.parent == body.request
            assert child.model == attempt.model
            assert sum(child.output_tokens) == attempt.output_tokens, f"{child} and {attempt}"
            whole = attempt.outcome in ("delivered", "rejected")
            # A complete answer is cancelled, too, where its client leaves while it is judged.
            assert attempt.outcome == "cancelled" or (child.outcome == "completed") == whole, f"{child} and {attempt}"

    def check_against(self, exchanges: Mapping[str, ClientExchange]) -> None:
        """In the end: no attempt without its call, and what completed was told to have completed."""
        for request, child in self._children.items():
            assert child.parent in exchanges, f"{request} is nobody's attempt"
            if exchanges[child.parent].outcome != "connection lost":
                assert child.parent in self._parents, f"{child.parent} has attempts and no outcome"
        for request, parent in self._parents.items():
            if parent.attempts and exchanges[request].outcome == "completed":
                assert parent.outcome == "completed", f"{request}: {parent.outcome}"

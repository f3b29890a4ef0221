"""Priority between prefill and decode inside instances: orders of step budgets, repeated while their reason lasts.

Part of the coordinator's actor. Owns the orders in force, by model. An order is a lease: it is repeated with each tick
and expires by itself at the worker, so that a coordinator that dies, or a message that is lost, leaves no instance
with a budget that nobody wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.actor.effects import Effect, Log, Publish
from millrace.contracts.status import InstanceRecord
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import SetStepBudget
from millrace.policies.roles import RoleDecision

#: An order holds for so long without being repeated: five of the coordinator's ticks.
VALID_MS = 5_000


class Priorities:
    """Sole owner of the step budgets that are ordered."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._ordered: dict[str, dict[str, int]] = {}

    def of_model(self, model: str) -> Mapping[str, int]:
        """Tokens of a step by instance, of those whose decodes come first."""
        return self._ordered.get(model, {})

    def tick(self, model: str, decisions: Iterable[RoleDecision], records: Iterable[InstanceRecord]) -> list[Effect]:
        """Repeats what the policy on roles wants, and ends what it wants no longer."""
        wanted = {each.instance: each.tokens for decision in decisions for each in decision.priorities}
        serving = {record.instance: record for record in records}
        before = self._ordered.get(model, {})
        ordered = {name: tokens for name, tokens in wanted.items() if name in serving}
        self._ordered[model] = ordered
        effects: list[Effect] = [self._order(serving[name], tokens) for name, tokens in sorted(ordered.items())]
        effects += [self._order(serving[name], 0) for name in sorted(before) if name not in ordered and name in serving]
        for name in sorted(set(ordered) ^ set(before)):
            fields = {"instance": name, "first": "decode" if name in ordered else "balanced"}
            effects.append(Log(level="info", event="priority", fields=fields | {"tokens": str(ordered.get(name, 0))}))
        return effects

    def forget(self, model: str) -> None:
        """The lease of a model is somebody else's; orders expire by themselves."""
        self._ordered.pop(model, None)

    def snapshot(self) -> dict[str, Any]:
        """For people and checkers."""
        return {model: dict(sorted(ordered.items())) for model, ordered in sorted(self._ordered.items()) if ordered}

    def _order(self, record: InstanceRecord, tokens: int) -> Effect:
        body = SetStepBudget(incarnation=record.incarnation, tokens=tokens, valid_ms=VALID_MS)
        return Publish(subject=self._subjects.engine(record.instance, "budget"), body=body)

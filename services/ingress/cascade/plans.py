"""Plans of the cascades that an ingress serves: the configured ones, replaced by those that are published."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set

from millrace.actor.errors import ConfigError
from millrace.contracts.cascade import CascadePlan, CascadeTier
from millrace.contracts.subjects import subject_token

from services.ingress.answer_health import AnswerHealth
from services.ingress.config import CascadeConfig

#: Cascades at once; an operator publishes a handful.
CASCADES_MAX = 64
#: Scores that are remembered per tier. The share's standard error is then at most 3 %.
SCORES_MAX = 256
#: Below so many scores a share says nothing.
SCORES_MIN = 20


class EscalationBudget:
    """Latest scores of one tier's answers; ``threshold`` is the planned one, or lower where too many would be rejected.

    An answer without a score counts as 0.
    """

    __slots__ = ("_scores", "_share_max", "_window_ns")

    def __init__(self, share_max: float, window_ns: int) -> None:
        self._share_max = share_max
        self._window_ns = window_ns
        self._scores: deque[tuple[int, float]] = deque(maxlen=SCORES_MAX)

    def note(self, score: float | None, now_ns: int) -> None:
        if self._share_max < 1.0:
            self._scores.append((now_ns, score or 0.0))

    def threshold(self, planned: float, now_ns: int) -> float:
        """The threshold in force now: at most ``share_max`` of the window's answers are below it."""
        if self._share_max >= 1.0:
            return planned
        while self._scores and now_ns - self._scores[0][0] > self._window_ns:
            self._scores.popleft()
        if len(self._scores) < SCORES_MIN:
            return planned
        ranked = sorted(score for _, score in self._scores)
        return min(planned, ranked[min(len(ranked) - 1, int(self._share_max * len(ranked)))])


class ServedCascade:
    """One cascade with its plan in force.

    Attributes:
        config: As configured; defaults for a cascade that only a published plan names.
        health: How its judge has answered.
    """

    __slots__ = ("_budgets", "config", "health", "plan", "unconfirmed")

    def __init__(self, config: CascadeConfig, plan: CascadePlan) -> None:
        self.config = config
        self.plan = plan
        self.unconfirmed = True  # no published plan is known: any epoch replaces this one
        self.health = AnswerHealth()
        self._budgets: dict[str, EscalationBudget] = {}

    def budget(self, model: str) -> EscalationBudget:
        """Escalations away from one model."""
        if model not in self._budgets:
            window_ns = int(self.config.escalation_window_s * 1e9)
            self._budgets[model] = EscalationBudget(self.config.escalation_share_max, window_ns)
        return self._budgets[model]

    def position(self, model: str) -> int | None:
        """Position of a model in the plan in force; None where it has no tier."""
        return next((position for position, tier in enumerate(self.plan.tiers) if tier.model == model), None)


class CascadePlans:
    """Plans by name of the cascade."""

    def __init__(self, configs: Iterable[CascadeConfig], models: Iterable[str]) -> None:
        """Start with the configured plans.

        Raises:
            ConfigError: a cascade is wrong.
        """
        self._models = frozenset(models)
        self._served: dict[str, ServedCascade] = {}
        self._configs = {config.name: config for config in configs}
        for config in self._configs.values():
            _check(config, self._models)
            if config.tiers:
                self._served[config.name] = ServedCascade(config, _configured_plan(config))

    def get(self, name: str) -> ServedCascade | None:
        return self._served.get(name)

    def wants(self, model: str, *, seen: bool) -> bool:
        """Whether readiness waits for an instance of a model. False for a tier that no plan gives a replica, unless
        one is awaited that never came: a tier that died later is passed over, and the others go on serving.

        Args:
            seen: An instance of it was there before.
        """
        tiers = [tier for served in self._served.values() for tier in served.plan.tiers if tier.model == model]
        return not tiers or any(tier.instances or (tier.awaited and not seen) for tier in tiers)

    @property
    def served(self) -> Mapping[str, ServedCascade]:
        return self._served

    def take(self, key: str, plan: CascadePlan | None) -> str:
        """A published plan is new, changed or gone; returns why it was refused, empty where it was not.

        Nobody deletes plans: one that is gone was lost with the store, and the last one holds until the next.
        """
        if plan is None:
            for name, served in self._served.items():
                served.unconfirmed |= key == subject_token(name)
            return ""
        known = self._served.get(plan.cascade)
        fault = self._fault(key, plan)
        if fault:
            return fault
        if known is None:
            config = self._configs.get(plan.cascade, CascadeConfig(name=plan.cascade))
            known = self._served[plan.cascade] = ServedCascade(config, plan)
        elif plan.epoch < known.plan.epoch and not known.unconfirmed:
            return ""
        known.plan = plan
        known.unconfirmed = False
        return ""

    def confirm_anew(self) -> None:
        """The bus was away, and the store may have lost the plans: any epoch replaces them."""
        for served in self._served.values():
            served.unconfirmed = True

    def _fault(self, key: str, plan: CascadePlan) -> str:
        if key != subject_token(plan.cascade):
            return f"key {key} holds the plan of {plan.cascade}"
        if plan.cascade in self._models:
            return f"{plan.cascade} is the name of a model"
        if not any(tier.model in self._models for tier in plan.tiers):
            return "none of its models is configured here"
        if plan.cascade not in self._served and len(self._served) >= CASCADES_MAX:
            return f"{CASCADES_MAX} cascades are served already"
        return ""


def _check(config: CascadeConfig, models: Set[str]) -> None:
    """Refuse a cascade that cannot be served.

    Raises:
        ConfigError: naming the cascade and what is wrong.
    """
    where = f"cascade {config.name}"
    if not config.name or config.name in models:
        raise ConfigError(f"{where}: a cascade needs a name that is not a model's")
    unknown = [tier.model for tier in config.tiers if tier.model not in models]
    if unknown:
        raise ConfigError(f"{where}: the model {unknown[0]} is not configured")
    if config.tiers:
        _configured_plan(config)


def _configured_plan(config: CascadeConfig) -> CascadePlan:
    """The plan of a configuration: fixed thresholds, each tier allowed, epoch 0.

    Raises:
        ConfigError: a threshold out of bounds, or a model twice.
    """
    tiers = [CascadeTier(model=tier.model, threshold=tier.threshold, instances=1) for tier in config.tiers]
    try:
        return CascadePlan(cascade=config.name, epoch=0, tiers=tiers, judge=config.judge, reason="configured")
    except ValueError as error:
        raise ConfigError(f"cascade {config.name}: {error}") from None

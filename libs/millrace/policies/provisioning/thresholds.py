"""The rules that `preempt` and `relief` share: out when a latency passes a threshold, in after sustained low load.

They differ in one thing only: which latencies are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from millrace.contracts.bounds import Count, Share, Span, Wait
from millrace.policies.provisioning.view import InstanceLoad, LatencySample, ProvisioningDecision, ProvisioningView

#: A failed start doubles the cool-down, up to this many times: 16 times as long.
DOUBLINGS_MAX = 4


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions and limits of scaling.

    Attributes:
        threshold_s: A latency above it asks for more instances, seconds.
        quantile: Which latency of the window is compared, 0 to 1; 1 is the highest.
        window_s: Samples older than this are not looked at, seconds.
        samples_min: Fewer samples in the window than this say nothing.
        cooldown_s: After a decision nothing further is decided for so long, seconds.
        step: Instances per decision.
        starting_max: No more are asked for while so many are being started.
        instances_min: Never fewer than these; where fewer are there, more are started.
        instances_max: Never more than these, draining and starting ones included.
        low_utilisation: Below this mean utilisation the load counts as low; 0 never scales in.
        low_s: How long the load must be low before an instance is stopped, seconds.
    """

    threshold_s: Span = 70.0
    quantile: Share = 1.0
    window_s: Span = 10.0
    samples_min: Count = 1
    cooldown_s: Wait = 30.0
    step: Count = 1
    starting_max: Count = 1
    instances_min: Count = 1
    instances_max: Count = 8
    low_utilisation: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.2
    low_s: Wait = 120.0

    def __post_init__(self) -> None:
        if self.instances_max < self.instances_min:
            raise ValueError(f"instances_max {self.instances_max} is below instances_min {self.instances_min}")


class State(msgspec.Struct, frozen=True):
    """State of the rules between decisions. Times in unix ns.

    Attributes:
        changed_ns: Last decision; the beginning of the lease before the first one.
        low_since_ns: Since when the load has been low; None while it is not.
        few_since_ns: Since when there have been fewer than the minimum; None while there are enough.
    """

    changed_ns: int | None = None
    low_since_ns: int | None = None
    few_since_ns: int | None = None


def decide_by(
    samples: Sequence[LatencySample],
    what: str,
    *,
    view: ProvisioningView,
    parameters: Parameters,
    state: State,
    now_ns: int,
) -> tuple[ProvisioningDecision, State]:
    """Applies the rules to one kind of latency.

    Args:
        samples: Those that are compared with the threshold.
        what: Names them in the reason: ``predicted`` or ``measured``.
    """
    signal_ns = quantile_ns(samples, parameters=parameters, now_ns=now_ns)
    utilisation = _mean([instance.utilisation for instance in view.serving])
    rules = _Rules(view, parameters, now_ns, signal_ns=signal_ns, utilisation=utilisation, what=what)
    state = rules.remember(state)
    decision = rules.decide(state)
    if decision.start or decision.stop:
        state = msgspec.structs.replace(state, changed_ns=now_ns, low_since_ns=None, few_since_ns=None)
    return msgspec.structs.replace(decision, signal_ns=signal_ns, utilisation=utilisation), state


def quantile_ns(samples: Sequence[LatencySample], *, parameters: Parameters, now_ns: int) -> int | None:
    """The latency at the quantile among the samples of the window; None where they are too few."""
    since_ns = now_ns - _ns(parameters.window_s)
    recent = sorted(sample.latency_ns for sample in samples if sample.at_ns >= since_ns)
    if len(recent) < parameters.samples_min:
        return None
    return recent[max(0, math.ceil(parameters.quantile * len(recent)) - 1)]


def victims(serving: Sequence[InstanceLoad], count: int) -> tuple[str, ...]:
    """Choose the instances to stop: fewest requests first, of equal ones the youngest, then by name."""
    able = [instance for instance in serving if instance.stoppable]
    able.sort(key=lambda instance: (instance.requests, -instance.since_ns, instance.name))
    return tuple(instance.name for instance in able[:count])


class _Rules:
    """One look at one model."""

    def __init__(
        self,
        view: ProvisioningView,
        parameters: Parameters,
        now_ns: int,
        *,
        signal_ns: int | None,
        utilisation: float,
        what: str,
    ) -> None:
        self._view = view
        self._parameters = parameters
        self._now_ns = now_ns
        self._signal_ns = signal_ns
        self._utilisation = utilisation
        self._what = what
        self._high = signal_ns is not None and signal_ns > _ns(parameters.threshold_s)
        coming = len(view.serving) + view.starting
        self._room = max(0, parameters.instances_max - coming - view.absent - view.stopping)
        self._missing = max(0, parameters.instances_min - coming)

    def remember(self, state: State) -> State:
        """The state with the spells of low load and of too few instances begun, gone on or ended."""
        low = bool(self._view.serving) and not self._high and self._utilisation < self._parameters.low_utilisation
        return State(
            changed_ns=self._now_ns if state.changed_ns is None else state.changed_ns,
            low_since_ns=(self._now_ns if state.low_since_ns is None else state.low_since_ns) if low else None,
            few_since_ns=(self._now_ns if state.few_since_ns is None else state.few_since_ns)
            if self._missing
            else None,
        )

    def decide(self, state: State) -> ProvisioningDecision:
        """The first rule that says something."""
        cooldown_ns = _ns(self._parameters.cooldown_s) << min(self._view.failures, DOUBLINGS_MAX)
        assert state.changed_ns is not None
        cooling = self._now_ns - state.changed_ns < cooldown_ns
        if self._high:
            return self._out(cooling=cooling)
        if cooling:
            return ProvisioningDecision(reason="cooling down after the last decision")
        if state.few_since_ns is not None:
            return self._fill(self._now_ns - state.few_since_ns)
        return self._in(state)

    def _out(self, *, cooling: bool) -> ProvisioningDecision:
        assert self._signal_ns is not None
        high = f"{self._what} latency {self._signal_ns / 1e9:.3g} s over {self._parameters.threshold_s:g} s"
        able = min(self._parameters.step, self._parameters.starting_max - self._view.starting)
        if not self._room:
            return ProvisioningDecision(reason=f"{high}, but {self._parameters.instances_max} instances are the bound")
        if cooling:
            return ProvisioningDecision(reason=f"{high}, but it is too soon after the last decision")
        if able < 1:
            return ProvisioningDecision(reason=f"{high}, but {self._view.starting} are being started")
        return ProvisioningDecision(start=min(able, self._room), reason=high)

    def _fill(self, missing_ns: int) -> ProvisioningDecision:
        """An instance that crashed is started again by its supervisor; only a lasting gap is filled."""
        few = f"fewer than {self._parameters.instances_min} instances for {missing_ns / 1e9:.3g} s"
        if missing_ns < _ns(self._parameters.cooldown_s) or not self._room:
            return ProvisioningDecision(reason=few)
        return ProvisioningDecision(start=min(self._missing, self._room), reason=few)

    def _in(self, state: State) -> ProvisioningDecision:
        view, parameters = self._view, self._parameters
        if state.low_since_ns is None:
            return ProvisioningDecision(reason="neither high nor low")
        low_ns = self._now_ns - state.low_since_ns
        low = f"utilisation {self._utilisation:.2g} below {parameters.low_utilisation:g} for {low_ns / 1e9:.3g} s"
        spare = min(parameters.step, len(view.serving) - parameters.instances_min)
        if low_ns < _ns(parameters.low_s) or spare < 1 or view.starting or view.stopping:
            return ProvisioningDecision(reason=low)
        return ProvisioningDecision(stop=victims(view.serving, spare), reason=low)


def _ns(seconds: float) -> int:
    return round(seconds * 1_000_000_000)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

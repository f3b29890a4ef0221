"""Input and output of a role policy, for one stage."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.plan import InstanceRole
from millrace.policies.roles.indicators import NO_INDICATORS, Indicators
from millrace.policies.stages.instance import InstanceModel


class Scenario(StrEnum):
    """Load of a stage. Source: FlowKV, section 3.4."""

    UNKNOWN = "unknown"  # nothing was heard
    NORMAL = "normal"
    IMBALANCED = "imbalanced"  # one phase has more than it can handle, the other has capacity left
    EXTREME = "extreme"  # more, or far less, than all can handle: a matter of the number of instances


class RoleInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a stage.

    Attributes:
        role: The one that it is on its way to, where a flip is under way.
        home: Role that the configuration gives it.
        movable: Whether it may be flipped now: no flip under way or just done.
        heard: Whether indicators were heard lately.
        model: Cost of its steps and size of its memory; None where unknown.
        token_budget: Tokens of a step at most, as the engine started; 0 where unknown.
    """

    name: str
    role: InstanceRole = InstanceRole.BOTH
    home: InstanceRole = InstanceRole.BOTH
    movable: bool = True
    heard: bool = True
    indicators: Indicators = NO_INDICATORS
    model: InstanceModel | None = None
    token_budget: int = 0

    @property
    def prefills(self) -> bool:
        """Whether it takes new requests."""
        return self.role is not InstanceRole.DECODE

    @property
    def decodes(self) -> bool:
        """Whether it keeps sequences after their first token."""
        return self.role is not InstanceRole.PREFILL


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """New requests of a stage over the last window.

    Attributes:
        requests_per_s: Arrivals.
        prompt_tokens: Mean prompt tokens to compute per request, prefix hits left out.
        output_tokens: Mean output tokens of those that ended.
    """

    requests_per_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0


class RolesView(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a model: who does what, and how loaded they are.

    Attributes:
        instances: In order of name.
    """

    model: str
    stage: str
    instances: tuple[RoleInstance, ...] = ()
    demand: Demand = Demand()


class Flip(msgspec.Struct, frozen=True):
    """One instance shall have another role."""

    instance: str
    role: InstanceRole


class StepOrder(msgspec.Struct, frozen=True):
    """Decodes come first at an instance for now: its steps compute at most so many tokens."""

    instance: str
    tokens: int


class RoleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision of a role policy for a stage.

    Attributes:
        priorities: Instances whose decodes come first; the others have their own token budget. Faster than a flip.
        flips: At most one for most policies; the coordinator carries them out one after the other.
        scenario: How it judges the load.
        unmended: Whether there is a load that no flip would mend: a matter of scaling.
        prefill, decode: Loads that were compared; their unit is the policy's.
        reason: One sentence.
    """

    flips: tuple[Flip, ...] = ()
    priorities: tuple[StepOrder, ...] = ()
    scenario: Scenario = Scenario.NORMAL
    unmended: bool = False
    prefill: float = 0.0
    decode: float = 0.0
    reason: str = ""


def may_take_role(view: RolesView, instance: str, role: InstanceRole) -> bool:
    """Whether a stage keeps a prefill-capable and a decode-capable instance if one takes a role."""
    roles = [role if each.name == instance else each.role for each in view.instances]
    prefills = any(each is not InstanceRole.DECODE for each in roles)
    decodes = any(each is not InstanceRole.PREFILL for each in roles)
    return prefills and decodes

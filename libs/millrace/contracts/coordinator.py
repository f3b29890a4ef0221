"""Orders of an operator to the active coordinator of a model, its answers, and what it tells of its decisions."""

from __future__ import annotations

from enum import StrEnum

from millrace.contracts.message import Body
from millrace.contracts.plan import InstanceRole


class SetRole(Body, frozen=True, kw_only=True, tag="SetRole/1"):
    """Asks that an instance have another role, from now on. Answered by OrderAccepted or OrderRefused.

    Attributes:
        plan_epoch: Of the plan that the order was made on; an older one than the plan in force is refused. 0 for any.
        wait: Whether the order may wait for what holds it back now (an earlier flip, scaling, moves under way); else
            it is refused for it.
    """

    model: str
    instance: str
    role: InstanceRole
    plan_epoch: int = 0
    wait: bool = True


class SetInstances(Body, frozen=True, kw_only=True, tag="SetInstances/1"):
    """Asks that a model have so many instances of a shape and a role. Answered by OrderAccepted or OrderRefused, once
    provisioners have answered.

    Attributes:
        count: Instances that serve afterwards, of those that ``shape`` and ``role`` name.
        shape: Device kind and tensor parallel size, such as ``cpu`` or ``h100x2``; empty for all shapes.
        role: Counts instances of this role, and those that are started get it; None for any role.
        plan_epoch: Of the plan that the order was made on; an older one than the plan in force is refused. 0 for any.
    """

    model: str
    count: int
    shape: str = ""
    role: InstanceRole | None = None
    plan_epoch: int = 0


class OrderAccepted(Body, frozen=True, kw_only=True, tag="OrderAccepted/1"):
    """The order is taken; it is carried out when nothing stands against it.

    Attributes:
        detail: One sentence: what begins.
        starting: Instances that are being started.
        stopping: Instances that drain, and then end.
        limit_ms: The last of those has handed back what it still holds after so long.
    """

    detail: str = ""
    starting: list[str] = []
    stopping: list[str] = []
    limit_ms: int = 0


class OrderRefusal(StrEnum):
    """Reason why an order is not taken. Closed set."""

    UNKNOWN_INSTANCE = "unknown_instance"  # not in the plan in force
    NOT_CAPABLE = "not_capable"  # a stage would have no instance to prefill, or none to decode
    OLD_PLAN = "old_plan"  # the plan has changed since
    FLIP_OPEN = "flip_open"  # another flip is under way in the stage
    FLIPPED_LATELY = "flipped_lately"  # the instance, or another one of its stage, has just been flipped
    SCALED_LATELY = "scaled_lately"  # instances are being started or stopped, or were a short time ago
    MOVES_OPEN = "moves_open"  # sequences are on their way from or to the instance
    UNKNOWN_SHAPE = "unknown_shape"  # no provisioner has such instances of the model
    NO_DEVICE = "no_device"  # all that provisioners could start run already
    NOT_KEPT = "not_kept"  # no provisioner can stop them, or none answers
    SCALING = "scaling"  # instances are being started or stopped
    INVALID = "invalid"  # the order makes no sense


class OrderRefused(Body, frozen=True, kw_only=True, tag="OrderRefused/1"):
    """Nothing is changed."""

    reason: OrderRefusal
    detail: str = ""


class LadderReported(Body, frozen=True, kw_only=True, tag="LadderReported/1"):
    """Rung of the ladder that acts on a model's load. The active coordinator sends it once a second.

    Attributes:
        policy: Name of the policy on roles.
        rung: ``dispatch``, ``move``, ``priority``, ``flip``, ``scale`` or ``replan``.
        scenario: Load of the stage that is worst off.
        prefill, decode: Its loads as the policy compares them.
        flipping: Instances on their way to another role, and to which.
        flips: Flips begun since this coordinator leads the model.
        flips_done, flips_given_up: Those of them that have ended.
        ordered: Roles that an operator asked for and that instances do not have yet.
        held: Why the first of those has not begun; empty where nothing holds it.
        reason: The policy's, one sentence.
        last: The last flip and its reason; empty for none.
        step_budgets: Tokens of a step, by instance, of those whose decodes come first.
    """

    model: str
    coordinator: str
    at_ns: int
    policy: str
    rung: str
    scenario: str = ""
    prefill: float = 0.0
    decode: float = 0.0
    flipping: dict[str, InstanceRole] = {}
    flips: int = 0
    reason: str = ""
    last: str = ""
    flips_done: int = 0
    flips_given_up: int = 0
    ordered: dict[str, InstanceRole] = {}
    held: str = ""
    step_budgets: dict[str, int] = {}

"""Orders of an operator to the active coordinator of a model, answers to orders, and proposals of its controllers."""

from __future__ import annotations

from enum import StrEnum

from millrace.contracts.message import Body
from millrace.contracts.plan import Advice, InstanceRole, PlanExpectation, Stage


class SetRole(Body, frozen=True, kw_only=True, tag="SetRole/1"):
    """Asks that an instance have another role, from now on. Answered by OrderAccepted or OrderRefused.

    Attributes:
        plan_epoch: Of the plan that the order was made on; an older one than the plan in force is refused. 0 for any.
    """

    model: str
    instance: str
    role: InstanceRole
    plan_epoch: int = 0


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


#: What the autopilot hears while a person changes the cluster; its coordinator tries again.
UNDER_WAY = "another `millrace apply` is under way"


class OrderRefusal(StrEnum):
    """Reason why an order is not taken. Closed set."""

    UNKNOWN_INSTANCE = "unknown_instance"  # not in the plan in force; of a provisioner: not one of this host
    NOT_CAPABLE = "not_capable"  # a stage would have no instance to prefill, or none to decode
    OLD_PLAN = "old_plan"  # the plan has changed since
    UNKNOWN_SHAPE = "unknown_shape"  # no provisioner, or not this one, has such instances of the model
    NO_DEVICE = "no_device"  # all that could be started run already; of a provisioner: no device is free now
    NOT_KEPT = "not_kept"  # no provisioner can stop them, or none answers
    SCALING = "scaling"  # instances are being started or stopped
    INVALID = "invalid"  # the order makes no sense
    # of a provisioner alone
    AT_BOUND = "at_bound"  # no room here for one more: try another host
    OTHER_MODEL = "other_model"  # this host has no such model: try another
    SHARED_PROCESS = "shared_process"  # its process hosts other instances too; it cannot be stopped alone
    RUNS = "runs"  # the instance that was named runs, or still drains
    STOPPING = "stopping"  # the host itself is going down


class OrderRefused(Body, frozen=True, kw_only=True, tag="OrderRefused/1"):
    """Nothing is changed."""

    reason: OrderRefusal
    detail: str = ""


class PlanProposed(Body, frozen=True, kw_only=True, tag="PlanProposed/1"):
    """A controller's wishes for a model's plan. The coordinator that leads the model writes the plan.

    Attributes:
        by: The controller: ``stages``, ``roles``, ``provisioning`` or ``autopilot``.
        number: Rises with each proposal of a controller; an older one is ignored.
        stages: Ranges and how many instances each wants, without instances; None to leave them.
        policy, reason, expects: Of these stages, as in Plan.
        roles: Instances that shall not have the role that an operator or the configuration gives them, in place of
            those of the last proposal; None to leave them.
        role_orders: Roles that an operator orders, beside those of the plan in force; None withdraws one.
        advice: As in Plan; None to leave it.
    """

    model: str
    by: str
    number: int
    stages: list[Stage] | None = None
    policy: str = ""
    reason: str = ""
    expects: PlanExpectation | None = None
    roles: dict[str, InstanceRole] | None = None
    role_orders: dict[str, InstanceRole | None] = {}
    advice: Advice | None = None

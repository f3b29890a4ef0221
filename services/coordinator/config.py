"""Configuration of the coordinator."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import CONSTANT, WIRED
from millrace.actor.errors import ConfigError
from millrace.contracts.bounds import Span, Wait
from millrace.contracts.plan import InstanceRole
from millrace.membership.config import MembershipConfig
from millrace.policies.provisioning import PROVISIONING_POLICIES, ProvisioningPolicy
from millrace.policies.stages.fixed.policy import FixedRange
from millrace.policies.stages.fixed.policy import Parameters as FixedParameters
from millrace.policies.step_bounds import StepObjectives

from services.coordinator.cascade_config import CoordinatedCascade


class ProvisioningConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the start and stop of instances, and the hosts that carry it out.

    Attributes:
        strategy: A name of ``PROVISIONING_POLICIES``, a file or an entry point.
        parameters: The strategy's parameters.
        hosts: Provisioners, in the order in which they are asked for one more instance.
        ask_limit_s: Time for a provisioner to answer, seconds.
        start_limit_s: An instance that has not registered itself after this is given up, seconds. A large model takes
            minutes to load.
        drain_limit_s: How long requests may go on at an instance that is to stop before they move elsewhere, seconds.
    """

    strategy: Annotated[str, WIRED] = "none"
    parameters: Annotated[dict[str, Any], WIRED] = {}
    hosts: Annotated[list[str], WIRED] = msgspec.field(default_factory=lambda: ["local"])
    ask_limit_s: Annotated[Span, CONSTANT] = 2.0
    start_limit_s: Span = 600.0
    drain_limit_s: Wait = 30.0


class StagesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the assignment of instances to ranges of lengths.

    Attributes:
        policy: A name of ``STAGE_POLICIES``, a file or an entry point.
        parameters: The policy's parameters.
        ranges: Model -> its stages, for models whose stages are fixed whatever ``policy`` says.
        period_s: How often the policy is asked, seconds.
        window_s: Requests that arrived longer ago say nothing, seconds.
        copy_bytes_per_s: Bandwidth of one KV transfer between two instances.
        step_times: Name in instance records -> file, for step times beside those that ship.
    """

    policy: Annotated[str, WIRED] = "one_stage"
    parameters: Annotated[dict[str, Any], WIRED] = {}
    ranges: Annotated[dict[str, list[FixedRange]], WIRED] = {}
    period_s: Span = 30.0
    window_s: Span = 600.0
    copy_bytes_per_s: Span = 10e9
    step_times: Annotated[dict[str, str], WIRED] = {}

    def __post_init__(self) -> None:
        for model, ranges in self.ranges.items():
            try:
                FixedParameters(ranges=tuple(ranges))
            except ValueError as error:
                raise ValueError(f"ranges.{model}: {error}") from None


class RolePolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for changes of instances' roles under load, and the limits on them.

    Attributes:
        policy: A name of ``ROLE_POLICIES``, a file or an entry point; ``fixed`` leaves configured roles as they are.
        parameters: The policy's parameters.
        gap_s: Nobody is flipped, and no stage flips anybody, within so long of its last flip, seconds.
        settle_s: An instance does both for so long at least before the last hop, seconds; loads told of open moves are
            younger then.
        drain_s: Decodes of an instance that is to prefill may end there for so long before the last hop, seconds.
    """

    policy: str = "fixed"
    parameters: dict[str, Any] = {}
    gap_s: Wait = 10.0
    settle_s: Wait = 2.0
    drain_s: Wait = 5.0


class CoordinatorConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a coordinator process.

    Attributes:
        name: Unique name on the bus; several coordinators stand by for each other.
        roles: What an instance does, by its name or a pattern (``gpu0-*``): ``prefill``, ``decode`` or ``both``. Its
            name wins, then the first pattern that fits; who stands nowhere does both.
        cascades: Cascades that it plans.
        flips: How roles change.
        step_bounds: Whether steps are bounded for decodes.
        membership: When an instance leaves the plan: twice ``instance_silence_ms`` after its last sign of life. Ingress
            acts sooner, by itself.
        recording: Folder where the load of the last hour is kept (docs/WHAT_IF.md); empty for no recording.
        autopilot: ``advise``: the recording is replayed with other settings, and those that would have been better in
            two windows in a row stand in the plan. ``on``: they are put in force, and taken back where they do not
            show. Where nothing is recorded it does nothing.
        autopilot_interval_s: From one replay to the next at least, seconds; longer where replays take over 5 % of a
            core.
    """

    name: Annotated[str, WIRED] = "coordinator-0"
    provisioning: ProvisioningConfig = ProvisioningConfig()
    stages: StagesConfig = StagesConfig()
    roles: dict[str, InstanceRole] = {}
    cascades: Annotated[list[CoordinatedCascade], WIRED] = []
    flips: RolePolicyConfig = RolePolicyConfig()
    step_bounds: StepObjectives = StepObjectives()
    membership: MembershipConfig = MembershipConfig()
    recording: str = ""
    autopilot: Literal["off", "advise", "on"] = "advise"
    autopilot_interval_s: Span = 300.0


def provisioning_policy(config: ProvisioningConfig) -> tuple[ProvisioningPolicy, msgspec.Struct]:
    """The chosen strategy and its parameters.

    Raises:
        ConfigError: no such strategy, parameters it does not have, or nobody to ask.
    """
    if config.strategy != "none" and not config.hosts:
        raise ConfigError("provisioning.hosts is empty: nobody could start an instance")
    return PROVISIONING_POLICIES.choose(config.strategy, config.parameters, key="strategy", table="provisioning.")

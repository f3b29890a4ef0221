"""The plan that the coordinator publishes in the KV bucket ``plan`` (key: model), and its lease."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.message import Body


class InstanceRole(StrEnum):
    """What an instance does in its stage."""

    BOTH = "both"
    PREFILL = "prefill"  # takes new requests and hands each over after its first token
    DECODE = "decode"  # takes no new requests as long as others can; goes on with those that are handed over


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Instances that serve one range of sequence lengths.

    Attributes:
        name: For example ``s0``.
        length_min: First length served, tokens.
        length_max: First length no longer served; None for no bound.
        instances: Names, sorted.
        roles: Of those instances whose role is not BOTH.
    """

    name: str
    length_min: int
    length_max: int | None
    instances: list[str]
    roles: dict[str, InstanceRole] = {}


class Plan(Body, frozen=True, kw_only=True, tag="Plan/1"):
    """Which stage covers which lengths, and which instances serve it.

    Attributes:
        epoch: Rises by one with each change.
        coordinator: Name of the author.
    """

    model: str
    epoch: int
    stages: list[Stage]
    coordinator: str


class Lease(Body, frozen=True, kw_only=True, tag="Lease/1"):
    """Who is the active coordinator of a model (KV bucket ``lease``, key: model). Held until ``until_ns``, then
    anyone may take it by CAS.
    """

    model: str
    holder: str
    incarnation: int
    until_ns: int

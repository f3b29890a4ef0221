"""Rescheduling from one place in a simulated cluster, beside or in place of balance between instances. None ships."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from millrace.actor.actor import Actor
from millrace.contracts.message import Body
from millrace.policies.registry import Policy, Registry

__all__ = ["RESCHEDULING_POLICIES", "ReschedulingPolicy", "ReschedulingView"]


class ReschedulingView(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster that a rescheduler is started in.

    Attributes:
        cluster: Name of the cluster, which its subjects begin with.
        block_sizes: Tokens of a KV block by instance.
    """

    cluster: str
    block_sizes: Mapping[str, int]


class ReschedulingPolicy(Policy, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        build: (view, parameters) -> an actor with the rights of an operator, which orders moves.
        accepts: Messages that the actor takes.
    """

    build: Callable[[ReschedulingView, Any], Actor]
    accepts: tuple[type[Body], ...] = ()


RESCHEDULING_POLICIES = Registry("rescheduling", ReschedulingPolicy, ())

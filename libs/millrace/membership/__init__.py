"""Membership: which instances and services are there, from what they say and from their silence. No I/O."""

from millrace.membership.config import MembershipConfig
from millrace.membership.heartbeat import HEARTBEAT_NS, Heartbeat
from millrace.membership.member import Member, MemberEvent, MemberState, next_state
from millrace.membership.members import Membership, MembershipChange
from millrace.membership.services import ServiceLiveness

__all__ = [
    "HEARTBEAT_NS",
    "Heartbeat",
    "Member",
    "MemberEvent",
    "MemberState",
    "Membership",
    "MembershipChange",
    "MembershipConfig",
    "ServiceLiveness",
    "next_state",
]

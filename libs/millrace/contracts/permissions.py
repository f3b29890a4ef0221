"""Permissions of each role to publish and subscribe, derived from the catalog.

nats-server is configured with them (supervision/nats_config.py), and the simulated server refuses the same.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from millrace.contracts.catalog import BUCKETS, CHANNELS, Channel, Pattern, Role
from millrace.contracts.subjects import Subjects, covers

#: Begins every inbox; the asker's role follows.
INBOX = "_INBOX."

#: Here the server answers whether it is well, to users of its system account.
HEALTH_SUBJECT = "$SYS.REQ.SERVER.PING.HEALTHZ"


class Permissions(msgspec.Struct, frozen=True):
    """Subjects that one role may publish to and subscribe to, as NATS patterns."""

    publish: list[str]
    subscribe: list[str]

    def may_publish(self, subject: str) -> bool:
        """Whether the server passes a message on this subject on."""
        return any(covers(allowed, subject) for allowed in self.publish)

    def may_subscribe(self, pattern: str) -> bool:
        """Whether the server takes a subscription: one allowed pattern must cover all that it matches."""
        return any(covers(allowed, pattern) for allowed in self.subscribe)


def inbox_of(role: Role) -> str:
    """Return the prefix of a role's inbox for answers, ``_INBOX.<role>.``; the client completes it."""
    return f"{INBOX}{role}."


@lru_cache
def permissions(role: Role, cluster: str) -> Permissions:
    """Return a role's permissions on the bus: its channels, answers to the roles that ask it, and its own inbox."""
    subjects = Subjects(cluster)
    sends = [_subject(subjects, channel) for channel in CHANNELS if role in channel.senders]
    takes = _subscriptions(subjects, role)
    inbox = f"{inbox_of(role)}>"
    if role in (Role.OBSERVER, Role.OPERATOR, Role.SUPERVISOR):
        takes = [f"{subjects.prefix}.>"]
    return Permissions(sorted({*sends, *_answers(role)}), sorted({*takes, inbox}))


@lru_cache
def store_permissions(role: Role, cluster: str) -> Permissions:
    """Return a role's permissions in its account of the store: to read what it follows, and to write what it owns.

    It has no others. The server answers wherever a client asks it to, without a look at permissions; so the account
    itself holds nothing but what the role may have (``millrace.supervision.nats_config``). Nobody gets a consumer:
    its creator says where it delivers, in the account of the streams.
    """
    subjects = Subjects(cluster)
    writes = [f"{key_subject(subjects, bucket.name)}.>" for bucket in BUCKETS if role in bucket.writers]
    looks_on = role in (Role.OBSERVER, Role.OPERATOR)
    reads = [
        read_subject(subjects, bucket.name)
        for bucket in BUCKETS
        if role in bucket.watchers or (looks_on and not bucket.private)
    ]
    follows = [f"{subjects.changes(bucket.name)}>" for bucket in BUCKETS if role in bucket.watchers]
    inbox = [f"{INBOX}{store_user(role)}.>"] if writes or reads else []
    return Permissions(sorted({*writes, *reads}), sorted({*follows, *inbox}))


def store_user(role: str) -> str:
    """The user under which a role reaches the store: another one than on the bus, in another account."""
    return f"{role}-store"


def health_user(role: str) -> str:
    """The user that may ask the server for its health and nothing else: the supervisor's."""
    return f"{role}-health"


def key_subject(subjects: Subjects, bucket: str) -> str:
    """The subject below which a bucket's keys are written."""
    return f"$KV.{subjects.bucket(bucket)}"


def read_subject(subjects: Subjects, bucket: str) -> str:
    """The subject on which a bucket's values are asked for."""
    return f"$JS.API.DIRECT.GET.KV_{subjects.bucket(bucket)}"


def _subject(subjects: Subjects, channel: Channel) -> str:
    tokens = ["*" if token.startswith("{") else token for token in channel.subject.split(".")]
    return ".".join([subjects.prefix, *tokens])


def _subscriptions(subjects: Subjects, role: Role) -> list[str]:
    """The role's channels; and where every subject below a node is the role's, one wildcard for all of them."""
    below: dict[str, list[Channel]] = {}
    for channel in CHANNELS:
        below.setdefault(_subject(subjects, channel).rpartition(".")[0], []).append(channel)
    whole = [
        f"{node}.*"
        for node, channels in below.items()
        if len(channels) > 1 and all(role in c.receivers for c in channels)
    ]
    return whole + [_subject(subjects, channel) for channel in CHANNELS if role in channel.receivers]


def _answers(role: Role) -> list[str]:
    """Inboxes of the roles that ask this one something."""
    asked = (channel for channel in CHANNELS if channel.pattern is not Pattern.PUBLISH and role in channel.receivers)
    return [f"{inbox_of(sender)}>" for channel in asked for sender in channel.senders]

"""Permissions of each role to publish and subscribe, derived from the catalog.

nats-server is configured with them (supervision/nats_config.py), and the simulated server refuses the same.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from millrace.contracts.catalog import BUCKETS, CHANNELS, Bucket, Channel, Pattern, Role
from millrace.contracts.subjects import Subjects, covers

#: Begins every inbox; the asker's role follows.
INBOX = "_INBOX."


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
    """Return a role's permissions: its channels, answers to the roles that ask it, its own inbox, and the buckets."""
    subjects = Subjects(cluster)
    sends = [_subject(subjects, channel) for channel in CHANNELS if role in channel.senders]
    takes = _subscriptions(subjects, role)
    inbox = f"{inbox_of(role)}>"
    publish = sorted({*sends, *_answers(role), *_bucket_subjects(role, subjects)})
    subscribe = sorted({*takes, inbox})
    if role in (Role.OBSERVER, Role.OPERATOR):
        subscribe = [f"{subjects.prefix}.>", inbox]
    if role is Role.SUPERVISOR:
        publish = sorted({*publish, "$JS.API.>", *(f"{key_subject(subjects, bucket.name)}.>" for bucket in BUCKETS)})
        subscribe = sorted({f"{subjects.prefix}.>", inbox})
    return Permissions(publish, subscribe)


def key_subject(subjects: Subjects, bucket: str) -> str:
    """The subject below which a bucket's keys are written."""
    return f"$KV.{subjects.bucket(bucket)}"


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


def _bucket_subjects(role: Role, subjects: Subjects) -> list[str]:
    """Read every bucket, watch and write the role's own."""
    allowed = ["$JS.API.INFO"]
    for bucket in BUCKETS:
        allowed += _reading(f"KV_{subjects.bucket(bucket.name)}")
        allowed += _watching(role, bucket, f"KV_{subjects.bucket(bucket.name)}")
        allowed += _writing(role, bucket, subjects)
    return allowed


def _reading(stream: str) -> list[str]:
    return [
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
    ]


def _watching(role: Role, bucket: Bucket, stream: str) -> list[str]:
    """Create a watch: an unnamed consumer without acknowledgements that the server forgets by itself.

    A subject with a name would let a role change or delete the consumer of another one, and the server does not check
    where a consumer delivers to: whoever only looks on gets none.
    """
    return [f"$JS.API.CONSUMER.CREATE.{stream}"] if role in bucket.watchers else []


def _writing(role: Role, bucket: Bucket, subjects: Subjects) -> list[str]:
    return [f"{key_subject(subjects, bucket.name)}.>"] if role in bucket.writers else []

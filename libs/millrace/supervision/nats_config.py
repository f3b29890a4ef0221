"""Writes the configuration of nats-server: one user per role, each allowed just what the catalog says."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from millrace.contracts.catalog import BUCKETS, CHANNELS, Bucket, Channel, Pattern, Role
from millrace.contracts.subjects import Subjects

#: What the server reads as a message's bound; the codec refuses the same. nats-server's own default.
PAYLOAD_BYTES_MAX = 1_048_576

#: How much may wait for a slow consumer before the server cuts it. Services shed load long before.
PENDING_BYTES_MAX = 64 * 1024 * 1024


class NatsServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from server to server.

    Attributes:
        store_dir: Folder of JetStream's files.
        monitor_port: HTTP port of ``/healthz``, ``/varz``, ...; 0 for none.
        tls_cert: Certificate file; empty for no TLS. With ``tls_key``, and ``tls_ca`` to check clients' certificates.
    """

    cluster: str = "local"
    host: str = "127.0.0.1"
    port: int = 4222
    monitor_port: int = 0
    store_dir: str = ".millrace/jetstream"
    server_name: str = "millrace-nats"
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


class Permissions(msgspec.Struct, frozen=True):
    """Subjects one user may publish to and subscribe to."""

    publish: list[str]
    subscribe: list[str]


def permissions(role: Role, cluster: str) -> Permissions:
    """What a role may do: its channels, answers to those who ask it, its own inbox, and the buckets."""
    subjects = Subjects(cluster)
    sends = [_subject(subjects, channel) for channel in CHANNELS if role in channel.senders]
    takes = _subscriptions(subjects, role)
    inbox = f"_INBOX.{role}.>"
    publish = sorted({*sends, *_answers(role), *_bucket_subjects(role, subjects)})
    subscribe = sorted({*takes, inbox})
    if role in (Role.OBSERVER, Role.OPERATOR):
        subscribe = [f"{subjects.prefix}.>", inbox]
    if role is Role.SUPERVISOR:
        publish = sorted({*publish, "$JS.API.>", *(f"$KV.{subjects.bucket(bucket.name)}.>" for bucket in BUCKETS)})
        subscribe = sorted({f"{subjects.prefix}.>", inbox})
    return Permissions(publish, subscribe)


def nats_config(options: NatsServerOptions, passwords: Mapping[Role, str]) -> str:
    """Text of a nats-server configuration file.

    Args:
        options: Ports, folders, TLS.
        passwords: One per role. A value that begins with ``$`` is left for the server to read from its environment.
    """
    lines = [
        f"server_name: {json.dumps(options.server_name)}",
        f"host: {json.dumps(options.host)}",
        f"port: {options.port}",
        f"max_payload: {PAYLOAD_BYTES_MAX}",
        f"max_pending: {PENDING_BYTES_MAX}",
        "ping_interval: 5s",
        "ping_max: 3",
        f"jetstream {{ store_dir: {json.dumps(options.store_dir)}, max_file_store: 1GB, max_memory_store: 256MB }}",
    ]
    if options.monitor_port:
        lines.append(f"http: {json.dumps(f'{options.host}:{options.monitor_port}')}")
    if options.tls_cert:
        lines.append(_tls(options))
    users = ",\n".join(_user(role, options.cluster, passwords[role]) for role in Role)
    lines.append(f"authorization {{\n  users = [\n{users}\n  ]\n}}")
    return "\n".join(lines) + "\n"


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
    return [f"_INBOX.{sender}.>" for channel in asked for sender in channel.senders]


def _bucket_subjects(role: Role, subjects: Subjects) -> list[str]:
    """Reading every bucket (and its watches), writing the role's own."""
    allowed = ["$JS.API.INFO"]
    for bucket in BUCKETS:
        allowed += _reading(f"KV_{subjects.bucket(bucket.name)}")
        allowed += _writing(role, bucket, subjects)
    return allowed


def _reading(stream: str) -> list[str]:
    return [
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.>",
        f"$JS.API.CONSUMER.DELETE.{stream}.>",
        f"$JS.ACK.{stream}.>",
        f"$JS.FC.{stream}.>",
    ]


def _writing(role: Role, bucket: Bucket, subjects: Subjects) -> list[str]:
    return [f"$KV.{subjects.bucket(bucket.name)}.>"] if role in bucket.writers else []


def _user(role: Role, cluster: str, password: str) -> str:
    allowed = permissions(role, cluster)
    secret = password if password.startswith("$") else json.dumps(password)
    publish, subscribe = json.dumps(allowed.publish), json.dumps(allowed.subscribe)
    return (
        f"    {{ user: {role}, password: {secret}, permissions: {{\n"
        f"        publish: {publish},\n        subscribe: {subscribe} }} }}"
    )


def _tls(options: NatsServerOptions) -> str:
    parts = [f"cert_file: {json.dumps(options.tls_cert)}", f"key_file: {json.dumps(options.tls_key)}"]
    if options.tls_ca:
        parts += [f"ca_file: {json.dumps(options.tls_ca)}", "verify: true"]
    return f"tls {{ {', '.join(parts)} }}"

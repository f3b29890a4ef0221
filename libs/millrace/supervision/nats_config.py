"""Writes the configuration of nats-server: users of each role, allowed just what the catalog says.

Everybody's messages go through one account, the bus, which has no JetStream. The buckets are in an account of their
own, to which only the supervisor has a user. Each role that reads or writes buckets has one more account, which imports
just those reads and writes, and one more user there. JetStream answers on whatever subject its client names, unchecked;
but an answer stays within the client's account, where it reaches nothing that the role may not write itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from millrace.actor.bus_tls import AUTHORITY, IDENTITY
from millrace.contracts.catalog import BUCKETS
from millrace.contracts.channels import Role
from millrace.contracts.permissions import (
    HEALTH_SUBJECT,
    INBOX,
    Permissions,
    health_user,
    key_subject,
    permissions,
    read_subject,
    store_permissions,
    store_user,
)
from millrace.contracts.subjects import Subjects

#: What the server reads as a message's bound; the codec refuses the same. nats-server's own default.
PAYLOAD_BYTES_MAX = 1_048_576

#: How much may wait for a slow consumer before the server cuts it. Services shed load long before.
PENDING_BYTES_MAX = 64 * 1024 * 1024


#: A read is answered by a message for each value.
_MANY_ANSWERS = 'response_type: stream, response_threshold: "10s"'


class NatsServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that differ from server to server.

    Attributes:
        store_dir: Folder of JetStream's files.
        monitor_port: Port on 127.0.0.1 of ``/healthz``, ``/varz``, ..., which ask nobody for a password; 0 for none.
        routes: ``host:port`` of every server of a cluster, this one's first; empty where it is alone.
        hosted: Roles whose actors run in processes of another role, whose user gets their permissions as well. Each
            process keeps its actors to their own (``millrace.actor.local_bus``).
        tls: Folder that ``millrace certs`` made: clients and other servers must show a certificate of its authority.
            Empty for no TLS.
    """

    cluster: str = "local"
    host: str = "127.0.0.1"
    port: int = 4222
    monitor_port: int = 0
    store_dir: str = ".millrace/jetstream"
    server_name: str = "millrace-nats"
    routes: tuple[str, ...] = ()
    hosted: dict[Role, tuple[Role, ...]] = {}
    tls: str = ""


def nats_config(options: NatsServerOptions, passwords: Mapping[Role, str]) -> str:
    """Text of a nats-server configuration file.

    Args:
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
        lines.append(f"http: {json.dumps(f'127.0.0.1:{options.monitor_port}')}")
    if options.routes:
        lines.append(_routes(options, passwords[Role.SUPERVISOR]))
    if options.tls:
        lines.append(_tls(options.tls))
    subjects = Subjects(options.cluster)
    bus = [_user(str(role), _allowed(role, options, permissions), passwords[role]) for role in Role]
    health = health_user(Role.SUPERVISOR)
    asks = _user(health, Permissions([HEALTH_SUBJECT], [f"{INBOX}{health}.>"]), passwords[Role.SUPERVISOR])
    lines.append("system_account: SYS")
    accounts = [f"  SYS {{ users: [\n{asks}\n  ] }}", f"  BUS {{ users: [\n{_lines(bus)}\n  ] }}"]
    accounts.append(_store(subjects, passwords[Role.SUPERVISOR]))
    accounts += [
        _store_of(role, allowed, passwords[role], subjects)
        for role in Role
        if role is not Role.SUPERVISOR and (allowed := _allowed(role, options, store_permissions)).publish
    ]
    lines.append("accounts {\n" + "\n".join(accounts) + "\n}")
    return "\n".join(lines) + "\n"


def _allowed(role: Role, options: NatsServerOptions, given: Callable[[Role, str], Permissions]) -> Permissions:
    """Permissions of the role, with those of the roles that it hosts."""
    each = [given(one, options.cluster) for one in (role, *options.hosted.get(role, ()))]
    publish = {subject for one in each for subject in one.publish}
    return Permissions(sorted(publish), sorted({subject for one in each for subject in one.subscribe}))


def _user(name: str, allowed: Permissions, password: str) -> str:
    publish = json.dumps(allowed.publish) if allowed.publish else '{ deny: ">" }'  # an empty list allows everything
    return (
        f"    {{ user: {name}, password: {_secret(password)}, permissions: {{\n"
        f"        publish: {publish},\n        subscribe: {json.dumps(allowed.subscribe)} }} }}"
    )


def _secret(password: str) -> str:
    return password if password.startswith("$") else json.dumps(password)


def _store(subjects: Subjects, password: str) -> str:
    """The account of the buckets; what it exports, only accounts of this file can import."""
    keys = [f"{key_subject(subjects, bucket.name)}.>" for bucket in BUCKETS]
    exports = [
        *(f"{{ service: {json.dumps(key)} }}" for key in keys),
        *(f"{{ service: {json.dumps(read_subject(subjects, bucket.name))}, {_MANY_ANSWERS} }}" for bucket in BUCKETS),
        *(f"{{ stream: {json.dumps(f'{subjects.changes(bucket.name)}>')} }}" for bucket in BUCKETS),
    ]
    user = store_user(Role.SUPERVISOR)
    follows = store_permissions(Role.SUPERVISOR, subjects.cluster).subscribe
    keeper = _user(user, Permissions(["$JS.API.>", *keys], sorted({*follows, f"{INBOX}{user}.>"})), password)
    return f"  STORE {{ jetstream: enabled, users: [\n{keeper}\n  ], exports: [\n{_lines(exports, 4)}\n  ] }}"


def _store_of(role: Role, allowed: Permissions, password: str, subjects: Subjects) -> str:
    imports = [f"{{ service: {{ account: STORE, subject: {json.dumps(each)} }} }}" for each in allowed.publish]
    imports += [
        f"{{ stream: {{ account: STORE, subject: {json.dumps(each)} }} }}"
        for each in allowed.subscribe
        if each.startswith(subjects.prefix)
    ]
    user = _user(store_user(role), allowed, password)
    return f"  STORE_{role.upper()} {{ users: [\n{user}\n  ], imports: [\n{_lines(imports, 4)}\n  ] }}"


def _lines(parts: list[str], indent: int = 0) -> str:
    return ",\n".join(" " * indent + part for part in parts)


def _routes(options: NatsServerOptions, password: str) -> str:
    """Servers know each other by the supervisor's password: no service has it."""
    user = f"{options.cluster}-route"
    urls = [f"nats://{user}:{password}@{route}" for route in options.routes[1:]]
    tls = f"\n  {_tls(options.tls)}" if options.tls else ""
    return (
        f"cluster {{ name: {json.dumps(options.cluster)}, listen: {json.dumps(options.routes[0])}, no_advertise: true\n"
        f"  authorization {{ user: {json.dumps(user)}, password: {_secret(password)} }}\n"
        f"  routes: {json.dumps(urls)}{tls} }}"
    )


def _tls(folder: str) -> str:
    authority, identity = (json.dumps(str(Path(folder) / name)) for name in (AUTHORITY, IDENTITY))
    return f"tls {{ cert_file: {identity}, key_file: {identity}, ca_file: {authority}, verify: true }}"

"""Writes the configuration of nats-server: one user per role, each allowed just what the catalog says."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from millrace.contracts.channels import Role
from millrace.contracts.permissions import permissions

#: What the server reads as a message's bound; the codec refuses the same. nats-server's own default.
PAYLOAD_BYTES_MAX = 1_048_576

#: How much may wait for a slow consumer before the server cuts it. Services shed load long before.
PENDING_BYTES_MAX = 64 * 1024 * 1024


class NatsServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that differ from server to server.

    Attributes:
        store_dir: Folder of JetStream's files.
        monitor_port: HTTP port of ``/healthz``, ``/varz``, ...; 0 for none.
        hosted: Roles whose actors run in processes of another role, whose user gets their permissions as well. Each
            process keeps its actors to their own (``millrace.actor.local_bus``).
        tls_cert: Certificate file; empty for no TLS. With ``tls_key``, and ``tls_ca`` to check clients' certificates.
    """

    cluster: str = "local"
    host: str = "127.0.0.1"
    port: int = 4222
    monitor_port: int = 0
    store_dir: str = ".millrace/jetstream"
    server_name: str = "millrace-nats"
    hosted: dict[Role, tuple[Role, ...]] = {}
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""


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
    users = ",\n".join(_user(role, options, passwords[role]) for role in Role)
    lines.append(f"authorization {{\n  users = [\n{users}\n  ]\n}}")
    return "\n".join(lines) + "\n"


def _user(role: Role, options: NatsServerOptions, password: str) -> str:
    allowed = [permissions(each, options.cluster) for each in (role, *options.hosted.get(role, ()))]
    secret = password if password.startswith("$") else json.dumps(password)
    publish = json.dumps(sorted({subject for each in allowed for subject in each.publish}))
    subscribe = json.dumps(sorted({subject for each in allowed for subject in each.subscribe}))
    return (
        f"    {{ user: {role}, password: {secret}, permissions: {{\n"
        f"        publish: {publish},\n        subscribe: {subscribe} }} }}"
    )


def _tls(options: NatsServerOptions) -> str:
    parts = [f"cert_file: {json.dumps(options.tls_cert)}", f"key_file: {json.dumps(options.tls_key)}"]
    if options.tls_ca:
        parts += [f"ca_file: {json.dumps(options.tls_ca)}", "verify: true"]
    return f"tls {{ {', '.join(parts)} }}"

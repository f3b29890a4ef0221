"""Reads a service's configuration: TOML or JSON into a frozen Struct, unknown keys refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from millrace.actor.config_marks import WIRED, refuse_constants
from millrace.actor.errors import ConfigError
from millrace.actor.nearest_field import nearest_field
from millrace.contracts.bounds import Natural, PortOrNone, Share

T = TypeVar("T")


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a service's connection to NATS.

    Attributes:
        cluster: Cluster name, second token of every subject.
        servers: URLs, for example ``nats://127.0.0.1:4222``.
        user: NATS user: the service's role.
        password: Its password.
        tls: Folder that ``millrace certs`` made; empty for no TLS.
    """

    cluster: Annotated[str, WIRED] = "local"
    servers: Annotated[list[str], WIRED] = msgspec.field(default_factory=lambda: ["nats://127.0.0.1:4222"])
    user: Annotated[str, WIRED] = ""
    password: Annotated[str, WIRED] = ""
    tls: Annotated[str, WIRED] = ""


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for logs, traces and metrics.

    Attributes:
        log_format: ``console`` or ``json``.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        log_file: Path; empty for standard error.
        otlp_endpoint: OTLP/HTTP base URL; empty for JSON lines in ``trace_dir``.
        trace_dir: Folder of JSON lines; empty for no local traces.
        trace_sample: Share of requests that are traced, 0 to 1 (an incoming ``traceparent`` decides for itself). What
            fails, moves or fails over is traced from then on in any case.
        trace_first_per_s: So many requests of each second are traced whatever the share.
        metrics_port: Port of the Prometheus endpoint; 0 for none (ingress serves ``/metrics`` on its own port as
            well).
        metrics_host: Address that it binds.
    """

    log_format: Annotated[str, WIRED] = "console"
    log_level: str = "info"
    log_file: Annotated[str, WIRED] = ""
    otlp_endpoint: Annotated[str, WIRED] = ""
    trace_dir: Annotated[str, WIRED] = ""
    trace_sample: Annotated[Share, WIRED] = 1.0
    trace_first_per_s: Annotated[Natural, WIRED] = 0
    metrics_port: Annotated[PortOrNone, WIRED] = 0
    metrics_host: Annotated[str, WIRED] = "127.0.0.1"


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the process of every service has."""

    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()


def load_config(kind: type[T], path: str | Path, *, name: str = "") -> T:
    """Reads ``path`` (``.toml`` or ``.json``) into ``kind``, with ``name`` in place of the file's unless it is empty.

    Raises:
        ConfigError: the file is missing or unreadable, or a key or value is wrong; the message names file and key.
    """
    file = Path(path)
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    try:
        table = (msgspec.toml if file.suffix == ".toml" else msgspec.json).decode(payload)
        refuse_constants(table, kind)
        return msgspec.convert(table | {"name": name} if name else table, kind)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}{nearest_field(str(error), kind)}") from None

"""Reads a running cluster's specification anew, and refuses what cannot be had without a restart."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from millrace.actor.errors import ConfigError
from millrace.cluster.reading import read_cluster
from millrace.cluster.spec import ClusterSpec
from millrace.supervision.service_fields import hosted_by_ingress

from services.supervisor.config import ChildSpec, LaunchOptions, SupervisorConfig
from services.supervisor.layout import Layout
from services.supervisor.preflight import check

#: Where the wanted specification lies, below the cluster's folder.
WANTED = Path("run") / "wanted.toml"

#: Refuses a cluster's settings and its configuration files, given with their roles, before anything starts; raises
#: ConfigError.
CheckFiles = Callable[[ClusterSpec, Iterable[tuple[str, Path]]], None]

_RESTART = "`millrace down`, then `up --cluster FILE`"


def reread(
    layout: Layout, cores: list[int], running: Mapping[str, ChildSpec], check_files: CheckFiles
) -> tuple[Layout, SupervisorConfig]:
    """The layout of the wanted specification; nothing of it is written.

    Args:
        layout: Of the specification in force.
        running: Processes by name, as they were started.

    Raises:
        ConfigError: it is wrong, or cannot be had without a restart.
    """
    spec = check(read_cluster(layout.root / WANTED), free=lambda host, port: True)
    if why := impossible(layout.spec, spec):
        raise ConfigError(f"{why}; this needs a restart: {_RESTART}")
    options = LaunchOptions(spec=spec, directory=str(layout.root), cores=cores, joins=layout.joins)
    after = Layout.following(options, layout, running)
    config = after.plan()
    with tempfile.TemporaryDirectory() as folder:
        check_files(spec, after.copies(Path(folder)))
    return after, config


def impossible(now: ClusterSpec, wanted: ClusterSpec) -> str:
    """Reason why a running cluster cannot become the wanted one; empty where it can."""
    for field in ("name", "nats", "cascade"):
        if getattr(now, field) != getattr(wanted, field):
            return f"{field} changes"
    if (now.api.scheme, now.api.host, now.api.port) != (wanted.api.scheme, wanted.api.host, wanted.api.port):
        return "api.host, api.port or HTTPS changes, where clients are connected"
    if hosted_by_ingress(now) != hosted_by_ingress(wanted):
        return "predictor and tagger would move into ingress or out of it (services.hosted_instances_max)"
    return ""

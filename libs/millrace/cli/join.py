"""Adds this machine's engines to a cluster that runs on another one, in the foreground; Ctrl-C moves their work away,
and they leave.

    millrace join nats://10.0.0.7:4222 --token @join.token --model millrace-mini --instances 2

The cluster's NATS must be heard here (``nats.host``; with ``nats.tls``, a copy of its folder and --set nats.tls=DIR).
Its token is in run/join.token of its folder. Instances are called by this machine's name. They serve models of the
cluster, from a folder of this machine; of the options those about models, engines and this machine count.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from pathlib import Path

import msgspec

from millrace.actor.errors import ConfigError
from millrace.cli import up
from millrace.cli.cluster_flags import cluster_of
from millrace.cli.errors import CliError
from millrace.cluster.spec import ClusterSpec
from millrace.files import replace_file
from millrace.supervision.joining import TOKEN, read_token, token_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `up`, and where the cluster is."""
    parser.add_argument("url", metavar="URL[,URL]", help="of the cluster's NATS servers")
    parser.add_argument("--token", required=True, metavar="@FILE", help="file with the cluster's token, or the token")
    parser.add_argument("--name", help="of this machine in the cluster (default: its host name)")
    up.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the token into this cluster's folder and hands over to the supervisor."""
    name = re.sub(r"[^a-z0-9-]", "-", (arguments.name or socket.gethostname()).lower())
    try:
        told: str = arguments.token
        token = read_token(Path(told[1:]).read_text() if told.startswith("@") else told)
    except (ConfigError, OSError) as error:
        raise CliError(f"--token: {error}") from None
    folder = Path(arguments.dir) / "run"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / TOKEN, token_text(token).encode(), private=True)
    spec = _named(cluster_of(arguments, len(os.sched_getaffinity(0))), name)
    joins = {"name": name, "servers": arguments.url.split(",")}
    return up.start(arguments, msgspec.structs.replace(spec, name=token.cluster), joins=joins)


def _named(spec: ClusterSpec, name: str) -> ClusterSpec:
    """With this machine's name before those of its workers."""
    models = [
        msgspec.structs.replace(
            model, groups=[msgspec.structs.replace(each, name=f"{name}-{each.name}") for each in model.groups]
        )
        for model in spec.models
    ]
    return msgspec.structs.replace(spec, models=models)

"""Shows what this machine offers and what Millrace will use: which engines and how many, and how KV moves.

With MODEL it shows instead which of vLLM's parsers read that model's output, and by what they were chosen.

It inspects cores, memory, disk, GPUs and their links, vLLM, NIXL, RDMA devices, nats-server, permissions, namespaces
and ports. It changes nothing and starts nothing. Run it in a container to see that container's view. The exit code is 1
if something is missing that Millrace cannot run without.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from millrace.actor.errors import ConfigError
from millrace.cli import machine_probes
from millrace.cli.errors import CliError
from millrace.cli.machine_report import Level, MachineDefaults, findings, outlook
from millrace.cluster.model_folders import model_folder
from millrace.cluster.model_parsers import model_parsers

#: API, NATS, the first port of metrics.
PORTS = (8000, 4222, 9100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="which parsers read the output of this model")
    parser.add_argument("--json", action="store_true", help="for programs: facts, findings and outlook")
    parser.add_argument(
        "--dir", default=os.environ.get("MILLRACE_DIR", ".millrace"), metavar="DIR", help="the cluster's folder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Looks, prints."""
    if arguments.model:
        return _show_parsers(arguments.model, as_json=arguments.json)
    facts = machine_probes.look(Path(arguments.dir), PORTS)
    found, ahead = findings(facts), outlook(facts)
    if arguments.json:
        report = {"facts": facts, "findings": found, "outlook": ahead}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        for finding in found:
            print(f"{finding.level:<8} {finding.subject:<20} {finding.text}")
        print(f"\n{_told(ahead)}")
    return int(any(finding.level is Level.MISSING for finding in found))


def _show_parsers(model: str, *, as_json: bool) -> int:
    try:
        found = model_parsers(model_folder(model))
    except ConfigError as error:
        raise CliError(str(error)) from None
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    print(f"reasoning parser   {found.reasoning or 'none'} ({found.why_reasoning})")
    print(f"tool call parser   {found.tool_calls or 'none'} ({found.why_tool_calls})")
    return 0


def _told(ahead: MachineDefaults) -> str:
    if not ahead.engines:
        return f"No engine runs here: {ahead.why}."
    copiers = ", then ".join(ahead.copiers) or "nothing"
    engines = f"Millrace will run {ahead.engines} engine(s), {ahead.engine} ({ahead.why})."
    return f"{engines}\nKV moves between them by {copiers}."

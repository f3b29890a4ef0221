"""The table of verbs. To add one: a line here and a module with ``add_arguments(parser)`` and ``run(arguments)``.

Only the module of the verb that is called gets imported, so that ``millrace --help`` needs no more than argparse.
"""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """One verb.

    ``module`` has ``add_arguments(parser: ArgumentParser) -> None`` and ``run(arguments: Namespace) -> int``, plain or
    async; run returns the exit code and raises CliError with one clear sentence where something outside is wrong.
    ``program``: another program has the verb instead, which runs as ``python -m PROGRAM NAME ...``.
    """

    name: str
    summary: str
    module: str = ""
    program: str = ""


VERBS: tuple[Verb, ...] = (
    Verb("up", "start a cluster on this machine, in the foreground", "millrace.cli.up"),
    Verb("join", "add this machine's engines to a cluster that runs on another one", "millrace.cli.join"),
    Verb("down", "stop the cluster that was started here", "millrace.cli.down"),
    Verb("service", "write a systemd unit that keeps a cluster up", "millrace.cli.service"),
    Verb("apply", "change the running cluster to what a file says", "millrace.cli.apply"),
    Verb("upgrade", "replace what runs by another environment's versions", "millrace.cli.upgrade"),
    Verb("doctor", "show what this machine offers and what Millrace will use", "millrace.cli.doctor"),
    Verb("selftest", "try serving, moving and a kill with engines of this machine", "millrace.cli.selftest"),
    Verb("cluster", "print and check the specification of a cluster", "millrace.cli.cluster_show"),
    Verb("status", "show instances, services and totals once", "millrace.cli.status"),
    Verb("top", "show the same, live", "millrace.cli.top"),
    Verb("tap", "print messages of a subject as they pass", "millrace.cli.tap"),
    Verb("trace", "draw the spans of one request", "millrace.cli.trace"),
    Verb("explain", "explain the placement of a request", "millrace.cli.explain"),
    Verb("migrate", "move a running request to another instance", "millrace.cli.migrate"),
    Verb("drain", "move everything away from an instance and take it out of service", "millrace.cli.drain"),
    Verb("role", "give an instance another role: prefill, decode or both", "millrace.cli.role"),
    Verb("scale", "start or stop instances of a model, by shape and role", "millrace.cli.scale"),
    Verb("sim", "run a scenario, or random load and faults, in virtual time", program="simulator"),
    Verb("recording", "show, export and import recordings of the load", "millrace.cli.recording"),
    Verb("what-if", "replay the last hour with other settings", program="simulator"),
    Verb("plan", "plan the thresholds of a cascade, and show why", "millrace.cli.plan"),
    Verb("profile", "measure an engine's steps and write a step-time model", "millrace.cli.profile"),
    Verb("train", "train a model from recordings of a cluster", "millrace.cli.train"),
    Verb("keys", "make, list and remove API keys", "millrace.cli.keys"),
    Verb("certs", "make the certificates of a cluster's NATS servers and clients", "millrace.cli.certs"),
    Verb("probe", "check that a URL answers, for health checks of containers", "millrace.cli.probe"),
)

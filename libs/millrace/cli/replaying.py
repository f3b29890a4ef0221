"""Finds and calls the factory that builds a recorded actor again."""

from __future__ import annotations

import importlib
import re
from typing import cast

from millrace.actor.actor import Actor
from millrace.actor.recording import Header
from millrace.cli.errors import CliError

#: A file may come from anywhere, and importing runs code: only modules of services are imported for it.
_KIND = re.compile(r"services\.([a-z_]+)(\.[a-z_]+)*")


def build_actor(header: Header) -> Actor:
    """The actor of a recording, as it was when the recording began.

    ``replay_actor(config, seed)`` in ``services/<noun>/replay.py`` makes it. It is found by name, because libraries
    never import services; the recording names the service, as a person would on the command line.

    Raises:
        CliError: no service of that name has such a factory, or it does not understand the recorded configuration.
    """
    if header.kind == "tap":
        raise CliError("this is a recording of the bus, not of an actor; `millrace tap --read FILE` prints it")
    match = _KIND.fullmatch(header.kind)
    if match is None:
        raise CliError(f"the recorded actor is of {header.kind!r}, which is no service")
    name = f"services.{match[1]}.replay"
    try:
        factory = importlib.import_module(name).replay_actor
    except (ModuleNotFoundError, AttributeError) as error:
        raise CliError(f"{header.kind} cannot be replayed: {name}.replay_actor does not exist ({error})") from None
    if not header.config:
        raise CliError(f"the recording of {header.actor} says nothing about how the actor was configured")
    try:
        return cast("Actor", factory(header.config, header.seed))
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise CliError(f"today's {header.kind} does not take the recorded configuration: {error}") from None

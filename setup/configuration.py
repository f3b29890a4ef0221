"""Writes docs/CONFIGURATION.md: every key of a cluster's file, of each service and of each policy that ships.

python -m setup.configuration [--check]

Names, defaults and bounds come from the Structs that read the keys, and sentences from their docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import is_constant, is_wired, plain_type
from millrace.cluster.spec import ClusterSpec, PolicyChoice, ServiceSettings
from millrace.membership.config import MembershipConfig
from millrace.policies.dispatch import DISPATCH_POLICIES
from millrace.policies.provisioning import PROVISIONING_POLICIES
from millrace.policies.registry import Registry
from millrace.policies.roles import ROLE_POLICIES
from millrace.policies.stages import STAGE_POLICIES
from millrace.policies.trading import TRADING_POLICIES
from msgspec.inspect import Field, ListType, StructType, Type, type_info

from deployment.config_check import SERVICES, SET_IN_CLUSTER
from services.ingress.config import CascadeConfig
from services.worker.modelled import ModelledConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "CONFIGURATION.md"

#: Structs that read a table of settings, by the path with which its keys begin.
READERS: dict[str, type[msgspec.Struct]] = {
    **SERVICES,
    "worker.modelled": ModelledConfig,
    "cascade.settings": CascadeConfig,
}

#: Tables that every service has; described once.
SHARED: dict[str, type[msgspec.Struct]] = {"SERVICE": ProcessConfig, "SERVICE.membership": MembershipConfig}

#: Structs whose fields are tables, not keys: what stands in them is described with the services.
DOORS = (ServiceSettings,)

#: Registries by the table that names one of their policies.
POLICIES: dict[str, Registry[Any]] = {
    "policies.dispatch": DISPATCH_POLICIES,
    "policies.stages": STAGE_POLICIES,
    "policies.trading": TRADING_POLICIES,
    "policies.provisioning": PROVISIONING_POLICIES,
    "coordinator.flips": ROLE_POLICIES,
}

#: Of keys that every service has.
_EVERYWHERE = {
    "name": "Unique name on the bus.",
}

_UNITS = {"s": "s", "ms": "ms", "us": "µs", "ns": "ns", "bytes": "bytes", "tokens": "tokens", "share": "share"}
_ATTRIBUTE = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)$")

_HEAD = """# Configuration

Every key, with its default, unit, bounds and meaning. `python -m setup.configuration` writes this page from the
types that read the keys; a test compares. A key is set in three places, the later over the earlier:

- in a cluster's file (`./task up --cluster FILE`): tables below are its tables; keys of a service stand in
  `[settings.SERVICE]`;
- with an option of `./task up` or `compose:prepare`;
- with `--set PATH=VALUE`, for example `--set api.port=9000`, `--set worker.max_num_seqs=8` (all workers),
  `--set worker-1.max_num_seqs=4` (one), `--set models.0.groups.0.role=prefill`. A value is TOML or JSON, else a string.

Unknown keys and wrong values are refused by name before anything starts. What `up` and `compose:prepare` write into the
files of processes by themselves is no key ([below](#wiring)). Keys of simulated scenarios:
[SIMULATION.md](SIMULATION.md#the-scenario-file).
"""


_WIRING = """## Wiring

Fields of processes' own files that `up` and `compose:prepare` write. Settings and `--set` may not set them; most follow
from a key of the cluster's file. A process that is started by hand (`python -m services.NAME --config FILE`) takes them
from its file.
"""


class Table(msgspec.Struct, frozen=True):
    """The keys of one Struct, and where they stand."""

    path: str
    kind: type
    fields: list[Field]


def tables() -> Iterator[tuple[str, list[Table]]]:
    """Every table with keys, by heading; each Struct once."""
    seen: set[type] = set()
    yield "The cluster's file", list(_tables("", ClusterSpec, seen))
    yield "Every service", [each for path, kind in SHARED.items() for each in _tables(path, kind, seen)]
    for name, kind in READERS.items():
        if found := list(_tables(name, kind, seen)):
            yield f"`{name}`", found
    for path, registry in POLICIES.items():
        found = [
            table
            for policy in registry.shipped()
            for table in _tables(f"{path}.parameters of {policy.name}", policy.parameters, seen)
        ]
        if found:
            yield f"Policies: `{path}`", found


def _tables(path: str, kind: type, seen: set[type]) -> Iterator[Table]:
    if kind in seen or kind in DOORS:
        return
    if kind is not PolicyChoice:  # of each slot its own
        seen.add(kind)
    fields = [field for field in _own_fields(kind) if not is_constant(field) and not is_wired(field)]
    nested = {field.name: inner for field in fields if (inner := _struct_within(field.type)) is not None}
    if keys := [field for field in fields if field.name not in nested]:
        yield Table(path, kind, keys)
    for field in fields:
        if field.name in nested:
            many = ".N" if isinstance(plain_type(field.type), ListType) else ""
            yield from _tables(f"{path}.{field.name}{many}".lstrip("."), nested[field.name], seen)


def _own_fields(kind: type) -> list[Field]:
    """Without those that every service has."""
    info = type_info(kind)
    assert isinstance(info, StructType)
    shared = ProcessConfig.__struct_fields__ if issubclass(kind, ProcessConfig) and kind is not ProcessConfig else ()
    return [field for field in info.fields if field.name not in shared]


def _struct_within(kind: Type) -> type | None:
    """The Struct that a field is, or holds a list of; None for a plain value."""
    kind = plain_type(kind) or kind
    for each in (kind, getattr(kind, "item_type", None), *getattr(kind, "types", ())):
        if isinstance(each, StructType):
            return each.cls
    return None


def wiring() -> Iterator[tuple[str, Field, type]]:
    """Fields that deployments write, each with its path and its Struct."""
    seen: set[type] = set()
    for path, kind in {**SHARED, **READERS}.items():
        yield from _wired(path, kind, seen)


def _wired(path: str, kind: type, seen: set[type]) -> Iterator[tuple[str, Field, type]]:
    if kind in seen:
        return
    seen.add(kind)
    for field in _own_fields(kind):
        here = f"{path}.{field.name}"
        if is_wired(field):
            yield here, field, kind
        elif not is_constant(field) and (inner := _struct_within(field.type)) is not None:
            yield from _wired(here, inner, seen)


def document() -> str:
    """The page."""
    parts = [_HEAD]
    count = 0
    for heading, found in tables():
        parts.append(f"## {heading}\n")
        for table in found:
            count += len(table.fields)
            parts.append(_rendered(table))
    parts.insert(1, f"{count} keys.\n")
    parts.append(_wiring())
    return "\n".join(parts)


def _wiring() -> str:
    rows = [
        f"| `{path}` | {_what(field, sentences(kind).get(field.name, ''))} | {_there(path)} |"
        for path, field, kind in wiring()
    ]
    return "\n".join([_WIRING, "| field | what | set with |", "|---|---|---|", *rows]) + "\n"


def _there(path: str) -> str:
    """Key of the cluster's file that decides a wired field."""
    key = SET_IN_CLUSTER.get(path.removeprefix("SERVICE."))
    return f"`{key}`" if key else ""


def _rendered(table: Table) -> str:
    said = sentences(table.kind)
    rows = [f"`{table.path}`\n"] if table.path else []
    rows += ["| key | default | what |", "|---|---|---|"]
    rows += [
        f"| `{field.name}` | {_default(field)} | {_what(field, said.get(field.name, ''))} |" for field in table.fields
    ]
    return "\n".join(rows) + "\n"


def _default(field: Field) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    unit = next((unit for suffix, unit in _UNITS.items() if field.name.endswith(f"_{suffix}")), "")
    shown = f"`{json.dumps(value, ensure_ascii=False)}`" if value not in ("", [], {}, None) else "none"
    return f"{shown} {unit}" if unit and value not in ("", None) else shown


def _what(field: Field, said: str) -> str:
    bounds = _bounds(field.type)
    return " ".join(part for part in (said, f"({bounds})" if bounds else "") if part).replace("|", "\\|")


def _bounds(kind: Type) -> str:
    kind = plain_type(kind) or kind
    for each in (kind, *getattr(kind, "types", ())):
        if isinstance(each, msgspec.inspect.EnumType):
            return ", ".join(f"`{value.value}`" for value in each.cls)
        if isinstance(each, msgspec.inspect.LiteralType):
            return ", ".join(f"`{value}`" for value in each.values)
        if isinstance(each, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
            return ", ".join(
                f"{sign} {bound:g}" for name, sign in signs.items() if (bound := getattr(each, name)) is not None
            )
    return ""


def sentences(kind: type) -> dict[str, str]:
    """Descriptions of a Struct's fields in its docstring and those of its bases."""
    found: dict[str, str] = dict(_EVERYWHERE)
    for base in reversed(kind.__mro__):
        _, _, text = (inspect.getdoc(base) or "").partition("Attributes:\n")
        names: list[str] = []
        for line in text.splitlines():
            if told := _ATTRIBUTE.match(line):
                names = told[1].split(", ")
                found |= dict.fromkeys(names, told[2])
            elif line.startswith(" " * 8):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            else:
                names = []
    return {name: text.replace("``", "`") for name, text in found.items()}


def keys() -> list[str]:
    """Every key by its path."""
    return [f"{table.path}.{field.name}" for _, found in tables() for table in found for field in table.fields]


def undescribed() -> Iterable[str]:
    """Keys that no docstring describes."""
    for _, found in tables():
        for table in found:
            said = sentences(table.kind)
            yield from (f"{table.kind.__name__}.{field.name}" for field in table.fields if field.name not in said)


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 where the page is not as it would be written")
    if not parser.parse_args().check:
        DOCUMENT.write_text(document())
        return 0
    return int(DOCUMENT.read_text() != document())


if __name__ == "__main__":
    sys.exit(main())

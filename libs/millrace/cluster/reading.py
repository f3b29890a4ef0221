"""Reads a cluster's file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from millrace.actor.errors import ConfigError
from millrace.actor.nearest_field import nearest_field
from millrace.cluster.checks import check_spec
from millrace.cluster.spec import ClusterSpec, ModelSpec
from millrace.policies.registry import is_file


def parse_cluster(payload: str | bytes, folder: Path | None = None) -> ClusterSpec:
    """Reads and checks the text of a cluster's file.

    Args:
        folder: What relative paths of models, keys, policies and step times are relative to; None leaves them.

    Raises:
        ConfigError: naming the field.
    """
    try:
        spec = msgspec.toml.decode(payload, type=ClusterSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(plain(str(error)) + nearest_field(str(error), ClusterSpec)) from None
    except UnicodeDecodeError:
        raise ConfigError("this is no TOML: a cluster's file is text in UTF-8") from None
    spec = spec if folder is None else anchored(spec, folder)
    check_spec(spec)
    return spec


def read_cluster(path: str | Path) -> ClusterSpec:
    """Reads and checks a cluster's file; ``-`` for standard input.

    Raises:
        ConfigError: naming the file and the field.
    """
    file = Path(path)
    try:
        text = sys.stdin.buffer.read() if path == "-" else file.read_bytes()
        return parse_cluster(text, file.absolute().parent)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def plain(error: str) -> str:
    """Moves the path of msgspec's ``... - at `$.models[0].groups[1]` `` to the front, as a reader of TOML writes it."""
    text, at, path = error.partition(" - at `$")
    where = path.rstrip("`").lstrip(".")
    return f"{where}: {text}" if at and where else text


def anchored(spec: ClusterSpec, folder: Path) -> ClusterSpec:
    """With the paths of files absolute. A model's path that is no folder stays: it may be a name."""

    def found(path: str) -> str:
        return str((folder / path).resolve()) if path and (folder / path).exists() else path

    def model(each: ModelSpec) -> ModelSpec:
        groups = [msgspec.structs.replace(group, step_time=found(group.step_time)) for group in each.groups]
        adapters = {name: found(path) for name, path in each.adapters.items()}
        return msgspec.structs.replace(each, path=found(each.path), groups=groups, adapters=adapters)

    cascade = spec.cascade
    if cascade is not None:
        cascade = msgspec.structs.replace(cascade, sample=found(cascade.sample))

    def placed(file: str) -> str:
        return str((folder / file).resolve()) if file else ""

    files = {name: placed(getattr(spec.api, name)) for name in ("keys", "ssl_certfile", "ssl_keyfile")}
    policies = {
        kind: msgspec.structs.replace(choice, name=found(choice.name) if is_file(choice.name) else choice.name)
        for kind, choice in msgspec.structs.asdict(spec.policies).items()
    }
    return msgspec.structs.replace(
        spec,
        models=[model(each) for each in spec.models],
        cascade=cascade,
        api=msgspec.structs.replace(spec.api, **files),
        nats=msgspec.structs.replace(spec.nats, tls=placed(spec.nats.tls)),
        policies=msgspec.structs.replace(spec.policies, **policies),
    )

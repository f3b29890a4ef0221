"""Makes, lists and removes API keys in the file that ingress reads (``http.keys_file``).

A key is shown once, when it is made; the file keeps its hash. Ingress reads the file again within a second.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from millrace.cli.errors import CliError
from millrace.contracts.keyfile import (
    KEY_PREFIX,
    NAME_PATTERN,
    KeyFile,
    KeyRecord,
    format_key_file,
    hash_key,
    read_key_file,
)
from millrace.files import replace_file

DEFAULT_FILE = Path(".millrace") / "keys.toml"

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_RIGHTS = {"adapters": "load adapters", "metrics": "read /metrics"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``keys add NAME``, ``keys list``, ``keys remove NAME``."""
    parser.add_argument("--file", type=Path, default=DEFAULT_FILE, help=f"the key file (default {DEFAULT_FILE})")
    # Also after the action, where people write it; SUPPRESS, lest its default overwrite what stood before the action.
    after = argparse.ArgumentParser(add_help=False)
    after.add_argument("--file", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key and print it once", parents=[after])
    add.add_argument("name", help="whose key it is: letters, digits and _ . @ -")
    add.add_argument("--requests-per-minute", type=int, default=0, metavar="N", help="0 for no limit")
    add.add_argument("--tokens-per-minute", type=int, default=0, metavar="N", help="0 for no limit")
    add.add_argument("--concurrency", type=int, default=0, metavar="N", help="requests at once; 0 for no limit")
    add.add_argument("--adapters", action="store_true", help="it may load and unload LoRA adapters")
    add.add_argument("--metrics", action="store_true", help="it may read /metrics, which others then may not")
    actions.add_parser("list", help="names and limits", parents=[after])
    remove = actions.add_parser("remove", help="forget a key", parents=[after])
    remove.add_argument("name")


def run(arguments: argparse.Namespace) -> int:
    """Carries out one action."""
    file = _read(arguments.file)
    if arguments.action == "list":
        for record in file.keys:
            print(_line(record))
        if not file.keys:
            print(f"no keys in {arguments.file}; `millrace keys add NAME` makes one")
        return 0
    if arguments.action == "remove":
        rest = [record for record in file.keys if record.name != arguments.name]
        if len(rest) == len(file.keys):
            raise CliError(f"{arguments.file} has no key {arguments.name!r}")
        _write(arguments.file, KeyFile(keys=rest))
        return 0
    key, record = _make(arguments, {record.name for record in file.keys})
    _write(arguments.file, KeyFile(keys=[*file.keys, record]))
    print(key)
    return 0


def _make(arguments: argparse.Namespace, taken: set[str]) -> tuple[str, KeyRecord]:
    if not NAME_PATTERN.fullmatch(arguments.name):
        raise CliError(f"the name {arguments.name!r} may have letters, digits and _ . @ - only, at most 64")
    if arguments.name in taken:
        raise CliError(f"there is a key {arguments.name!r} already; remove it first")
    limits = {name: getattr(arguments, name) for name in _LIMITS}
    if min(limits.values()) < 0:
        raise CliError("a limit cannot be negative; 0 means none")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    rights = {right: getattr(arguments, right) for right in _RIGHTS}
    return key, KeyRecord(name=arguments.name, sha256=hash_key(key), **limits, **rights)


def _read(path: Path) -> KeyFile:
    try:
        return read_key_file(path.read_bytes())
    except FileNotFoundError:
        return KeyFile()
    except (OSError, ValueError) as error:
        raise CliError(f"{path}: {error}") from None


def _write(path: Path, file: KeyFile) -> None:
    """Replaces the file as one step, readable by its owner only: ingress never sees half of it."""
    try:
        replace_file(path, format_key_file(file).encode(), private=True)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None


def _line(record: KeyRecord) -> str:
    limits = [f"{limit} {name.replace('_', ' ')}" for name in _LIMITS if (limit := getattr(record, name))]
    limits += [f"may {what}" for right, what in _RIGHTS.items() if getattr(record, right)]
    return f"{record.name}  {', '.join(limits) or 'no limits'}"

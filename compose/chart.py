"""Writes objects of Kubernetes as a Helm chart: the same ones, with what an installer may change taken from values."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

ABOUT = {"apiVersion": "v2", "name": "millrace", "version": "0.1.0", "kubeVersion": ">=1.29.0-0"}

HEADER = "# What may change where it is installed. All else is the cluster's file, from which the chart is made.\n"

#: Around the path of a value in an object.
MARK, END = "<value:", ">"


class ChartValues:
    """Values that an installer of a chart may change.

    Args:
        marked: Whether objects hold marks, which `write_chart` makes expressions of, in place of the values.

    Attributes:
        defaults: What values.yaml holds.
    """

    def __init__(self, *, marked: bool = False) -> None:
        self._marked = marked
        self.defaults: dict[str, Any] = {}

    def value(self, path: str, default: Any) -> Any:
        """Return what an object holds for a value, ``path`` with ``/`` between its keys."""
        *tables, key = path.split("/")
        table = self.defaults
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = default
        return MARK + path + END if self._marked else default

    def digest(self) -> str:
        """Return eight digits that differ where any value does."""
        text = json.dumps(self.defaults, sort_keys=True, separators=(",", ":"))
        return MARK + END if self._marked else hashlib.sha256(text.encode()).hexdigest()[:8]


def write_chart(folder: Path, objects: list[dict[str, Any]], values: ChartValues) -> None:
    """Writes a chart, with a template for each kind.

    Args:
        objects: Made with these values, marked. One with a key ``when`` is rendered where that value is true.
    """
    write_private(folder / "Chart.yaml", yaml.safe_dump(ABOUT, sort_keys=False))
    write_private(folder / "values.yaml", HEADER + yaml.safe_dump(values.defaults, sort_keys=False))
    templates: dict[str, str] = {}
    for each in objects:
        text = yaml.safe_dump({key: each[key] for key in each if key != "when"}, sort_keys=False, width=10_000)
        text = "---\n" + re.sub(f"{MARK}([^{END}]*){END}", _expression, text.replace("{{", '{{ "{{" }}'))
        if "when" in each:
            path = each["when"].removeprefix(MARK).removesuffix(END)
            text = f"{{{{- if .Values.{path} }}}}\n{text}{{{{- end }}}}\n"
        templates[each["kind"]] = templates.get(each["kind"], "") + text
    for kind, text in templates.items():
        write_private(folder / "templates" / f"{kind.lower()}.yaml", text)


def write_private(file: Path, text: str) -> None:
    """Writes a file that only its owner may read, and the folders above it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(text)


def _expression(mark: re.Match[str]) -> str:
    keys = " ".join(f'"{key}"' for key in mark[1].split("/"))
    return f"{{{{ index .Values {keys} | toJson }}}}" if mark[1] else "{{ toJson .Values | sha256sum | trunc 8 }}"

"""Services that `bench as_shipped` finds by their command lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.as_shipped_ways import _configurations

WORDS = ["python", "-m", "deployment.ingress", "--config", "/run/ingress-0.json", "--hosted"]


@pytest.mark.parametrize("words", [WORDS, [" ".join(WORDS)]], ids=["started", "forked"])
def test_a_service_is_found_by_its_configuration(words: list[str]) -> None:
    others = [SimpleNamespace(pid=2, cmdline=lambda: ["nats-server", "-p", "4222"])]
    rig = SimpleNamespace(processes=lambda: [SimpleNamespace(pid=1, cmdline=lambda: words), *others])
    assert _configurations(cast("Any", rig)) == {1: Path("/run/ingress-0.json")}

"""Services that `bench as_shipped` finds by their command lines, and figures that a load did not give."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.as_shipped import median_of, row
from bench.as_shipped_ways import _configurations

WORDS = ["python", "-m", "deployment.ingress", "--config", "/run/ingress-0.json", "--hosted"]


@pytest.mark.parametrize("words", [WORDS, [" ".join(WORDS)]], ids=["started", "forked"])
def test_a_service_is_found_by_its_configuration(words: list[str]) -> None:
    others = [SimpleNamespace(pid=2, cmdline=lambda: ["nats-server", "-p", "4222"])]
    rig = SimpleNamespace(processes=lambda: [SimpleNamespace(pid=1, cmdline=lambda: words), *others])
    assert _configurations(cast("Any", rig)) == {1: Path("/run/ingress-0.json")}


def test_a_load_without_a_first_token_has_a_row_all_the_same() -> None:
    figures = dict.fromkeys(
        ("requests_per_s", "tokens_per_s", "gateway_us", "all_us", "by_policy", "errors", "per_message"), 1.0
    )
    rounds: list[dict[str, Any]] = [
        {**figures, "p50_ms": p50, "p99_ms": None, "by_process": {"ingress-0": 1.0}} for p50 in (None, 4.0)
    ]
    assert "p50 4.00 ms, p99 -;" in row(median_of(rounds))

"""Writes the Grafana dashboard: panels as a table here, JSON in dashboards/millrace.json. `--check` says whether that
is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent / "dashboards" / "millrace.json"


class GraphPanel(NamedTuple):
    """One panel: title, Grafana unit, and (legend, PromQL) pairs."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    rate = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    return tuple((f"p{round(q * 100)}", f"histogram_quantile({q}, {rate})") for q in (0.5, 0.9, 0.99))


def _rate(metric: str, by: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}[$__rate_interval]))"


def _quotient(part: str, whole: str) -> str:
    """A quotient of rates; 0 while nothing happens, where plain division shows nothing at all (0 / 0)."""
    return f"({part} / ({whole} > 0)) or vector(0)"


ROWS: tuple[tuple[str, tuple[GraphPanel, ...]], ...] = (
    (
        "What clients see",
        (
            GraphPanel(
                "Requests by outcome", "reqps", (("{{outcome}}", _rate("millrace_ingress_requests_total", "outcome")),)
            ),
            GraphPanel("Time to first token", "s", _quantiles("millrace_ingress_ttft_seconds")),
            GraphPanel("Time between tokens", "s", _quantiles("millrace_ingress_itl_seconds")),
            GraphPanel("End to end", "s", _quantiles("millrace_ingress_e2e_seconds")),
            GraphPanel("Output tokens", "short", (("tok/s", _rate("millrace_ingress_output_tokens_total")),)),
            GraphPanel(
                "Responses by status", "reqps", (("{{status}}", _rate("millrace_http_responses_total", "status")),)
            ),
            GraphPanel(
                "Calls refused or failed", "reqps", (("{{kind}}", _rate("millrace_ingress_refusals_total", "kind")),)
            ),
        ),
    ),
    (
        "Placement",
        (
            GraphPanel(
                "Dispatches by instance",
                "ops",
                (("{{instance}}", _rate("millrace_ingress_dispatches_total", "instance")),),
            ),
            GraphPanel(
                "Continuations by reason",
                "ops",
                (("{{reason}}", _rate("millrace_ingress_continuations_total", "reason")),),
            ),
            GraphPanel("Gap around a continuation", "s", _quantiles("millrace_ingress_continuation_gap_seconds")),
            GraphPanel(
                "Open",
                "short",
                (
                    ("calls", "sum(millrace_ingress_calls_open)"),
                    ("sequences", "sum(millrace_ingress_sequences_open)"),
                    ("waiting for an instance", "sum(millrace_ingress_sequences_waiting)"),
                ),
            ),
        ),
    ),
    (
        "Engines",
        (
            GraphPanel("Running", "short", (("{{instance}}", "millrace_worker_running"),)),
            GraphPanel("Waiting", "short", (("{{instance}}", "millrace_worker_waiting"),)),
            GraphPanel(
                "KV blocks in use",
                "percentunit",
                (("{{instance}}", "1 - millrace_worker_blocks_free / millrace_worker_blocks_total"),),
            ),
            GraphPanel(
                "Preemptions", "ops", (("{{instance}}", _rate("millrace_worker_preemptions_total", "instance")),)
            ),
            GraphPanel("Queue time in the engine", "s", _quantiles("millrace_worker_queue_seconds")),
            GraphPanel("Step duration", "s", _quantiles("millrace_worker_step_seconds")),
        ),
    ),
    (
        "Migrations",
        (
            GraphPanel(
                "Migrations by outcome",
                "ops",
                (("{{outcome}}", _rate("millrace_migrator_migrations_total", "outcome")),),
            ),
            GraphPanel("Gap: no token while moving", "s", _quantiles("millrace_migrator_gap_seconds")),
            GraphPanel("Gap that clients see", "s", _quantiles("millrace_ingress_migration_gap_seconds")),
            GraphPanel("Whole migration", "s", _quantiles("millrace_migrator_duration_seconds")),
            GraphPanel("Copied, by copier", "Bps", (("{{copier}}", _rate("millrace_migrator_bytes_total", "copier")),)),
            GraphPanel(
                "Descriptors, by copier",
                "ops",
                (("{{copier}}", _rate("millrace_migrator_descriptors_total", "copier")),),
            ),
            GraphPanel(
                "Rounds of a migration that moved",
                "short",
                (
                    (
                        "mean",
                        _quotient(
                            _rate("millrace_migrator_rounds_total"),
                            _rate('millrace_migrator_migrations_total{outcome="moved"}'),
                        ),
                    ),
                ),
            ),
            GraphPanel(
                "Not moved, by reason",
                "ops",
                (
                    (
                        "{{outcome}} {{refusal}}",
                        _rate('millrace_migrator_migrations_total{outcome!="moved"}', "outcome, refusal"),
                    ),
                ),
            ),
            GraphPanel(
                "Under way now",
                "short",
                (
                    ("{{instance}}", "millrace_migrator_in_flight"),
                    ("{{instance}} frozen", "millrace_migrator_frozen"),
                ),
            ),
        ),
    ),
    (
        "Trading",
        (
            GraphPanel("Asks, by reason", "ops", (("{{reason}}", _rate("millrace_broker_asks_total", "reason")),)),
            GraphPanel("Answers to asks", "ops", (("{{answer}}", _rate("millrace_broker_bids_total", "answer")),)),
            GraphPanel(
                "Moves, by reason",
                "ops",
                (("{{reason}}", _rate('millrace_broker_ended_total{result="moved"}', "reason")),),
            ),
            GraphPanel(
                "Asks that came to nothing",
                "ops",
                (
                    (
                        "{{reason}} {{result}}",
                        _rate('millrace_broker_ended_total{result!="moved"}', "reason, result"),
                    ),
                ),
            ),
            GraphPanel("Open asks and bids", "short", (("{{instance}} {{direction}}", "millrace_broker_open"),)),
            GraphPanel(
                "Risk that memory runs short", "percentunit", (("{{instance}}", "millrace_broker_memory_risk"),)
            ),
            GraphPanel("Queued sequences handed back", "ops", (("returned", _rate("millrace_broker_returned_total")),)),
            GraphPanel(
                "Messages of trades refused", "ops", (("{{why}}", _rate("millrace_broker_refused_total", "why")),)
            ),
        ),
    ),
    (
        "The bus and the processes",
        (
            GraphPanel("Messages handled", "ops", (("{{actor}}", _rate("millrace_actor_handled_total", "actor")),)),
            GraphPanel(
                "Messages refused",
                "ops",
                (("{{actor}} {{kind}}", _rate("millrace_actor_refused_total", "actor, kind")),),
            ),
            GraphPanel("Time to handle a message", "s", _quantiles("millrace_actor_handle_seconds")),
            GraphPanel("Connected to NATS", "bool", (("{{role}} {{instance}}", "millrace_bus_connected"),)),
            GraphPanel(
                "CPU", "percentunit", (("{{role}} {{instance}}", "rate(process_cpu_seconds_total[$__rate_interval])"),)
            ),
            GraphPanel("Memory", "bytes", (("{{role}} {{instance}}", "process_resident_memory_bytes"),)),
        ),
    ),
)


def queries() -> list[str]:
    """Every query of every panel."""
    return [query for _, panels in ROWS for panel in panels for _, query in panel.queries]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for index, panel in enumerate(row):
            panels.append(_panel(panel, x=8 * (index % 3), y=y + 7 * (index // 3)))
        y += 7 * -(-len(row) // 3)
    for number, drawn in enumerate(panels, 1):
        drawn["id"] = number
    return {
        "uid": "millrace",
        "title": "Millrace",
        "tags": ["millrace"],
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": panels,
    }


def _panel(panel: GraphPanel, *, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 7},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + index), "datasource": source, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Writes the file, or with --check compares it."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The table of every metric, read off the collectors of the services: ``python -m tests.unit.metrics_table`` writes it.

It lives with the tests because it composes all services, which libraries may not.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.actor.meter import RuntimeMeter
from millrace.telemetry.metrics import TelemetryMetrics
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.broker.metrics import BrokerMetrics
from services.coordinator.metrics import AutopilotMetrics, ProvisioningMetrics
from services.ingress.http.metrics import HttpMetrics
from services.ingress.metrics import IngressMetrics
from services.judge.metrics import JudgeMetrics
from services.migrator.metrics import MigratorMetrics
from services.predictor.metrics import PredictorMetrics
from services.tagger.metrics import TaggerMetrics
from services.worker.metrics import WorkerCollector

FILE = Path(__file__).resolve().parents[2] / "docs" / "METRICS.md"

INTRODUCTION = """# Metrics

Every service serves these at `/metrics` on its metrics port (9100 and up with `./task up`; ingress on its own port as
well). Names are `millrace_<noun>_<unit>`, or vLLM's (`vllm:*`), so that its dashboards show data; times are seconds,
lengths are tokens. A histogram `x` gives `x_bucket`, `x_sum` and `x_count`. Besides, each service has Prometheus's
`process_*` figures (CPU, memory, file descriptors).

Written by `python -m tests.unit.metrics_table` from the services' own collectors; a test fails where it is stale.
"""


def every_service(registry: CollectorRegistry) -> None:
    """Register the metrics that each process keeps about itself."""
    TelemetryMetrics(registry, service="", instance="", version="", drops=dict)
    RuntimeMeter(registry).handle_seconds.labels(actor="")


def ingress(registry: CollectorRegistry) -> None:
    """Requests, dispatch, HTTP."""
    IngressMetrics(registry)
    HttpMetrics(registry)


def predictor(registry: CollectorRegistry) -> None:
    """Forecasts, what they stand on, and how far they were off."""
    PredictorMetrics(registry)


def broker(registry: CollectorRegistry) -> None:
    """Asks, bids, deals and boundaries."""
    BrokerMetrics(registry)


def migrator(registry: CollectorRegistry) -> None:
    """Migrations away and to here."""
    MigratorMetrics(registry)


def worker(registry: CollectorRegistry) -> None:
    """Sequences and blocks of each instance."""
    registry.register(WorkerCollector(list))


def tagger(registry: CollectorRegistry) -> None:
    """Length tags and what they are worth."""
    TaggerMetrics(registry)


def judge(registry: CollectorRegistry) -> None:
    """Scores of answers."""
    JudgeMetrics(registry)


def coordinator(registry: CollectorRegistry) -> None:
    """Provisioning."""
    AutopilotMetrics(registry)
    ProvisioningMetrics(registry)


SECTIONS: tuple[tuple[str, Callable[[CollectorRegistry], None]], ...] = (
    ("Ingress", ingress),
    ("Predictor", predictor),
    ("Worker", worker),
    ("Migrator", migrator),
    ("Broker", broker),
    ("Tagger", tagger),
    ("Judge", judge),
    ("Coordinator", coordinator),
    ("Every service", every_service),
)


def families(register: Callable[[CollectorRegistry], None]) -> Iterator[Metric]:
    """Families of one section by name, without the process's own."""
    registry = CollectorRegistry()
    register(registry)
    named = (family for family in registry.collect() if family.name.startswith(("millrace_", "vllm:")))
    yield from sorted(named, key=lambda family: family.name)


def labels(family: Metric) -> list[str]:
    """Label names: a family says them itself or, where it was made by prometheus_client's objects, its samples do."""
    declared = getattr(family, "_labelnames", ())
    seen = dict.fromkeys(name for sample in family.samples for name in sample.labels)
    return [name for name in dict.fromkeys([*declared, *seen]) if name != "le"]


def row(family: Metric) -> str:
    """One line of the table."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    names = ", ".join(f"`{label}`" for label in labels(family))
    return f"| `{name}` | {family.type} | {names} | {family.documentation.rstrip('.')} |"


def table() -> str:
    """The whole document."""
    parts = [INTRODUCTION]
    for title, register in SECTIONS:
        rows = [row(family) for family in families(register)]
        parts.append(
            "\n".join([f"## {title}\n", "| name | type | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(table(), "utf-8")

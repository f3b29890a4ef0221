"""Ports that a start chooses by itself, before its services listen on them."""

from millrace.cluster.spec import ClusterSpec, TelemetrySpec

from services.supervisor.preflight import METRICS_PORTS, free_ports
from tests.testbed.up_cluster import free_port


def test_starts_at_the_same_time_choose_different_ports_for_metrics() -> None:
    spec = ClusterSpec(models=[], telemetry=TelemetrySpec(metrics_port=free_port()))
    with free_ports(spec) as first, free_ports(spec) as second:
        ports = first.telemetry.metrics_port, second.telemetry.metrics_port
        assert abs(ports[0] - ports[1]) >= METRICS_PORTS
    with free_ports(spec) as again:
        assert again.telemetry.metrics_port == ports[0]

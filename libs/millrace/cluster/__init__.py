"""The cluster as data: models, stages, groups of instances, policies and services, read from a TOML file.

`services/supervisor/layout.py` renders a ClusterSpec to processes, `compose/prepare.py` to containers.
"""

from millrace.cluster.cascade_spec import CascadeSpec
from millrace.cluster.checks import check_spec
from millrace.cluster.reading import parse_cluster, read_cluster
from millrace.cluster.spec import (
    ApiSpec,
    ClusterPolicies,
    ClusterSpec,
    ExtraService,
    GroupSpec,
    KvReplicaSpec,
    ModelSpec,
    NatsSpec,
    PageSpec,
    PolicyChoice,
    ServiceCounts,
    ServiceSettings,
    StageSpec,
    TelemetrySpec,
)
from millrace.cluster.stage_cuts import even_stages
from millrace.cluster.toml_text import cluster_toml
from millrace.cluster.workers import WorkerSlot, instances_of, workers_of

__all__ = [
    "ApiSpec",
    "CascadeSpec",
    "ClusterPolicies",
    "ClusterSpec",
    "ExtraService",
    "GroupSpec",
    "KvReplicaSpec",
    "ModelSpec",
    "NatsSpec",
    "PageSpec",
    "PolicyChoice",
    "ServiceCounts",
    "ServiceSettings",
    "StageSpec",
    "TelemetrySpec",
    "WorkerSlot",
    "check_spec",
    "cluster_toml",
    "even_stages",
    "instances_of",
    "parse_cluster",
    "read_cluster",
    "workers_of",
]

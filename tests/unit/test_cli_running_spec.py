"""`millrace cluster show` of a running cluster: its file as of now, with what differs from the start."""

from millrace.cli.cluster_rows import InstanceRow, StageRow
from millrace.cli.running_spec import running_spec, with_differences
from millrace.cluster.reading import parse_cluster
from millrace.cluster.spec import ClusterSpec
from millrace.cluster.toml_text import cluster_toml
from millrace.contracts.cascade import CascadePlan, CascadeTier

START = """
[[models]]
name = "m"
path = "nano"
groups = [{ engine = "modelled", count = 2, spares = 2, role = "prefill" }]
stages = [{ name = "s0", length_max = 512 }, { name = "s1", length_min = 512 }]
[[models]]
name = "large"
path = "mini"
groups = [{ engine = "modelled" }]
[cascade]
tiers = ["m", "large"]
"""


def row(instance: str, role: str = "prefill", state: str = "ready", model: str = "m") -> InstanceRow:
    return InstanceRow(instance=instance, model=model, stage="s0", state=state, role=role)


def stage(name: str, low: int, high: int | None) -> StageRow:
    load = dict.fromkeys(
        ("running", "waiting", "blocks_used", "blocks_total", "output_tokens_per_s", "leaving", "arriving"), 0
    )
    return StageRow(model="m", stage=name, length_min=low, length_max=high, covered_by="", instances=1, **load)


AS_BEGUN = [row("worker-0"), row("worker-1"), row("worker-4", "both", model="large")]


def lines_of(spec: ClusterSpec) -> list[str]:
    start = parse_cluster(START)
    return [line for line in with_differences(cluster_toml(start), cluster_toml(spec)) if "#" in line]


def test_a_cluster_as_it_was_started_reads_as_its_file() -> None:
    start = parse_cluster(START)
    assert running_spec(start, AS_BEGUN, [stage("s0", 0, 512), stage("s1", 512, None)], []) == start


def test_counts_roles_boundaries_and_thresholds_are_those_of_now_and_marked() -> None:
    rows = [
        row("worker-0"),
        row("worker-1", "decode"),
        row("worker-2"),
        row("worker-3", state="drained"),
        row("worker-4", "both", model="large"),
    ]
    tiers = [CascadeTier(model="m", threshold=60.0), CascadeTier(model="large", threshold=0.0)]
    plan = CascadePlan(cascade="cascade", epoch=2, tiers=tiers)
    now = running_spec(parse_cluster(START), rows, [stage("s0", 0, 700), stage("s1", 700, None)], [plan])
    assert parse_cluster(cluster_toml(now)) == now
    assert lines_of(now) == [
        "count = 3  # at the start: count = 2",
        "spares = 1  # at the start: spares = 2",
        "length_max = 700  # at the start: length_max = 512",
        "length_min = 700  # at the start: length_min = 512",
        "thresholds = [60.0]  # at the start: not there",
        "[settings.coordinator.roles]  # at the start: not there",
        'worker-1 = "decode"  # at the start: not there',
    ]


def test_a_line_that_is_gone_is_a_comment() -> None:
    assert list(with_differences("a = 1\nspares = 2\nb = 3\n", "a = 1\nb = 3\n")) == [
        "a = 1",
        "# at the start: spares = 2",
        "b = 3",
    ]

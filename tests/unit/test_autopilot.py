"""The autopilot: windows and replays in, advice out, and only what two windows in a row say."""

from itertools import groupby

import pytest
from millrace.contracts.coordinator import PlanProposed
from millrace.contracts.plan import Advice, Plan
from millrace.workloads.recording import ADVISED_MIN

from services.coordinator.adopting import LoadReplayed
from services.coordinator.autopilot import CPU_SHARE, REQUESTS_MAX, ClusterChanged, ReplayFailed
from services.coordinator.config import CoordinatorConfig
from services.coordinator.plan_writing import PlanWriting
from tests.unit.autopilot_rig import INTERVAL_S, Autopilot, S


class Advising(Autopilot):
    """Its windows say settings, and why."""

    def window(self, settings: str, *, cpu_s: float = 1.0) -> None:
        """A window whose replay says that."""
        assert self.tick(seconds=INTERVAL_S, requests=ADVISED_MIN) is not None
        advice = Advice(settings=settings, evidence=f"because of {settings or 'nothing'}")
        self.hear(LoadReplayed(advice=advice, requests=ADVISED_MIN, cpu_s=cpu_s))


def test_a_window_is_replayed_when_it_is_long_enough_and_has_enough_requests() -> None:
    pilot = Advising()
    assert pilot.tick(seconds=INTERVAL_S - 1, requests=ADVISED_MIN) is None
    replay = pilot.tick(seconds=2)
    assert (replay.last_s, replay.requests_max) == (INTERVAL_S + 1, REQUESTS_MAX)
    assert pilot.tick(seconds=3 * INTERVAL_S, requests=ADVISED_MIN) is None  # one at a time


def test_a_light_load_is_waited_for_and_advised_nothing() -> None:
    pilot = Advising()
    assert pilot.tick(seconds=100 * INTERVAL_S, requests=ADVISED_MIN - 1) is None
    assert [each.settings for each in pilot.proposed] == [""]
    waits = f"waits for {ADVISED_MIN} requests, and for {INTERVAL_S} s, before the first replay"
    objectives = "5 times the latencies of a request that is alone"
    assert pilot.proposed[0].evidence == f"{waits}; objectives: {objectives}"


def test_a_standby_replays_nothing() -> None:
    pilot = Advising(leads=False)
    assert pilot.tick(seconds=INTERVAL_S + 1, requests=ADVISED_MIN) is None
    assert not pilot.proposed


@pytest.mark.parametrize(
    ("windows", "given"),
    [
        (["x=1"], [""]),
        (["x=1", "x=1"], ["", "x=1"]),
        (["x=1", "", "x=1", "y=1"], [""]),
        (["x=1", "x=1", "x=1"], ["", "x=1"]),
        (["x=1", "x=1", "", "x=1"], ["", "x=1"]),
        (["x=1", "x=1", "", ""], ["", "x=1", ""]),
        (["x={a=0.81}", "x={a=0.88}", "x={a=0.85}"], ["", "x={a=0.88}"]),  # bounds follow from each window's load
        (["x=1", "x=1", "y=1", "y=1"], ["", "x=1", "y=1"]),
    ],
)
def test_advice_changes_when_two_windows_in_a_row_say_the_same(windows: list[str], given: list[str]) -> None:
    pilot = Advising()
    for settings in windows:
        pilot.window(settings)
    assert [settings for settings, _ in groupby(each.settings for each in pilot.proposed)] == given


def test_what_one_window_says_is_told_as_that() -> None:
    pilot = Advising()
    pilot.window("x=1")
    assert pilot.proposed[-1].evidence == "x=1 was better in the last window; the next one decides: because of x=1"


def test_long_replays_are_further_apart() -> None:
    pilot = Advising()
    pilot.window("", cpu_s=2 * INTERVAL_S * CPU_SHARE)
    assert pilot.tick(seconds=INTERVAL_S + 1, requests=ADVISED_MIN) is None
    assert pilot.tick(seconds=INTERVAL_S) is not None
    assert pilot.metrics.cpu_seconds == 2 * INTERVAL_S * CPU_SHARE


def test_advice_ends_with_the_cluster_that_it_is_for() -> None:
    pilot = Advising()
    pilot.window("x=1")
    pilot.hear(ClusterChanged(text="the file"))
    pilot.window("x=1")
    assert pilot.tick(seconds=INTERVAL_S, requests=ADVISED_MIN) is not None
    pilot.now_ns += S
    pilot.hear(ClusterChanged(text="another file"))
    pilot.hear(LoadReplayed(advice=Advice(settings="x=1"), requests=ADVISED_MIN, cpu_s=1.0))  # of the cluster before
    assert [each.settings for each in pilot.proposed[-2:]] == ["x=1", ""]
    pilot.window("x=1")
    assert pilot.proposed[-1].settings == ""


def test_the_file_that_is_read_with_the_first_rows_begins_no_window_anew() -> None:
    pilot = Advising()
    assert pilot.tick(seconds=1, requests=ADVISED_MIN - 1) is None
    pilot.hear(ClusterChanged(text="the file"))
    assert pilot.tick(seconds=INTERVAL_S, requests=1) is not None


def test_a_replay_that_fails_says_why_and_is_tried_again() -> None:
    pilot = Advising()
    assert pilot.tick(seconds=INTERVAL_S, requests=ADVISED_MIN) is not None
    pilot.hear(ReplayFailed(detail="the disk is full"))
    assert pilot.proposed[-1].evidence == "no replay: the disk is full"
    assert pilot.tick(seconds=INTERVAL_S, requests=ADVISED_MIN) is not None


def test_advice_is_in_the_plan_until_there_is_other_advice() -> None:
    writing = PlanWriting(CoordinatorConfig())
    first = writing.next_plan("m", None, [])
    assert first.advice is None

    def next_plan(plan: Plan, number: int, advice: Advice) -> Plan | None:
        writing.take(PlanProposed(model="m", by="autopilot", number=number, advice=advice))
        return writing.next_plan("m", plan, [])

    second = next_plan(first, 1, Advice(settings="x=1"))
    assert (second.epoch, second.advice, second.reason) == (2, Advice(settings="x=1"), first.reason)
    assert next_plan(second, 2, Advice(settings="x=1")) is None
    writing.forget("m")
    assert writing.next_plan("m", second, []) is None  # the next coordinator leaves it

"""Adoptions of the autopilot: what is advised twice is put in force, kept where it shows, and else taken back."""

import fcntl

import pytest
from millrace.cli.apply import take_turn
from millrace.cli.errors import CliError
from millrace.cluster.reading import parse_cluster
from millrace.cluster.settings import present_settings, with_cluster_settings
from millrace.cluster.toml_text import cluster_toml
from millrace.contracts.plan import Adoption, Advice, Plan, Stage
from millrace.workloads.recording import ADVISED_MIN

from services.coordinator.adopting import PAUSE_WINDOWS, LoadReplayed, over, shortfall
from services.coordinator.autopilot import ClusterChanged, SettingsApplied
from tests.unit.autopilot_rig import INTERVAL_S, Autopilot, S

FILE = """
[[models]]
name = "m"
path = "millrace-mini"
[policies.dispatch]
name = "round_robin"
"""
FORECAST, ROUND_ROBIN = "policies.dispatch.name=forecast", 'policies.dispatch.name="round_robin"'
BOUNDS = "coordinator.step_bounds={ttft_s=0.4,tpot_s=0.02}"
TAILS = ("ttft_p99", "tpot_p99", "e2e_p99")


def replayed(settings: str, beside: str, old: float = 1.0, now: float = 0.0, rate: float = 10.0) -> LoadReplayed:
    """A window.

    Args:
        settings: That are advised.
        beside: Settings whose replay has every tail ``old`` times as long as that of the present ones.
        now: Recorded tails; by default so that both comparisons say the same, -1 where nothing could be compared.
        rate: Of requests.
    """
    tails = now or 100 / old
    told = {each: dict.fromkeys(TAILS, by) | {"within": 0.0} for each, by in ((settings, 0.5), (beside, old))}
    return LoadReplayed(
        advice=Advice(settings=settings, evidence="because"),
        requests=ADVISED_MIN,
        cpu_s=1.0,
        recorded=dict.fromkeys(TAILS, tails) | {"within": 0.9, "rate": rate} if tails > 0 else {},
        missed=dict.fromkeys(TAILS, 1.0) | {"within": 0.0} if tails > 0 else {},
        told=told,
    )


class Adopting(Autopilot):
    """One that is on, or not, whose cluster has that file, and whose plan has what was adopted before."""

    def __init__(self, *, mode: str = "on", adopted: list[Adoption] | None = None, file: str = FILE) -> None:
        stage = Stage(name="s0", length_min=0, length_max=None, instances=["i"])
        found = Plan(model="m", epoch=1, stages=[stage], coordinator="c", advice=Advice(adopted=adopted or []))
        self.spec = parse_cluster(file)
        super().__init__(mode=mode, found=found)
        self.person()

    @property
    def adopted(self) -> list[Adoption]:
        return self.proposed[-1].adopted

    def person(self, *settings: str) -> None:
        """The cluster's file is read, with settings that a person applied."""
        self.spec = with_cluster_settings(self.spec, settings)
        self.hear(ClusterChanged(text=cluster_toml(self.spec)))

    def window(self, settings: str, **figures: float) -> str:
        """A window whose replay says that; returns what was replayed beside it."""
        replay = self.tick(seconds=INTERVAL_S, requests=ADVISED_MIN)
        assert replay is not None
        self.hear(replayed(settings, replay.beside, **figures))
        return replay.beside

    def carried_out(self, failed: str = "") -> None:
        """The last change is done; one that failed left the file as it was."""
        if not failed:
            self.person(*self.applied[-1].split())
        self.hear(SettingsApplied(failed=failed))

    def adopt(self, settings: str = FORECAST) -> None:
        self.window(settings)
        self.window(settings)
        self.carried_out()

    @property
    def phases(self) -> list[str]:
        return [str(each.phase) for each in self.adopted]


def test_what_two_windows_say_is_put_in_force_and_stands_in_the_plan() -> None:
    pilot = Adopting()
    assert "; what two replays advise is put in force; " in pilot.proposed[0].evidence
    pilot.window(FORECAST)
    assert not pilot.applied
    pilot.window(FORECAST)
    assert pilot.applied == [FORECAST]
    (adopted,) = pilot.adopted
    assert (adopted.settings, adopted.before, adopted.phase) == (FORECAST, ROUND_ROBIN, "switching")
    assert (adopted.evidence, adopted.missed["e2e_p99"]) == ("because", 1.0)
    pilot.carried_out()
    assert pilot.phases == ["watched"]


def test_only_on_adopts() -> None:
    pilot = Adopting(mode="advise")
    pilot.window(FORECAST)
    pilot.window(FORECAST)
    assert pilot.applied == []
    assert pilot.phases == []


def test_what_shows_live_is_kept_with_its_evidence() -> None:
    pilot = Adopting()
    pilot.adopt()
    assert pilot.window("", old=2.0) == ROUND_ROBIN
    assert (pilot.applied, pilot.phases) == ([FORECAST], ["kept"])
    evidence = pilot.adopted[0].evidence
    figures = "ttft_p99 -50%, tpot_p99 -50%, e2e_p99 -50%, within +0.0 points"
    assert f"live over a replay of the former settings: {figures}; over the window before: {figures}" in evidence
    assert evidence.endswith("because")


def test_what_only_one_of_two_comparisons_finds_worse_is_kept() -> None:
    """A replay does not know the instances that a rule leaves idle, and tails of two windows differ by chance."""
    for figures in ({"old": 0.5, "now": 90.0}, {"old": 2.0, "now": 200.0}):
        pilot = Adopting()
        pilot.adopt()
        pilot.window("", **figures)
        assert (pilot.applied, pilot.phases) == ([FORECAST], ["kept"])


def test_a_window_with_far_fewer_requests_takes_nothing_back() -> None:
    pilot = Adopting()
    pilot.adopt()
    pilot.window("", old=0.5, now=20.0, rate=7.0)
    assert pilot.phases == ["watched"]
    pilot.window("", old=0.5)
    assert pilot.phases == ["returning"]


def test_nothing_is_adopted_that_could_not_be_compared_with_what_was_before() -> None:
    pilot = Adopting()
    pilot.window(FORECAST, now=-1)
    pilot.window(FORECAST, now=-1)
    assert pilot.applied == []
    pilot.window(FORECAST)
    assert pilot.applied == [FORECAST]


def test_nothing_is_adopted_while_another_adoption_is_undecided() -> None:
    pilot = Adopting()
    pilot.window(FORECAST)
    pilot.window(FORECAST)
    pilot.window(BOUNDS)
    pilot.window(BOUNDS)
    assert pilot.applied == [FORECAST]
    pilot.carried_out()
    pilot.window("", old=2.0)
    pilot.window(BOUNDS)
    pilot.window(BOUNDS)
    assert pilot.applied == [FORECAST, BOUNDS]


def test_what_does_not_show_is_taken_back_and_left_alone_for_a_time_that_doubles() -> None:
    pilot = Adopting()
    pilot.adopt()
    waited = []
    for _ in range(3):
        pilot.window("", old=0.5)
        assert pilot.applied[-1] == ROUND_ROBIN
        pilot.carried_out()
        assert pilot.phases == ["returned"]
        assert "longer than before: ttft_p99, tpot_p99, e2e_p99; live" in pilot.adopted[0].evidence
        taken_back_ns = pilot.now_ns
        while pilot.applied[-1] == ROUND_ROBIN:
            pilot.window(FORECAST)
        waited.append(pilot.now_ns - taken_back_ns)
        pilot.carried_out()
    assert waited == [PAUSE_WINDOWS * INTERVAL_S * S * factor for factor in (1, 2, 4)]


def test_settings_under_which_nothing_is_served_are_taken_back() -> None:
    pilot = Adopting()
    pilot.adopt()
    pilot.window("", now=-1)
    assert (pilot.applied[-1], pilot.phases) == (ROUND_ROBIN, ["returning"])


def test_a_change_that_cannot_be_carried_out_is_taken_back_until_that_is_done() -> None:
    pilot = Adopting()
    pilot.window(FORECAST)
    pilot.window(FORECAST)
    pilot.hear(SettingsApplied(failed="ingress-1 does not start"))
    assert (pilot.applied, pilot.phases) == ([FORECAST, ROUND_ROBIN], ["returning"])
    assert "ingress-1 does not start" in pilot.adopted[0].evidence
    pilot.hear(SettingsApplied(failed="another `millrace apply` is under way"))
    pilot.window("")
    assert pilot.applied == [FORECAST, ROUND_ROBIN, ROUND_ROBIN]
    pilot.carried_out()
    assert pilot.phases == ["returned"]


def test_a_change_that_meets_a_persons_is_tried_again_after_the_next_window(tmp_path, capsys) -> None:
    pilot = Adopting()
    pilot.window(FORECAST)
    pilot.window(FORECAST)
    with open(tmp_path / "lock", "ab") as persons, open(tmp_path / "lock", "ab") as lock:
        take_turn(persons, person=True)
        with pytest.raises(CliError) as failure:
            take_turn(lock, person=False)
        fcntl.flock(persons, fcntl.LOCK_UN)
        take_turn(lock, person=False)
        take_turn(persons, person=True, sleep=lambda _: fcntl.flock(lock, fcntl.LOCK_UN))
        assert capsys.readouterr().out == "the autopilot is changing the cluster: waits for that, 600 s at most\n"
        fcntl.flock(persons, fcntl.LOCK_UN)
        take_turn(lock, person=False)
        with pytest.raises(CliError, match="not ended in 600 s"):
            take_turn(persons, person=True, sleep=lambda _: None)
    pilot.hear(SettingsApplied(failed=f"millrace apply: {failure.value}"))
    assert (pilot.applied, pilot.phases) == ([FORECAST], ["switching"])
    pilot.window("")
    assert pilot.applied == [FORECAST, FORECAST]
    pilot.carried_out()
    assert pilot.phases == ["watched"]


def test_a_person_who_applies_something_else_wins_for_good() -> None:
    pilot = Adopting()
    pilot.adopt()
    pilot.person("policies.dispatch.name=join_shortest_queue")
    assert pilot.phases == ["overruled"]
    for _ in range(3 * PAUSE_WINDOWS):
        pilot.window(FORECAST)
    assert pilot.applied == [FORECAST]


def test_a_person_who_applies_what_is_no_contradiction_leaves_an_adoption_in_force() -> None:
    pilot = Adopting()
    pilot.adopt()
    pilot.person("worker.max_num_seqs=8")
    assert pilot.phases == ["watched"]
    pilot.window("", old=0.5)
    pilot.carried_out()
    assert pilot.spec.settings.worker == {"max_num_seqs": 8}
    assert pilot.phases == ["returned"]


@pytest.mark.parametrize("phase", ["watched", "kept"])
def test_the_next_coordinator_knows_what_was_adopted(phase: str) -> None:
    before = Adopting()
    before.adopt()
    if phase == "kept":
        before.window("", old=2.0)
    after = Adopting(adopted=before.adopted, file=cluster_toml(before.spec))
    assert (after.applied, after.phases) == ([], [phase])
    if phase == "watched":
        assert after.window("", old=0.5) == ROUND_ROBIN
        assert after.applied == [ROUND_ROBIN]


@pytest.mark.parametrize("taken", [True, False], ids=["the file says it already", "the file does not say it yet"])
def test_the_next_coordinator_ends_a_switch_that_its_own_restart_interrupted(taken: bool) -> None:
    before = Adopting()
    before.window(FORECAST)
    before.window(FORECAST)
    file = cluster_toml(with_cluster_settings(before.spec, [FORECAST] if taken else []))
    after = Adopting(adopted=before.adopted, file=file)
    assert (after.applied, after.phases) == ([], ["switching"])
    after.window("")
    assert after.applied == [FORECAST]
    after.window("")
    assert after.applied == [FORECAST], "one change at a time"
    after.carried_out()
    assert after.phases == ["watched"]


def test_the_next_coordinator_obeys_a_person_who_applied_something_else_meanwhile() -> None:
    before = Adopting()
    before.adopt()
    after = Adopting(adopted=before.adopted)
    assert (after.applied, after.phases) == ([], ["overruled"])


def test_a_live_figure_is_free_of_the_load_and_of_what_replays_miss() -> None:
    """Twice the load: all tails are 3 times as long, and a replay of either settings has 0.8 of the recorded tail."""
    told = {"e2e_p99": 90 / 60, "within": 0.85 - 0.9}
    missed = {"e2e_p99": 0.8, "within": 0.02}
    live = over(over(missed, missed), told)
    assert live == {"e2e_p99": pytest.approx(60 / 90), "within": pytest.approx(0.05)}


@pytest.mark.parametrize(
    ("live", "why"),
    [
        ({"e2e_p99": 0.8, "within": 0.0}, ""),
        ({"e2e_p99": 1.1, "within": 0.03}, ""),
        ({"e2e_p99": 1.0, "within": 0.0}, "nothing is better than before"),
        ({"e2e_p99": 0.5, "ttft_p99": 1.3, "within": 0.1}, "longer than before: ttft_p99"),
        ({"e2e_p99": 0.5, "within": -0.03}, "fewer requests within the objectives than before"),
    ],
)
def test_an_adoption_shows_where_something_is_better_and_nothing_far_worse(live: dict[str, float], why: str) -> None:
    assert shortfall(live) == why


@pytest.mark.parametrize(
    ("settings", "present"),
    [
        (FORECAST, ROUND_ROBIN),
        (
            "policies.trading.name=delay policies.trading.parameters={}",
            'policies.trading.name="" policies.trading.parameters={}',
        ),
        (BOUNDS, "coordinator.step_bounds={}"),
    ],
)
def test_settings_that_take_others_back(settings: str, present: str) -> None:
    spec = parse_cluster(FILE)
    assert " ".join(present_settings(spec, settings.split())) == present
    changed = with_cluster_settings(spec, settings.split())
    again = with_cluster_settings(changed, present.split())
    assert present_settings(again, settings.split()) == present.split()

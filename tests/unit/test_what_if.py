"""Questions to a recording: step times fitted to it, changes of a cluster, comparisons, searches and reasons."""

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from millrace.actor.errors import ConfigError
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.spec import ClusterSpec, GroupSpec, ModelSpec
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.policies.objectives import Objectives
from millrace.workloads.recording import RequestServed, StepsComputed

from simulator.scenarios.cluster_file import cluster_tables
from simulator.scenarios.reading import ScenarioError, scenario_of
from simulator.whatif.advising import advice, better, candidates
from simulator.whatif.answering import Asked, ChangeAnswer, SearchGoal, greatest_rate, least_count, parse_goal
from simulator.whatif.changes import AskedChange, fragment, with_instances, with_setting
from simulator.whatif.figures import (
    LATENCIES,
    STATISTICS,
    ComparedFigure,
    ComparedShare,
    Latencies,
    compared,
    compared_shares,
    reason,
)
from simulator.whatif.replaying import LoadFile, Replayed
from simulator.whatif.step_fit import ComputedSteps, computed, fit, slowdown

S = 1_000_000_000
TRUE = LinearStepTime(fixed=5e6, per_decode=2e5, per_prefill_token=9e4, per_context_token=400.0, per_prompted_step=3e5)


def rows(rng: Random, *, slowed: float = 0.0, factor: float = 1.0) -> list[ComputedSteps]:
    """Intervals of an engine with these step times."""
    found = []
    for _ in range(120):
        steps, prompted = rng.randrange(60, 140), rng.randrange(0, 20)
        decodes, tokens, context = rng.randrange(100, 900), rng.randrange(20, 200), rng.randrange(10_000, 90_000)
        neighbours = rng.choice([0.0, 1.0])
        row = ComputedSteps(
            wall_ns=0.0,
            steps=steps,
            decodes=decodes,
            prefill_tokens=tokens * prompted,
            context_tokens=context,
            prompted=prompted,
            prefill_work=0.0,
            neighbours=neighbours,
        )
        wall_ns = TRUE.fixed * steps + TRUE.per_decode * decodes + TRUE.per_prefill_token * row.prefill_tokens
        wall_ns += TRUE.per_context_token * context + TRUE.per_prompted_step * prompted
        found.append(msgspec.structs.replace(row, wall_ns=factor * wall_ns * (1 + slowed * neighbours)))
    return found


@pytest.mark.parametrize("base", [None, TRUE])
def test_step_times_are_found_in_what_was_recorded(base: LinearStepTime | None) -> None:
    found = fit(rows(Random(1), factor=1.5), base, EngineParameters(), 0.0)
    for name in ("fixed", "per_decode", "per_prefill_token", "per_context_token"):
        assert getattr(found, name) == pytest.approx(1.5 * getattr(TRUE, name), rel=0.03)
    assert fit(rows(Random(1))[:5], base, EngineParameters(), 0.0) is base, "too few leave it as it is"


def test_a_neighbour_that_slows_the_engine_is_told_apart() -> None:
    found = rows(Random(2), slowed=0.3)
    assert slowdown(found) == pytest.approx(0.3)
    alone = fit(found, TRUE, EngineParameters(), 0.3)
    assert alone.fixed == pytest.approx(TRUE.fixed, rel=0.03)


def test_prompts_count_in_the_interval_of_their_first_token() -> None:
    steps = [
        StepsComputed(instance=name, at_ns=at * S, wall_ns=S // 2, steps=5, prefill_tokens=300)
        for at in (1, 2)
        for name in ("a", "b")
    ]
    request = RequestServed(number=0, at_ns=S, prompt=500, outputs=(1,), ttft_ns=S // 2, cached=200, instance="a")
    found = computed(steps, [request], {"a": "host", "b": "host"}, budget=256)
    assert [row.prefill_work for row in found["a"]] == [0.0, 300 * (200 + 150)]
    assert [row.prompted for row in found["a"]] == [2, 2]  # 300 tokens take two steps
    assert [row.neighbours for row in found["b"]] == [0.5, 0.5]


# Changes

SPEC = ClusterSpec(
    models=[
        ModelSpec(name="m", path="m", groups=[GroupSpec(count=2), GroupSpec(name="large", count=1)]),
        ModelSpec(name="n", path="n", groups=[GroupSpec(count=1, engine="modelled", step_time="a100-llama-3-8b")]),  # type: ignore[arg-type]
    ]
)


@pytest.mark.parametrize(("count", "sizes"), [(2, [1, 0, 1]), (3, [2, 0, 1]), (4, [2, 1, 1]), (6, [2, 1, 3])])
def test_instances_are_added_and_taken_from_the_end(count: int, sizes: list[int]) -> None:
    changed = with_instances(SPEC, count).spec
    assert [group.count for model in changed.models for group in model.groups] == sizes
    with pytest.raises(ConfigError, match="at least one for each model, 2"):
        with_instances(changed, 1)


def test_a_policy_that_there_is_not_is_refused_before_anything_is_replayed() -> None:
    spec = ClusterSpec(models=[ModelSpec(name="m", path="millrace-nano")])
    with pytest.raises(ConfigError, match="name: 'nope' is none of"):
        with_setting(spec, "policies.dispatch.name=nope")


def test_the_fragment_of_a_change_is_what_makes_it_as_it_was_asked_for() -> None:
    settings = ["policies.dispatch.name=round_robin", "worker.max_num_seqs=4", "models.0.groups.0.count=5"]
    changed = with_cluster_settings(SPEC, settings)
    lines = fragment(SPEC, AskedChange(label="of a file", spec=changed)).splitlines()
    assert sorted(lines) == [
        "models.0.groups.0.count=5",
        'policies.dispatch.name="round_robin"',
        "settings.worker.max_num_seqs=4",
    ]
    assert with_cluster_settings(SPEC, lines) == changed
    assert fragment(SPEC, AskedChange(label="set", spec=changed, settings=settings)).splitlines() == settings
    assert fragment(changed, AskedChange(label="set", spec=changed, settings=settings)) == ""


def tables_of(spec: ClusterSpec) -> dict[str, Any]:
    return cluster_tables(spec, lambda model, group: (EngineParameters(), "a100-llama-3-8b"))


def test_a_cluster_is_simulated_with_all_its_policies() -> None:
    settings = [
        "policies.stages.name=exact",
        "policies.trading.name=delay",
        "coordinator.step_bounds.tpot_s=0.02",
        "models.0.groups.1.role=decode",
        "broker.trading.reasons=['balance']",
    ]
    spec = scenario_of(tables_of(with_cluster_settings(SPEC, settings)))
    assert (spec.stages.policy, spec.trading.policy, spec.step_bounds.tpot_s) == ("exact", "delay", 0.02)
    assert spec.trading.reasons == ("balance",)
    assert spec.migration.instance_roles(spec.instances()) == {"large-0": "decode"}
    assert [group.names() for group in spec.cluster.groups] == [("worker-0", "worker-1"), ("large-0",), ("worker-2",)]


# Comparisons


def latencies(ttft: list[float], e2e: list[float], cached: float = 0.0) -> Latencies:
    values = np.array(ttft), np.array(e2e)
    return Latencies(
        ttft=values[0], tpot=(values[1] - values[0]) / 10, e2e=values[1], cached=np.full(len(ttft), cached)
    )


def replayed(*, batch: float = 2.0, waiting: float = 0.0, lost: int = 0, preemptions: int = 0) -> Replayed:
    return Replayed(finished={}, batch=batch, waiting=waiting, preemptions=preemptions, lost=lost)


def test_twice_as_long_is_a_ratio_of_two_with_no_width_and_what_one_side_lacks_is_left_out() -> None:
    rng = Random(3)
    ttft = [rng.uniform(1, 9) for _ in range(400)]
    before = latencies([*ttft, 99.0], [*(10 * each for each in ttft), float("nan")])
    after = latencies([*(2 * each for each in ttft), 1.0], [*(20 * each for each in ttft), 5.0])
    for figure in compared(before, after).values():
        assert (figure.ratio, figure.low, figure.high) == pytest.approx((2.0, 2.0, 2.0))


def test_an_interval_of_noise_has_one_within() -> None:
    rng = Random(4)
    one, other = (latencies([rng.uniform(1, 9) for _ in range(900)], [20.0] * 900) for _ in range(2))
    figure = compared(one, other)["ttft_p50"]
    assert figure.low < 1 < figure.high
    assert figure.high - figure.low < 0.4


#: Medians may differ all the same.
SAME = "times to the first token and per further token stay within 2 % on average"


@pytest.mark.parametrize(
    ("after", "now", "told"),
    [
        (([10.0] * 4, [60.0] * 4), replayed(), f"{SAME}."),
        (
            ([10.0, 10.0, 20.0, 20.0], [60.0, 60.0, 70.0, 70.0]),
            replayed(waiting=3.0),
            "first tokens of prompts over 50 tokens come 100% later, of shorter ones come as before: "
            "queues hold 3.0 requests on average (0.0 before).",
        ),
        (
            ([5.0] * 4, [30.0] * 4),
            replayed(batch=1.0),
            "first tokens come 50% earlier on average, whatever the prompt and further tokens come 50% faster: "
            "batches of 1.0 requests (2.0 before).",
        ),
        (([10.0] * 4, [60.0] * 4), replayed(lost=3), f"{SAME}; 3 more requests are not served."),
    ],
)
def test_the_reason_says_who_waits_and_why(after: tuple[list[float], list[float]], now: Replayed, told: str) -> None:
    prompts = np.array([10.0, 10.0, 90.0, 100.0])
    text = reason(prompts, latencies([10.0] * 4, [60.0] * 4), latencies(*after), (replayed(), now))
    assert text == told


# Advice

NAMES = [f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS]


def answer(
    *, label: str = "x=1", before: float = 0.5, share: tuple[float, float] = (0.1, 0.3), lost: int = 0, **ratios: float
) -> ChangeAnswer:
    """Of a change with this interval of its gain, and figures with these ratios, each 3 % wide at both sides."""
    figures = {
        name: ComparedFigure(before=10.0, after=10.0 * ratio, ratio=ratio, low=ratio - 0.03, high=ratio + 0.03)
        for name, ratio in {**dict.fromkeys(NAMES, 1.0), **ratios}.items()
    }
    within = ComparedShare(before=before, after=before + sum(share) / 2, low=share[0], high=share[1])
    return ChangeAnswer(label=label, figures=figures, within=within, reason="Why.", fragment="x = 1", lost=lost)


def tied(**ratios: float) -> ChangeAnswer:
    """All requests are within the objectives already."""
    return answer(before=1.0, share=(0.0, 0.0), **ratios)


SHARE, TAIL = "the share within the objectives decides", "E2E p99 decides"


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        (answer(), SHARE),
        (answer(ttft_p50=1.5, e2e_mean=1.02, e2e_p99=1.03), SHARE),  # medians do not count, the others are noise
        (answer(share=(-0.01, 0.3)), ""),
        (answer(share=(0.0, 0.0), e2e_p99=0.3), ""),  # half of the requests are late with and without
        *((answer(**{name: 1.05}), "") for name in ("ttft_mean", "ttft_p99", "tpot_p99", "e2e_mean", "e2e_p99")),
        (answer(before=0.992, share=(0.004, 0.01), e2e_p99=0.5), SHARE),
        (tied(), ""),
        (tied(e2e_p99=0.85), TAIL),
        (tied(e2e_p99=0.85, tpot_p50=1.05), TAIL),
        (tied(e2e_p99=0.88), ""),  # within its interval it may be less than 10 %
        (tied(ttft_p99=0.3, tpot_p99=0.3, e2e_mean=0.3), ""),  # the whole is no shorter
        (tied(e2e_p99=0.3, ttft_mean=1.05), ""),  # new requests pay
        (answer(before=1.0, share=(-0.006, -0.002), e2e_p99=0.5), TAIL),
        (answer(before=1.0, share=(-0.009, -0.003), e2e_p99=0.5), ""),  # some requests become late
        (answer(before=0.98, share=(0.0, 0.0), e2e_p99=0.5), ""),
        (answer(before=0.999, share=(-0.05, 0.01), e2e_p99=0.5), ""),  # 97.9 % are left
    ],
)
def test_share_or_tail_decides_beyond_the_noise_and_nothing_that_counts_is_worse(
    change: ChangeAnswer, decides: str
) -> None:
    assert better(change) == decides


OBJECTIVES = Objectives(ttft_ms=200.0, tpot_ms=20.0, source="a test")


def reproduced(**ratios: float) -> dict[str, ComparedFigure]:
    """Fidelity of a replay with these ratios; of all other figures 1."""
    return answer(**ratios).figures


def advised(
    *answers: ChangeAnswer, fidelity: dict[str, ComparedFigure] | None = None, share: ComparedShare | None = None
) -> tuple[str, str]:
    """Settings and evidence, of a replay of enough requests; ``fidelity``, ``share``: of the unchanged cluster."""
    question = Asked(
        fitted=None,  # type: ignore[arg-type]
        file=LoadFile(path="load.jsonl", count=900, span_s=90.0, expected=True, shares=False),
        prompts=[],
        base=replayed(),
        fidelity=fidelity or {},
        share=share,
        objectives=OBJECTIVES,
    )
    found = advice(question, answers)
    return found.settings, found.evidence


def test_the_evidence_says_what_decided() -> None:
    tails = "TTFT p99 +0%, TPOT p99 +0%, E2E p99"
    share = "70.0% instead of 50.0% of requests within TTFT 200 ms and TPOT 20 ms"
    assert advised(answer()) == ("x=1", f"{SHARE}: {share}; {tails} +0%; Why.")
    share = "100.0% instead of 100.0% of requests within TTFT 200 ms and TPOT 20 ms"
    assert advised(tied(e2e_p99=0.32)) == ("x=1", f"{TAIL}: {share}; {tails} -68%; Why.")
    nothing = "none of 2 other settings is better in all that counts"
    assert advised(tied(), answer(lost=1)) == ("", f"{nothing}; objectives: TTFT 200 ms and TPOT 20 ms (a test)")


def test_no_tail_is_advised_that_the_replay_of_the_unchanged_cluster_does_not_reproduce() -> None:
    change, p99 = tied(e2e_p99=0.32), "replayed p99 over the recorded: TTFT 1.00, TPOT 1.00, E2E"
    settings, evidence = advised(change, fidelity=reproduced(e2e_p99=1.08))
    assert settings == "x=1"
    assert f"; {p99} 1.08; " in evidence
    for off in (1.28, 0.8):
        settings, evidence = advised(change, fidelity=reproduced(e2e_p99=off))
        assert settings == ""
        assert evidence == (
            "none of 1 other settings is better in all that counts; "
            f"x=1: {TAIL}, but the replay does not reproduce what happened: {p99} {off:.2f}; "
            "objectives: TTFT 200 ms and TPOT 20 ms (a test)"
        )
    assert advised(answer(), fidelity=reproduced(e2e_p99=1.28))[0] == "x=1"  # the share decides


def test_no_share_is_advised_whose_gain_is_within_what_the_replay_is_wrong_by() -> None:
    def now(after: float) -> ComparedShare:
        return ComparedShare(before=0.5, after=after, low=0.0, high=0.0)

    change = answer()  # 20 points
    assert advised(change, fidelity=reproduced(), share=now(0.65))[0] == "x=1"
    settings, evidence = advised(change, fidelity=reproduced(), share=now(0.75))
    assert settings == ""
    assert f"x=1: {SHARE}, but the replay does not reproduce what happened" in evidence
    assert "75.0% within the objectives where 50.0% were" in evidence


def test_the_largest_share_wins_and_among_full_ones_the_shortest_tail() -> None:
    shares = [answer(label=f"x={gain}", share=(gain - 0.1, gain + 0.1)) for gain in (0.2, 0.4, 0.3)]
    assert advised(*shares)[0] == "x=0.4"
    tails = ((0.8, 0.0), (0.3, -0.004), (0.5, -0.002))
    full = [answer(label=f"x={tail}", before=1.0, share=(lost, 0.0), e2e_p99=tail) for tail, lost in tails]
    assert advised(*full)[0] == "x=0.3"


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        (
            [],
            [
                "policies.dispatch.name=join_shortest_queue",
                "policies.trading.name=delay",
                "coordinator.step_bounds={ttft_s=0.2,tpot_s=0.02}",
            ],
        ),
        (
            [
                "policies.dispatch.name=round_robin",
                "policies.trading.name=delay",
                "policies.trading.parameters.excess=0.5",
                "coordinator.step_bounds.tpot_s=0.03",
                "policies.stages.name=exact",
            ],
            [
                "policies.dispatch.name=forecast",
                "policies.trading.name=none policies.trading.parameters={}",
                "coordinator.step_bounds.tpot_s=0",
                "policies.stages.name=one_stage",
            ],
        ),
        (
            ["models.0.groups.0.count=4", "services.migrators=false"],
            [
                "policies.dispatch.name=join_shortest_queue",
                "coordinator.step_bounds={ttft_s=0.2,tpot_s=0.02}",
                "policies.stages.name=exact policies.stages.parameters={margin=0.25,bounds={ttft_ms=200,tpot_ms=20}}",
            ],
        ),
    ],
)
def test_each_mechanism_is_tried_the_other_way(settings: list[str], tried: list[str]) -> None:
    shipped = ["models.0.path=millrace-mini", "models.1.path=millrace-nano"]
    spec = with_cluster_settings(SPEC, [*shipped, *settings])
    found = candidates(spec, OBJECTIVES)
    assert [each.label for each in found] == tried
    for each in found:
        scenario_of(tables_of(each.spec))


def test_requests_that_did_not_complete_are_not_within_the_objectives() -> None:
    before = latencies([100.0] * 10, [250.0] * 9 + [float("nan")])
    after = latencies([100.0] * 8 + [300.0] * 2, [250.0] * 10)
    share = compared_shares(before, after, OBJECTIVES)
    assert (share.before, share.after) == (0.9, 0.8)
    assert share.low < share.high


@pytest.mark.parametrize(("span_s", "period_s"), [(10.0, 1.0), (100.0, 5.0), (3600.0, 30.0)])
def test_stages_are_planned_often_enough_to_show_in_a_short_replay(span_s: float, period_s: float) -> None:
    file = LoadFile(path="load.jsonl", count=9, span_s=span_s, expected=True, shares=True)
    assert file.scenario(tables_of(SPEC)).stages.period_s == period_s


# Searches


def test_goals_are_read_wrong_ones_refused_and_each_needs_every_request_served() -> None:
    assert parse_goal("ttft_p99<1s") == SearchGoal(latency="ttft", quantile=0.99, bound_ms=1000.0)
    assert parse_goal("tpot_p50 < 20ms").bound_ms == 20.0
    for wrong in ("ttft<1s", "ttft_p99>1s", "ttft_p99<1", "ttft_p100<1s", "load_p50<1s"):
        with pytest.raises(ScenarioError, match="--goal"):
            parse_goal(wrong)
    goal = parse_goal("e2e_p50<1s")
    fast = latencies([1.0], [9.0])
    assert goal.holds(fast, replayed())
    assert not goal.holds(fast, replayed(lost=1))
    assert not goal.holds(msgspec.structs.replace(fast, e2e=np.array([1001.0])), replayed())


@pytest.mark.parametrize("needed", [1, 2, 7, 8, 9, 100])
def test_the_smallest_count_is_found_from_any_beginning(needed: int) -> None:
    assert least_count(lambda count: count >= needed, 1, 8) == needed
    assert least_count(lambda count: False, 1, 2) is None


@pytest.mark.parametrize("limit", [0.0, 0.1, 1.0, 3.3, 11.0])
def test_the_largest_rate_is_found(limit: float) -> None:
    assert greatest_rate(lambda rate: rate <= limit) == pytest.approx(limit, rel=0.06)

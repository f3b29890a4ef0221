"""Scenario files: what is refused and how it is named; and rates over time in their pictures."""

from pathlib import Path

import numpy as np
import pytest
from millrace.actor.errors import ConfigError
from millrace.actor.settings import with_settings
from millrace.workloads.arrivals import FromTrace
from millrace.workloads.shape import Arrival, RequestShape, WorkloadError

from simulator.scenarios.load import arrivals, call_of, cut, find, prompt_token_ids
from simulator.scenarios.observer import EngineSample, FinishedRequest
from simulator.scenarios.plots import _Grid
from simulator.scenarios.reading import ScenarioError, read_scenario, scenario_of
from simulator.scenarios.spec import SloSpec, TraceRows, WorkloadSpec
from simulator.scenarios.statistics import within

EXAMPLES = Path(__file__).parents[2] / "examples" / "scenarios"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_can_be_read(path: Path) -> None:
    assert read_scenario(path).name


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"sede": 1}, "sede"),
        ({"cluster": {"groups": []}}, "cluster.groups: at least one"),
        ({"workload": {"count": 5, "residents": 5}}, "workload.residents"),
        ({"migration": {"instances_each": 0}}, "migration.instances_each"),
        ({"cluster": {"groups": [{"name": "a"}, {"name": "a"}]}}, "a name of its own"),
        ({"cluster": {"groups": [{"name": "a b"}]}}, "a name of its own"),
        ({"cluster": {"groups": [{"instances": 0}]}}, "Expected `int` >= 1 .*instances"),
        ({"cluster": {"groups": [{"engine": {"block_size": 0}}]}}, "block_size must be at least 1"),
        ({"dispatch": {"policy": "nearest"}}, "dispatch.policy: 'nearest' is none of"),
        ({"dispatch": {"policy": "random", "parameters": {"luck": 1}}}, "luck"),
        ({"extension": "absent.py"}, r"extension: .*absent\.py: no such file"),
        ({"workload": {"arrivals": {"kind": "tides"}}}, "tides"),
        ({"workload": {"arrivals": {"kind": "poisson", "rate_per_s": -1}}}, "rate_per_s must be above 0"),
        ({"workload": {"count": 5, "warm_up": 5}}, "warm_up"),
        ({"workload": {"models": {"medium": {}}}}, "workload.models: each must be the model of a group"),
        ({"workload": {"models": {"modelled": {"share": 0.0}}}}, "one share at least must be above 0"),
        ({"workload": {"models": {"modelled": {"output_scale": 0.0}}}}, "output_scale"),
        ({"provisioning": {"strategy": "preemt"}}, "one of none, preempt, relief"),
        ({"provisioning": {"strategy": "relief", "parameters": {"treshold_s": 1}}}, "treshold_s"),
        ({"intervals": {"summary_ms": 900}}, "Expected `int` <= 500 .*summary_ms"),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, object], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        scenario_of(table, source="file.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 1")
    for path in (broken, tmp_path / "missing.toml"):
        with pytest.raises(ScenarioError, match=path.name):
            read_scenario(path)


@pytest.mark.parametrize("setting", ["seed", "=3", "cluster.groups.4.instances=1", "seed.deeper=2"])
def test_a_setting_that_leads_nowhere_is_refused(setting: str) -> None:
    table = {"seed": 1, "cluster": {"groups": [{}]}}
    with pytest.raises(ConfigError, match="--set"):
        with_settings(table, [setting])


# Load


def trace(path: Path, rows: str) -> WorkloadSpec:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    source = TraceRows(path=path.name, format="azure", total_max=100)
    return WorkloadSpec(arrivals=FromTrace(speed=2.0), lengths=source, count=2)


def test_a_trace_keeps_its_times_at_its_speed(tmp_path: Path) -> None:
    spec = trace(tmp_path / "t.csv", "2023-11-16 18:15:00,5,9\n2023-11-16 18:15:08,90,30\n2023-11-16 18:15:09,1,1\n")
    load = arrivals(spec, seed=0, folders=(tmp_path,))
    assert [arrival.at_ns for arrival in load] == [0, 4_000_000_000]
    assert load[1].shape == RequestShape(70, 30)


def test_a_trace_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the trace has 1 rows, 2 are asked for"):
        arrivals(trace(tmp_path / "t.csv", "2023-11-16 18:15:00,5,9\n"), seed=0, folders=(tmp_path,))


def test_times_of_a_distribution_cannot_be_asked_for() -> None:
    with pytest.raises(WorkloadError, match="no trace that has times"):
        arrivals(WorkloadSpec(arrivals=FromTrace()), seed=0, folders=())


def test_a_trace_is_looked_for_in_each_folder_and_named_where_it_is_in_none(tmp_path: Path) -> None:
    (tmp_path / "here.csv").write_text("")
    assert find("here.csv", (tmp_path / "no", tmp_path)) == tmp_path / "here.csv"
    with pytest.raises(WorkloadError, match=r"there.csv: is not there; looked for"):
        find("there.csv", (tmp_path,))


def test_residents_arrive_at_once_and_are_on_their_way() -> None:
    spec = WorkloadSpec(count=900, residents=400)
    load = arrivals(spec, seed=1, folders=())
    residents, others = load[:400], load[400:]
    assert len(load) == 900
    assert {each.at_ns for each in residents} == {0}
    assert others[0].at_ns > 0
    prompts = sum(each.shape.prompt_tokens for each in residents) / len(residents)
    rests = sum(each.shape.output_tokens for each in residents) / len(residents)
    # Half of the mean of lengths drawn by length: 200 exp(0.8 ** 2) / 2.
    assert rests == pytest.approx(190, rel=0.2)
    assert prompts > sum(each.shape.prompt_tokens for each in others) / len(others)


def test_prompts_share_exactly_the_prefixes_of_their_shapes() -> None:
    a, b = RequestShape(1000, 1, (7, 8), 512), RequestShape(1024, 1, (7, 9), 512)
    first, second = prompt_token_ids(0, a), prompt_token_ids(1, b)
    assert (len(first), len(second)) == (1000, 1024)
    assert first[:512] == second[:512]
    assert first[512] != second[512]
    assert prompt_token_ids(1, RequestShape(3, 1))[0] != prompt_token_ids(2, RequestShape(3, 1))[0]


def test_a_cut_prompt_keeps_only_the_prefix_that_is_left() -> None:
    shape = RequestShape(1500, 10, (1, 2, 3), 512)
    kept = cut(shape, TraceRows(path="x", format="mooncake", prompt_max=600))
    assert kept == RequestShape(600, 10, (1, 2), 512)
    assert cut(shape, TraceRows(path="x", format="mooncake", prefixes=False)).prefix == ()


def test_a_call_asks_for_what_the_model_has_room_for() -> None:
    call = call_of(4, Arrival(0, RequestShape(30, 9)), model="m", max_model_len=100, output_limit=0)
    assert (call.request, len(call.prompts[0]), call.sampling.max_tokens) == ("r4", 30, 70)
    assert (
        call_of(4, Arrival(0, RequestShape(30, 9)), model="m", max_model_len=100, output_limit=20).sampling.max_tokens
        == 20
    )


# Statistics


def finished(ttft_ms: float, e2e_ms: float, output_tokens: int = 11) -> FinishedRequest:
    return FinishedRequest(
        0, "completed", 0, int(ttft_ms * 1e6), int(e2e_ms * 1e6), 1, output_tokens, 0, 0, -1.0, -1, -1, "a"
    )


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (SloSpec(ttft_ms=0), True),
        (SloSpec(ttft_ms=100), True),
        (SloSpec(ttft_ms=99), False),
        (SloSpec(ttft_ms=0, tpot_ms=10), True),
        (SloSpec(ttft_ms=0, tpot_ms=9), False),
        (SloSpec(ttft_ms=100, tpot_ms=10, e2e_ms=199), False),
    ],
)
def test_goodput_counts_what_kept_every_bound(slo: SloSpec, good: bool) -> None:
    assert within(finished(100, 200), slo) is good


def sample(at_s: float, tokens: int, instance: str = "gpu-0") -> EngineSample:
    return EngineSample(
        at_ns=int(at_s * 1_000_000_000),
        instance=instance,
        running=1,
        waiting=0,
        blocks_used=1,
        blocks_total=10,
        preemptions=0,
        output_tokens_total=tokens,
    )


def test_an_even_growth_is_an_even_rate_whatever_the_time_between_samples() -> None:
    grid = _Grid.of([sample(at_s, 100 * at_s, name) for at_s in range(48) for name in ("gpu-0", "gpu-1")])
    assert np.allclose(grid.rate("output_tokens_total"), 200.0)


def test_a_restarted_instance_has_no_negative_rate() -> None:
    grid = _Grid.of([sample(at_s, 100 * at_s if at_s < 20 else 100 * (at_s - 20)) for at_s in range(40)])
    assert grid.rate("output_tokens_total").min() >= 0.0

"""Questions to a load whose cluster is known: the replay is right, and so are the changes that it tells of."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import parse_cluster
from millrace.cluster.workers import workers_of
from millrace.contracts.scheduler import scheduler_fields
from millrace.enginemodel import coefficients
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime, StepTimeModel
from millrace.workloads.recording import (
    InstanceSeen,
    RecordingBegan,
    RecordingRow,
    RequestServed,
    read_recording,
    write_recording,
)

from simulator.__main__ import main
from simulator.scenarios.cluster_file import cluster_tables
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from simulator.whatif.answering import asked
from simulator.whatif.changes import recorded_cluster
from tests.testbed.messages import plain_record

CLUSTER = """
[[models]]
name = "mini"
path = "millrace-mini"
[[models.groups]]
count = 3
engine = "modelled"
"""
COUNT = 220
ENGINE = EngineParameters(max_sequences=16, blocks_total=2000, max_model_len=2048)


def slower(name: str) -> StepTimeModel:
    """The engines of this cluster take a multiple of what their set says: the recording has to tell."""
    name, _, factor = name.partition(" ")
    model = load_step_time(name)
    assert isinstance(model, LinearStepTime)
    return model.times(float(factor or 1))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(CLUSTER, {"worker": 2.0}, tmp_path_factory.mktemp("recorded") / "load.jsonl.gz")


def recorded(
    cluster: str,
    factors: Mapping[str, float],
    path: Path,
    *,
    engine: EngineParameters = ENGINE,
    rate_per_s: float = 12.0,
) -> Path:
    """Requests as a simulated cluster served them; ``factors``: step times over those that a group names."""
    spec = with_model_folders(parse_cluster(cluster))
    tables = cluster_tables(spec, lambda model, group: (engine, f"cpu-8m {factors[group.name]}"))
    named = spec.models[0].groups[0].step_time or "cpu-8m"
    for group in tables["cluster"]["groups"]:
        group["told_step_time"] = named
    lengths = {"kind": "log_normal", "prompt_mean": 150, "output_mean": 60, "prompt_sigma": 0.7, "output_sigma": 0.5}
    arrivals = {"kind": "poisson", "rate_per_s": rate_per_s}
    workload = {"count": COUNT, "arrivals": arrivals, "lengths": lengths, "output_limit": 400}
    intervals = {"status_ms": 25, "summary_ms": 25}
    outcome = run_scenario(scenario_of({**tables, "workload": workload, "intervals": intervals}), step_times=slower)
    rows: list[RecordingRow] = [RecordingBegan(run=1, cluster=cluster)]
    for name in (name for slot in workers_of(spec) for name in slot.instances):
        record = plain_record(name, model="mini", step_time=named, **scheduler_fields(engine))
        rows.append(InstanceSeen(record=record))
    rows += [
        RequestServed(
            number=each.number,
            at_ns=10**18 + each.arrival_ns,
            prompt=each.prompt_tokens,
            outputs=(each.output_tokens,),
            model="mini",
            max_tokens=400,
            ttft_ns=each.ttft_ns,
            e2e_ns=each.e2e_ns,
            expected=float(each.output_tokens),
            instance=each.instance,
            policy=spec.policies.dispatch.name or "forecast",
        )
        for each in outcome.finished
    ]
    write_recording(path, rows)
    return path


@pytest.mark.parametrize("policy", ["round_robin", "forecast"])
def test_groups_of_unequal_machines_that_name_one_file_are_told_apart(policy: str, tmp_path: Path) -> None:
    """Two fast instances and a slow one. Forecasts begin from what the instances name, live and in the replay."""
    file = tmp_path / "own.toml"
    file.write_text("per_tail_token = 1.0\n" + (Path(coefficients.__file__).parent / "cpu-8m.toml").read_text())
    cluster = CLUSTER.replace("count = 3", f'name = "fast"\ncount = 2\nstep_time = "{file}"')
    cluster += f'[[models.groups]]\nname = "slow"\nengine = "modelled"\nstep_time = "{file}"\n'
    cluster += f'[policies.dispatch]\nname = "{policy}"\n'
    path = recorded(cluster, {"fast": 1.0, "slow": 3.0}, tmp_path / "load.jsonl")
    load = msgspec.structs.replace(read_recording(path), lead=20)
    question = asked(load, recorded_cluster(load), tmp_path)
    assert len(question.latencies(question.base).e2e) == len(question.prompts) == question.count == COUNT - 20
    fast, slow = (question.fitted.models[f"mini/{number}"] for number in (0, 1))
    assert isinstance(fast, LinearStepTime)
    assert isinstance(slow, LinearStepTime)
    assert slow.fixed / fast.fixed == pytest.approx(3.0, rel=0.1)
    assert fast.per_tail_token > 0.5
    for name in ("ttft_p50", "tpot_p50", "e2e_p50", "tpot_p99", "e2e_p99"):
        assert question.fidelity[name].ratio == pytest.approx(1.0, abs=0.1), name


def test_the_unchanged_cluster_comes_out_as_it_was_and_fewer_instances_are_slower(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "answer.json"
    words = ["--instances", "1", "--set", "worker.max_num_seqs=1", "--jobs", "1"]
    assert main(["what-if", "--file", str(recording), *words, "--output", str(output)]) == 0
    answer = msgspec.json.decode(output.read_bytes())
    for name in ("ttft_p50", "tpot_p50", "e2e_p50"):
        assert answer["fidelity"][name]["ratio"] == pytest.approx(1.0, abs=0.1), name
    alone, one_by_one = (each["figures"] for each in answer["changes"][::-1])
    assert alone["tpot_p50"]["low"] > 1.3
    assert one_by_one["ttft_p99"]["low"] > 2
    text = capsys.readouterr().out
    assert "1 instances: first tokens" in text
    assert "millrace apply --set models.0.groups.0.count=1" in text
    assert "queues hold" in text


def test_first_tokens_that_came_seconds_late_are_not_taken_for_slow_messages(recording: Path, tmp_path: Path) -> None:
    late_ns = 20 * 10**9
    load = read_recording(recording)
    rows = [
        msgspec.structs.replace(r, ttft_ns=r.ttft_ns + late_ns, e2e_ns=r.e2e_ns + late_ns) for _, r in load.requests
    ]
    seen = [InstanceSeen(record=record) for record in load.instances.values()]
    path, output = tmp_path / "late.jsonl.gz", tmp_path / "answer.json"
    write_recording(path, [RecordingBegan(run=1, cluster=CLUSTER), *seen, *rows])
    assert main(["what-if", "--file", str(path), "--instances", "2", "--jobs", "1", "--output", str(output)]) == 0
    answer = msgspec.json.decode(output.read_bytes())
    assert answer["changes"][0]["lost"] == 0
    assert answer["fidelity"]["ttft_p50"]["ratio"] < 0.1  # it says that the replay is not what happened


def test_who_waits_past_the_knee_waits_in_the_replay_too(tmp_path: Path) -> None:
    load = read_recording(recorded(CLUSTER, {"worker": 1.3}, tmp_path / "load.jsonl", rate_per_s=90.0))
    question = asked(load, recorded_cluster(load), tmp_path)
    assert question.fitted.worker_us == 0
    assert question.fidelity["ttft_p50"].ratio == pytest.approx(1.0, abs=0.1)


def test_the_rule_that_a_load_wants_is_advised(tmp_path: Path) -> None:
    """Round robin puts a request behind long ones while another instance is free."""
    cluster = CLUSTER + '[settings.worker]\nmax_num_seqs = 2\n[policies.dispatch]\nname = "round_robin"\n'
    narrow, output = msgspec.structs.replace(ENGINE, max_sequences=2), tmp_path / "answer.json"
    path = recorded(cluster, {"worker": 2.0}, tmp_path / "load.jsonl", engine=narrow, rate_per_s=5.0)
    assert main(["what-if", "--file", str(path), "--advise", "--jobs", "1", "--output", str(output)]) == 0
    answer = msgspec.json.decode(output.read_bytes())
    assert answer["advice"]["settings"] == "policies.dispatch.name=forecast"
    (advised,) = (each for each in answer["changes"] if each["label"] == answer["advice"]["settings"])
    assert advised["within"]["low"] > 0
    assert f"{advised['within']['after']:.1%} instead of" in answer["advice"]["evidence"]


def test_a_light_load_is_advised_nothing(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "answer.json"
    words = ["what-if", "--file", str(recording), "--advise", "--jobs", "1", "--output", str(output)]
    assert main(words) == 0
    answer = msgspec.json.decode(output.read_bytes())
    assert len(answer["changes"]) == 3
    assert answer["advice"]["settings"] == ""
    assert "none of 3 other settings is better" in capsys.readouterr().out
    assert main([*words, "--most", "50"]) == 0
    assert "fewer than 200 requests" in capsys.readouterr().out


def test_a_load_without_a_cluster_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "imported.jsonl"
    write_recording(path, [RequestServed(number=n, at_ns=n * 10**8, prompt=9, outputs=(5,)) for n in range(20)])
    assert main(["what-if", "--file", str(path)]) == 1
    assert "name one with --cluster FILE" in capsys.readouterr().err
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    words = ["what-if", "--file", str(path), "--cluster", str(tmp_path / "cluster.toml"), "--rate", "x2", "--jobs", "1"]
    assert main([*words, "--goal", "e2e_p99<100s"]) == 0
    text = capsys.readouterr().out
    assert "unchanged, 2 x the rate" in text
    assert "1 instances keep it, fewer do not" in text
    assert main([*words[:-4], "--rate", "max", "--goal", "e2e_p99<100s"]) == 0
    assert "times the recorded rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--rate", "max"], "--rate max needs a --goal"),
        (["--rate", "slow"], "must be like x1.5"),
        (["--set", "policies.dispatch.nam=x"], "did you mean"),
    ],
)
def test_a_wrong_question_is_one_sentence(
    recording: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", "--file", str(recording), *words]) in (1, 2)
    assert complaint in capsys.readouterr().err

"""Workloads: arrivals, lengths, and traces that are refused with file and line."""

import json
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest
from millrace.workloads.arrivals import Even, Gamma, Poisson, Process
from millrace.workloads.lengths import FittedLengths, LogNormalLengths, RowLengths, fitted_names, load_fitted
from millrace.workloads.readers import azure, mooncake, servegen, sharegpt
from millrace.workloads.shape import RequestShape, WorkloadError


def pauses(process: Process, count: int = 20_000) -> list[float]:
    times = list(islice(process.times_ns(Random(1)), count))
    assert times == sorted(times)
    return [(b - a) / 1e9 for a, b in pairwise(times)]


@pytest.mark.parametrize(
    ("process", "cv"),
    [(Poisson(rate_per_s=8), 1.0), (Gamma(rate_per_s=8, cv=3.0), 3.0), (Gamma(rate_per_s=8, cv=0.3), 0.3)],
)
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(process: Process, cv: float) -> None:
    known = pauses(process)
    assert mean(known) == pytest.approx(1 / 8, rel=0.08)
    assert pstdev(known) / mean(known) == pytest.approx(cv, rel=0.1)


def test_even_arrivals_are_even() -> None:
    assert set(pauses(Even(rate_per_s=4), 100)) == {0.25}


@pytest.mark.parametrize("build", [Poisson, Even, lambda rate_per_s: Gamma(rate_per_s=1, cv=rate_per_s)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_rate_or_cv_that_is_no_positive_number_is_refused(build, value: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        build(rate_per_s=value)


def test_log_normal_lengths_have_their_means_and_bounds() -> None:
    lengths = LogNormalLengths(prompt_mean=300, output_mean=100, prompt_sigma=1.0, output_sigma=0.5, prompt_max=2000)
    rng = Random(2)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert mean(shape.output_tokens for shape in drawn) == pytest.approx(100, rel=0.03)
    assert max(shape.prompt_tokens for shape in drawn) == 2000


def test_fitted_lengths_follow_their_quantiles_and_correlation() -> None:
    lengths = FittedLengths(
        source="made up",
        error="none",
        shares=(0.0, 0.5, 0.9, 1.0),
        prompt_tokens=(1, 40, 400, 4000),
        output_tokens=(1, 100, 500, 600),
        correlation=0.9,
    )
    rng = Random(3)
    drawn = [lengths.draw(rng) for _ in range(8000)]
    prompts = sorted(shape.prompt_tokens for shape in drawn)
    assert prompts[4000] == pytest.approx(40, rel=0.1)
    assert prompts[7200] == pytest.approx(400, rel=0.1)
    assert 1 <= prompts[0] <= prompts[-1] <= 4000
    long = [shape.output_tokens for shape in drawn if shape.prompt_tokens > 400]
    assert mean(long) > 400 > 2 * mean(shape.output_tokens for shape in drawn if shape.prompt_tokens < 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shares": (0.0, 0.5)},
        {"prompt_tokens": (1, 3, 2)},
        {"output_tokens": (1, 2)},
        {"prompt_tokens": (0, 1, 2)},
        {"correlation": 1.5},
    ],
)
def test_quantiles_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    right = {"shares": (0.0, 0.5, 1.0), "prompt_tokens": (1, 2, 3), "output_tokens": (1, 2, 3), "correlation": 0.0}
    with pytest.raises(ValueError):
        FittedLengths(source="", error="", **{**right, **wrong})


def test_every_set_that_ships_can_be_read_and_says_where_it_is_from() -> None:
    assert fitted_names()
    for name in fitted_names():
        fitted = load_fitted(name)
        assert fitted.source
        assert fitted.error
        assert fitted.draw(Random(0)).prompt_tokens >= 1


def test_an_unknown_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(WorkloadError, match="sharegpt"):
        load_fitted("nothing")


def test_rows_come_in_order_and_over_again_or_shuffled() -> None:
    rows = [RequestShape(1, 1), RequestShape(2, 2)]
    in_order = RowLengths(rows)
    assert [in_order.draw(Random(0)).prompt_tokens for _ in range(5)] == [1, 2, 1, 2, 1]
    shuffled, rng = RowLengths(rows, shuffle=True), Random(0)
    assert {shuffled.draw(rng).prompt_tokens for _ in range(30)} == {1, 2}


# Readers


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_azure_rows_have_lengths_and_times_from_the_first_row(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    first, second = azure.read(path)
    assert (first.at_ns, first.shape) == (0, RequestShape(374, 44))
    assert (second.at_ns, second.shape) == (4_314_579_000, RequestShape(396, 109))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("TIMESTAMP,ContextTokens\n", r"trace.csv:1: the column GeneratedTokens is missing"),
        ("", r"trace.csv:1: the column TIMESTAMP, ContextTokens, GeneratedTokens is missing"),
        (AZURE + "2023-11-16 18:15:46,5\n", r"trace.csv:2: 2 columns instead of 3"),
        (AZURE + "2023-11-16 18:15:46,5.5,9\n", r"trace.csv:2: ContextTokens is 5.5, which is no whole number"),
        (AZURE + "2023-11-16 18:15:46,-5,4\n", r"trace.csv:2: ContextTokens is -5"),
        (AZURE + "2023-11-16 18:15:46,5,99999999\n", r"trace.csv:2: GeneratedTokens is 99999999"),
        (AZURE + "2023-11-16 18:15:46,nan,9\n", r"trace.csv:2: ContextTokens is nan"),
        (AZURE + "2023-11-16 18:15:46,many,9\n", r"trace.csv:2: ContextTokens is 'many', which is no number"),
        (AZURE + "yesterday,5,9\n", r"trace.csv:2: TIMESTAMP is 'yesterday', which is no time"),
        (
            AZURE + "2023-11-16 18:15:46,5,9\n2023-11-16 18:15:45,5,9\n",
            r"trace.csv:3: TIMESTAMP .* is before the one of the row above",
        ),
    ],
)
def test_a_wrong_azure_trace_is_refused_with_file_and_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        azure.read(write(tmp_path, text))


def test_a_trace_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for read in (azure.read, mooncake.read, sharegpt.read):
        with pytest.raises(WorkloadError, match=r"nowhere.csv: cannot be read"):
            read(tmp_path / "nowhere.csv")


def mooncake_row(**changed: object) -> str:
    row = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2], **changed}
    return json.dumps({key: value for key, value in row.items() if value is not None})


def test_mooncake_requests_of_one_time_are_spread_up_to_the_next(tmp_path: Path) -> None:
    rows = [mooncake_row(timestamp=at) for at in (0, 0, 3000)]
    read = mooncake.read(write(tmp_path, "\n".join(rows)))
    assert [arrival.at_ns for arrival in read] == [0, 1_500_000_000, 3_000_000_000]
    assert read[0].shape == RequestShape(700, 5, (1, 2), 512)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (mooncake_row(output_length=None), "2: the field output_length is missing"),
        (mooncake_row(input_length=0), "2: input_length is 0"),
        (mooncake_row(timestamp="late"), "2: timestamp is 'late'"),
        (mooncake_row(hash_ids=[1]), "2: 1 hash_ids for 700 tokens"),
        (mooncake_row(hash_ids=["a", "b"]), "2: hash_ids must be a list of whole numbers"),
        ("{", "2: is no JSON object"),
        (mooncake_row(timestamp=5) + "\n" + mooncake_row(timestamp=4), "3: timestamp is before"),
    ],
)
def test_a_wrong_mooncake_trace_is_refused_with_file_and_line(tmp_path: Path, row: str, complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        mooncake.read(write(tmp_path, mooncake_row() + "\n" + row))


def test_lengths_without_times_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "num_prefill_tokens,num_decode_tokens,more\n12,7,x\n3,4,y\n")
    assert [arrival.shape for arrival in sharegpt.read(path)] == [RequestShape(12, 7), RequestShape(3, 4)]


def servegen_folder(folder: Path, *, windows: str = "0,2.0,1.0\n600,4.0,0.5\n") -> Path:
    tables = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{7: 1.0}"}}
    write(folder, windows, "chunk-1-trace.csv")
    write(folder, json.dumps(tables), "chunk-1-dataset.json")
    return folder


def test_servegen_clients_send_at_their_rates_with_their_lengths(tmp_path: Path) -> None:
    read = servegen.read(servegen_folder(tmp_path), Random(4), begin_s=0.0, count=3000)
    assert [a.at_ns for a in read] == sorted(a.at_ns for a in read)
    early = sum(a.at_ns < 600e9 for a in read)
    assert early == pytest.approx(1200, rel=0.1)
    assert {(a.shape.prompt_tokens, a.shape.output_tokens) for a in read} == {(10, 7), (20, 7)}
    fast = servegen.read(tmp_path, Random(4), begin_s=0.0, count=3000, speed=3.0)
    assert sum(a.at_ns < 600e9 for a in fast) == 3000


@pytest.mark.parametrize(
    ("windows", "complaint"),
    [
        ("0,2.0\n", "chunk-1-trace.csv:1: 2 columns"),
        ("0,-2.0,1\n", "chunk-1-trace.csv:1: rate -2"),
        ("0,fast,1\n", "chunk-1-trace.csv:1: 0,fast,1 are no numbers"),
        ("600,1,1\n0,1,1\n", "chunk-1-trace.csv:2: the window does not begin after"),
        ("0,0,0\n", "no client sends anything"),
    ],
)
def test_wrong_servegen_clients_are_refused(tmp_path: Path, windows: str, complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        servegen.read(servegen_folder(tmp_path, windows=windows), Random(0), begin_s=0.0, count=5)


def test_a_servegen_folder_without_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="holds no chunk"):
        servegen.read(tmp_path, Random(0), begin_s=0.0, count=5)

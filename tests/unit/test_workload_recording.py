"""Recordings on disk: segments, exports, imports of traces, and how they become workloads."""

import gzip
import json
import random
from pathlib import Path

import msgspec
import pytest
from millrace.cli import recording as verb
from millrace.cli.running import run_verb
from millrace.workloads import recording
from millrace.workloads.readers import READERS
from millrace.workloads.recording import (
    InstanceSeen,
    RecordingBegan,
    RecordingFolder,
    RequestServed,
    StepsComputed,
    read_recording,
    write_recording,
)
from millrace.workloads.shape import WorkloadError

from tests.testbed.messages import plain_record

S = 1_000_000_000


def row(
    number: int, *, like: int = -1, shared: int = 0, prompt: int = 40, outputs: tuple[int, ...] = (7,)
) -> RequestServed:
    return RequestServed(
        number=number, at_ns=number * S, prompt=prompt, outputs=outputs, block_size=16, like=like, shared=shared
    )


def test_segments_are_bounded_in_time_and_number_and_the_oldest_go(tmp_path: Path) -> None:
    folder = RecordingFolder(tmp_path, RecordingBegan(run=1))
    for number in range(20):
        folder.append([row(number)], 1_700 * 10**15 + number * recording.SEGMENT_NS * 11 // 10)
    folder.close()
    assert len(list(tmp_path.iterdir())) == recording.SEGMENTS_KEPT
    load = read_recording(tmp_path)
    assert [each.number for _, each in load.requests] == list(range(12, 20))
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_each_of_two_writers_removes_its_own_segments(tmp_path: Path) -> None:
    folders = [RecordingFolder(tmp_path, RecordingBegan(run=run), f"coordinator-{run}") for run in (0, 1)]
    folders[1].append([row(0)], 0)
    for number in range(20):
        folders[0].append([row(number)], number * recording.SEGMENT_NS * 11 // 10)
    assert len(list(tmp_path.iterdir())) == recording.SEGMENTS_KEPT + 1
    assert len(read_recording(tmp_path).requests) == recording.SEGMENTS_KEPT + 1


def test_the_cluster_is_the_one_that_was_applied_last(tmp_path: Path) -> None:
    folder = RecordingFolder(tmp_path, RecordingBegan(run=1))
    for number, cluster in enumerate(("# 1", "# 1", "# 2")):
        folder.on_cluster(cluster)
        folder.append([row(number)], number * S)
    assert len(list(tmp_path.iterdir())) == 2
    assert read_recording(tmp_path).began.cluster == "# 2"
    assert len(read_recording(tmp_path).requests) == 3
    assert [each.number for _, each in read_recording(tmp_path, latest=True).requests] == [2]


def test_instances_of_the_cluster_before_are_none_of_the_latest(tmp_path: Path) -> None:
    for number, name in enumerate(("before", "now")):
        folder = RecordingFolder(tmp_path, RecordingBegan(run=number, cluster=name))
        folder.append([InstanceSeen(record=plain_record(name)), row(number)], number * S)
        folder.close()
    assert list(read_recording(tmp_path).instances) == ["before", "now"]
    assert list(read_recording(tmp_path, latest=True).instances) == ["now"]


def test_only_the_last_requests_are_read(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    write_recording(path, [row(number) for number in (3, 0, 2, 1, 4)])
    assert [each.number for _, each in read_recording(path, requests_max=2).requests] == [3, 4]
    assert [each.number for _, each in read_recording(path, requests_max=3, last_s=1).requests] == [3, 4]


def test_a_replay_begins_with_who_was_under_way_and_ends_where_slow_ones_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "ADVISED_MIN", 18)
    rows = [msgspec.structs.replace(row(number), e2e_ns=(3 if number < 18 else 1) * S) for number in range(20)]
    steps = [StepsComputed(instance="a", at_ns=row.at_ns, wall_ns=1, steps=1) for row in rows]
    monkeypatch.setattr(recording, "EARLIER_NS", 4 * S)
    write_recording(tmp_path / f"0{recording.SUFFIX}", [*rows, *steps])
    load = read_recording(tmp_path, last_s=2, latest=True)
    assert [each.number for each in load.earlier] == [5, 6, 7, 8]
    assert (load.steps[0].at_ns, read_recording(tmp_path, last_s=2).steps[0].at_ns) == (5 * S, 17 * S)
    assert [each.number for _, each in load.requests] == [9, 10, 11, 12, 13, 14, 15, 16, 17]
    assert (load.lead, load.half) == (6, 7)
    monkeypatch.setattr(recording, "ADVISED_MIN", 19)
    assert read_recording(tmp_path, latest=True).requests[-1][1].number == 19
    assert [each.number for _, each in read_recording(tmp_path, last_s=2).requests] == [17, 18, 19]


def test_a_segment_ends_when_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SEGMENT_BYTES", 200)
    folder = RecordingFolder(tmp_path, RecordingBegan(run=1))
    for number in range(4):
        folder.append(
            [RequestServed(number=number, at_ns=1, prompt=1, outputs=(), model=random.Random(1).randbytes(200).hex())],
            number * S,
        )
    folder.close()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_run_after_another_has_numbers_of_its_own(tmp_path: Path) -> None:
    for run, at_ns in ((1, 0), (2, 5 * S)):
        folder = RecordingFolder(tmp_path, RecordingBegan(run=run, cluster=f"# {run}"))
        folder.append([row(0), row(1, like=0, shared=1)], at_ns)
        folder.close()
    load = read_recording(tmp_path)
    assert load.began.cluster == "# 2"
    again = tmp_path / "export.jsonl"
    write_recording(again, load.rows())
    assert read_recording(again).arrivals() == load.arrivals()
    first, second = (load.arrivals()[place].shape.prefix for place in (0, 1))
    assert first != second


def test_prompts_that_begin_alike_share_their_first_blocks() -> None:
    rows = [row(0), row(1, like=0, shared=2), row(2, like=0, shared=4, prompt=80), row(3)]
    load = recording.RecordedLoad(
        began=RecordingBegan(run=1), instances={}, requests=[(1, each) for each in rows], steps=[]
    )
    a, b, c, d = (arrival.shape.prefix for arrival in load.arrivals())
    assert a[:2] == b[:2] == c[:2]
    assert a[2] != b[2]
    assert c[:3] == a  # and goes on into what the first one said
    assert len(c) == 5
    assert not set(d) & {*a, *b, *c}


TRACES = {
    "mooncake": "\n".join(
        json.dumps({"timestamp": at, "input_length": 1100, "output_length": 9, "hash_ids": ids})
        for at, ids in ((0, [1, 2, 3]), (1000, [1, 2, 4]), (2000, [9, 8, 7]))
    ),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1,374,44\n2023-11-16 18:17:04.1,396,109\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,API\n"
    "45,ChatGPT,1087,0,1087,API\n118,ChatGPT,417,276,693,API\n",
    "openai": '{"created": 100, "model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n{"up": 1}\n'
    '{"timestamp": "1970-01-01T00:01:30+00:00", "prompt_tokens": 7, "completion_tokens": 2}\n',
    "sharegpt": "num_prefill_tokens,num_decode_tokens\n10,20\n",
}


@pytest.mark.parametrize("format_", sorted(TRACES))
def test_an_imported_trace_is_the_same_workload(
    tmp_path: Path, format_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "trace", tmp_path / "load.jsonl.gz"
    source.write_text(TRACES[format_])
    assert run_verb("recording", verb, ["import", str(source), str(target), "--format", format_]) == 0
    wanted, found = READERS[format_](source), read_recording(target).arrivals()
    assert f"{len(wanted)} requests" in capsys.readouterr().out
    for mine, other in zip(found, wanted, strict=True):
        assert mine.at_ns == other.at_ns - wanted[0].at_ns
        assert (mine.shape.prompt_tokens, mine.shape.output_tokens) == (
            other.shape.prompt_tokens,
            other.shape.output_tokens,
        )
    alike = [[a.shape.prefix[:2] == b.shape.prefix[:2] for b in found] for a in found]
    assert alike == [[a.shape.prefix[:2] == b.shape.prefix[:2] for b in wanted] for a in wanted]


def test_show_says_what_a_recording_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(tmp_path / "a.jsonl", [RecordingBegan(run=1), row(0), row(1, like=0, shared=2)])
    assert run_verb("recording", verb, ["show", "--file", str(tmp_path / "a.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "2 requests in 1 s (2.00/s), 2 completed" in text
    assert "40% of them as in an earlier one" in text
    long = msgspec.structs.replace(row(0), prompt=123_456)
    write_recording(tmp_path / "a.jsonl", [RecordingBegan(run=1), long])
    assert run_verb("recording", verb, ["show", "--file", str(tmp_path / "a.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "1 requests in 0 s, 1 completed" in text
    assert "prompt 123456 tokens" in text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "holds no request"), (b'{"row":"request"}\n', "is no row"), (b"text\n", "is no row")],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(content))
    with pytest.raises(WorkloadError, match=complaint):
        read_recording(file)

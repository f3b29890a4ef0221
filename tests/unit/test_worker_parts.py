"""The worker's pure parts: ledger, snapshot buffer, figures, names, configuration."""

import os
import signal
import struct
import subprocess
from pathlib import Path

import msgspec
import pytest
from millrace.contracts.ingress import FinishReason, TokenLogprobs

from services.worker import state
from services.worker.config import WorkerConfig
from services.worker.state import Held, Ledger
from services.worker.vllm_engine import names
from services.worker.vllm_engine.hangs import LivenessJudge, cpu_time_ns
from services.worker.vllm_engine.snapshot_buffer import SIZE, SnapshotReader, SnapshotWriter, create


def held(sequence: str = "r.0", **fields: object) -> Held:
    defaults: dict[str, object] = {
        "epoch": 0,
        "ingress": "i0",
        "ingress_incarnation": 1,
        "traceparent": "",
        "prompt_tokens": 3,
        "base_index": 0,
        "max_tokens": 9,
        "received_ns": 1,
    }
    return Held(sequence=sequence, **{**defaults, **fields})  # type: ignore[arg-type]


def test_fences_only_rise_and_the_oldest_are_dropped_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FENCES_MAX", 3)
    ledger = Ledger()
    for index in range(3):
        ledger.fence(f"r{index}.0", 5)
    ledger.fence("r0.0", 2)
    assert ledger.fenced("r0.0") == 5
    ledger.fence("r9.0", 1)
    assert ledger.fenced("r1.0") is None, "r0 was touched later than r1"
    assert ledger.fenced("r0.0") == 5


def test_chunks_with_alternatives_are_cut_and_the_end_comes_with_the_last() -> None:
    long = held(logprobs=[])
    long.token_ids = list(range(state.LOGPROB_TOKENS_MAX + 5))
    long.logprobs = [TokenLogprobs([1], [-0.5], 1)] * len(long.token_ids)
    long.finish = FinishReason.STOP
    first, second = long.take_unsent(), long.take_unsent()
    assert (len(first.token_ids), first.finish) == (state.LOGPROB_TOKENS_MAX, None)
    assert (second.first_index, len(second.token_ids), second.finish) == (first.token_ids[-1] + 1, 5, FinishReason.STOP)


@pytest.fixture
def buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("services.worker.vllm_engine.snapshot_buffer._FOLDERS", (str(tmp_path),))
    return create()


def test_a_snapshot_is_read_once_and_then_the_next(buffer: Path) -> None:
    writer, reader = SnapshotWriter(buffer), SnapshotReader(buffer)
    buffer.unlink()
    assert reader.read_new() is None
    assert writer.write(b"first")
    assert reader.read_new() == b"first"
    assert reader.read_new() is None
    writer.write(b"2")
    writer.write(b"third, longer")
    assert reader.read_new() == b"third, longer"


def test_buffers_of_dead_processes_are_swept_and_others_left(buffer: Path) -> None:
    dead = buffer.with_name("millrace-snapshot-4194305-x")  # beyond the greatest pid there can be
    foreign = buffer.with_name("millrace-snapshot-abc")
    for path in (dead, foreign):
        path.touch()
    another = create()
    assert [path.exists() for path in (dead, foreign, buffer, another)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("offset", "damage"),
    [
        (0, struct.pack("<Q", 3)),  # a write under way
        (16, b"X"),  # torn: the payload is newer than its checksum
        (8, struct.pack("<I", SIZE)),  # torn: a length that cannot be
    ],
)
def test_a_torn_snapshot_is_not_read(buffer: Path, offset: int, damage: bytes) -> None:
    writer, reader = SnapshotWriter(buffer), SnapshotReader(buffer)
    writer.write(b"payload")
    with buffer.open("r+b") as file:
        file.seek(offset)
        file.write(damage)
    assert reader.read_new() is None
    writer.write(b"whole again")
    assert reader.read_new() == b"whole again"


@pytest.mark.parametrize("sequence", ["r1.0", "a~b.3", "~", "x" * 200])
def test_a_sequence_is_found_in_its_request_id(sequence: str) -> None:
    assert names.sequence_of(names.request_id(sequence, 41)) == sequence


def test_a_configuration_names_its_instances() -> None:
    config = WorkerConfig(name="w", model="m", instances=2)
    assert config.instance_names() == ["w-0", "w-1"]
    assert msgspec.structs.replace(config, instances=1).instance_names() == ["w"]


def test_signs_of_life_stand_beside_the_snapshot(tmp_path: Path) -> None:
    buffer = create()
    writer, reader = SnapshotWriter(buffer), SnapshotReader(buffer)
    buffer.unlink()
    assert reader.signs() == (0, 0)
    writer.beat(5)
    writer.step(7)
    assert writer.write(b"payload")
    assert reader.signs() == (5, 7)
    assert reader.read_new() == b"payload"
    assert not writer.write(b"x" * (SIZE - 16)), "a snapshot never reaches the signs"


MS = 1_000_000
UNIX = 10**18


def judged(
    judge: LivenessJudge, signs: tuple[int, int], now_ms: int, cpu_ms: int | None = None
) -> tuple[int, int] | None:
    cpu_ns = None if cpu_ms is None else cpu_ms * MS
    found = judge.judge((signs[0] * MS, signs[1] * MS), now_ms * MS, UNIX + now_ms * MS, cpu_ns)
    return None if found is None else (found.silent_since_ns, found.step_since_ns)


def test_a_hang_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    judge = LivenessJudge()
    assert judged(judge, (0, 0), 900) is None, "no sign yet: the engine has not started"
    assert judged(judge, (1000, 0), 1050) is None
    assert judged(judge, (1000, 0), 1251) is None, "first look"
    assert judged(judge, (1000, 0), 1301) == (UNIX + 1000 * MS, 0)
    assert judged(judge, (1000, 0), 1351) is None
    assert judged(judge, (5000, 0), 5010) == (0, 0)
    assert judged(judge, (5050, 0), 5060) is None


def test_a_worker_that_was_itself_held_up_blames_nobody() -> None:
    judge = LivenessJudge()
    assert judged(judge, (1000, 0), 1010) is None
    assert judged(judge, (1050, 0), 9000) is None, "its first look after a standstill sees an old sign"
    assert judged(judge, (9001, 0), 9050) is None


def test_an_engine_that_waits_for_a_core_is_not_silent_meanwhile() -> None:
    judge = LivenessJudge()
    assert judged(judge, (1000, 0), 1010, 500) is None
    for now_ms in range(1060, 9000, 50):
        assert judged(judge, (1000, 0), now_ms, 500 + (now_ms - 1010) // 40) is None, "a fortieth of a core"
    assert judged(judge, (9000, 0), 9010, 800) is None
    assert judged(judge, (9000, 0), 9210, 1000) is None
    assert judged(judge, (9000, 0), 9310, 1100) is None, "first look"
    assert judged(judge, (9000, 0), 9360, 1150) == (UNIX + 9000 * MS, 0), "it had a core, and gave no sign"


def test_an_engine_that_is_stopped_is_silent_from_its_last_sign() -> None:
    judge = LivenessJudge()
    assert judged(judge, (1000, 0), 1010, 500) is None
    assert judged(judge, (1000, 0), 1251) is None, "first look"
    assert judged(judge, (1000, 0), 1301) == (UNIX + 1000 * MS, 0)


def test_a_process_that_computes_tells_its_cpu_time_and_a_stopped_one_does_not() -> None:
    assert cpu_time_ns(os.getpid()) is not None
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert cpu_time_ns(process.pid) is None
        process.kill()
    assert cpu_time_ns(process.pid) is None


def test_a_long_step_of_a_live_engine_is_told_with_its_begin() -> None:
    judge = LivenessJudge()
    assert judged(judge, (1000, 900), 1010) is None
    assert judged(judge, (1200, 900), 1210) is None
    assert judged(judge, (1250, 900), 1260) == (0, UNIX + 900 * MS)
    assert judged(judge, (2000, 900), 2010) is None
    assert judged(judge, (2050, 2040), 2060) == (0, 0)

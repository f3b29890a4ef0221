"""The recorder: decisions, outcomes and summaries in, rows of a recording out."""

from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Log
from millrace.contracts.local import KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.plan import Lease
from millrace.contracts.status import EngineTotals, InstanceSummary, LoadIndicators
from millrace.kvcache.chain import pack_hashes
from millrace.workloads.recording import InstanceSeen, RecordingRow, RequestServed, StepsComputed

from services.coordinator.config import CoordinatorConfig
from services.coordinator.recorder import KeepRows, RecorderActor, RecordingFailed
from tests.testbed.messages import decision, plain, plain_record, plain_summary

T0 = 1_700_000_000_000_000_000
RECORD = plain_record("w")


class Recorder:
    def __init__(self, *, leads: bool = True) -> None:
        config = CoordinatorConfig(bus=BusConfig(cluster="c"), recording="somewhere")
        self.actor = RecorderActor(config, incarnation=7)
        self.actor.start(T0)
        holder = "coordinator-0" if leads else "coordinator-1"
        lease = Lease(model="m", holder=holder, incarnation=7, until_ns=T0 * 2)
        self.hear(KeyChanged(bucket="lease", key="m", value=lease, revision=1))
        self.hear(KeyChanged(bucket="instance", key="w", value=RECORD, revision=1))

    def hear(self, *bodies: Body) -> list[Effect]:
        return [effect for body in bodies for effect in self.actor.handle(Message(body), T0)]

    def rows(self, event: Body | None = None) -> list[RecordingRow]:
        self.actor.check_invariants()
        told = self.hear(event or TimerFired(name="tick"))
        return [row for effect in told if isinstance(effect, KeepRows) for row in effect.rows]

    def serve(self, request: str, blocks: list[int], output: tuple[int, ...] = ()) -> None:
        """One request whose prompt, and then output, has these blocks."""
        tokens, hashes = 16 * len(blocks), {"block_size": 16, "block_hashes": pack_hashes(blocks)}
        expected = {"max_tokens": 40, "expected_output_tokens": 9.0}
        ended = {"output_tokens": [12], "instances": ["w"], "block_hashes": pack_hashes(output)}
        times = {"arrival_ns": T0, "placed_ns": T0 + 5, "ttft_ns": 100, "e2e_ns": 900}
        self.hear(
            decision(request, chosen="w", prompt_tokens=tokens, **expected, **hashes),
            plain(RequestFinished, request=request, prompt_tokens=tokens, **ended, **times),
        )


def served(rows: list[RecordingRow]) -> list[RequestServed]:
    return [row for row in rows if isinstance(row, RequestServed)]


def test_a_request_is_a_row_that_says_which_prompt_it_begins_like() -> None:
    recorder = Recorder()
    recorder.serve("a", [1, 2, 3], output=(4,))
    recorder.serve("b", [1, 2, 9])
    recorder.serve("c", [1, 2, 3, 4, 5])  # the next turn of the first one
    recorder.serve("d", [8])
    rows = served(recorder.rows())
    assert [(row.number, row.like, row.shared) for row in rows] == [(0, -1, 0), (1, 0, 2), (2, 0, 4), (3, -1, 0)]
    first = rows[0]
    assert (first.prompt, first.outputs, first.max_tokens, first.expected) == (48, (12,), 40, 9.0)
    assert (first.ttft_ns, first.e2e_ns, first.placed_ns) == (100, 900, 5)
    assert (first.policy, first.instance) == ("forecast", "w")


def test_another_coordinators_models_are_not_recorded() -> None:
    recorder = Recorder(leads=False)
    recorder.serve("a", [1])
    recorder.hear(summary(T0, 1, 0), summary(T0 + 10, 1, 4))
    assert recorder.rows() == []


def test_an_instance_is_a_row_once_before_what_it_served() -> None:
    recorder = Recorder()
    assert recorder.rows() == []
    recorder.serve("a", [1])
    assert recorder.rows()[0] == InstanceSeen(record=RECORD)
    recorder.hear(KeyChanged(bucket="instance", key="w", value=RECORD, revision=2))
    recorder.serve("b", [1])
    assert not any(isinstance(row, InstanceSeen) for row in recorder.rows())


def summary(at_ns: int, running: int, steps: int) -> InstanceSummary:
    load = LoadIndicators(totals=EngineTotals(steps, steps * 10, steps * 2, steps * 3, steps * 4))
    return plain_summary("w", at_ns=at_ns, running=running, waiting=2, preemptions=steps // 10, indicators=load)


def test_steps_of_an_engine_that_was_idle_at_either_end_count_with_the_time_in_them() -> None:
    recorder = Recorder()
    recorder.rows()
    recorder.hear(
        summary(100, 1, 0), summary(400, 1, 10), summary(500, 0, 12), summary(900, 1, 15), summary(950, 1, 20)
    )
    expected = StepsComputed(
        instance="w",
        at_ns=T0,
        wall_ns=300 + 20 + 30 + 50,
        steps=20,
        decodes=40,
        prefill_tokens=60,
        context_tokens=80,
        waiting=2,
        preemptions=2,
    )
    assert recorder.rows() == [InstanceSeen(record=RECORD), expected]
    assert recorder.rows() == []


def test_rows_are_kept_before_it_stops_and_a_full_disk_is_said_once() -> None:
    recorder = Recorder()
    recorder.serve("a", [1])
    assert len(served(recorder.rows(StopRequested()))) == 1
    told = recorder.hear(RecordingFailed(detail="full"), RecordingFailed(detail="full"))
    assert [effect.event for effect in told if isinstance(effect, Log)] == ["recording_failed"]

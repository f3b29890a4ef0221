"""A recording as a page shows it: what was heard of requests and engines, made again from its rows.

Tokens of a request come evenly between its first and its last, at the instance that it ended at: its moves and
forecasts are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from operator import itemgetter

from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body, Message
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.workloads.recording import RecordedLoad, RequestServed, StepsComputed

from services.page.actor import PageActor
from simulator.scenarios.shown_run import shown_actor

#: Frames of a run at most, and time between two of them at least, ns.
FRAMES_MAX, FRAME_NS = 6_000, 500_000_000

MS = 1_000_000


def recorded_run(load: RecordedLoad) -> PageActor:
    """The run that was recorded. Requests have the names that they have in a replay."""
    rows = [(f"r{number}", row) for number, (_, row) in enumerate(load.requests)]
    begin_ns, end_ns = rows[0][1].at_ns, max(row.at_ns + max(0, row.e2e_ns) for _, row in rows)
    pause_ns = max(FRAME_NS, (end_ns - begin_ns) // FRAMES_MAX)
    actor = shown_actor("recorded", begin_ns - FRAME_NS, begin_ns, name="recorded")
    for record in load.instances.values():
        known = KeyChanged(bucket="instance", key=record.instance, value=record, revision=1)
        actor.handle(Message(known), begin_ns)
        actor.tables.put("report", record.instance, inc=record.incarnation)
    heard = sorted((each for name, row in rows for each in _life(name, row)), key=itemgetter(0))
    steps = ((row.at_ns, row) for row in load.steps)
    frames = ((at_ns, None) for at_ns in range(begin_ns, end_ns + 2 * pause_ns, pause_ns))
    for at_ns, what in merge(heard, steps, frames, key=itemgetter(0)):
        match what:
            case None:
                _fill(actor, load, at_ns)
                actor.frame(at_ns)
            case StepsComputed() if what.instance in load.instances:
                per_s, step = what.decodes * 1e9 / max(1, what.wall_ns), what.wall_ns / MS / max(1, what.steps)
                actor.tables.put("report", what.instance, waiting=what.waiting, tps=round(per_s), step=round(step, 1))
            case Body():
                actor.handle(Message(what), at_ns)
            case (str() as name, RequestServed() as row):
                _decodes(actor, name, row, at_ns)
    return actor


def _life(name: str, row: RequestServed) -> Iterator[tuple[int, Body | tuple[str, RequestServed]]]:
    """Placement, first token (its row) and end of a request, each with its time."""
    end_ns = row.at_ns + max(0, row.e2e_ns)
    decision = DecisionMade(
        request=name,
        sequences=[f"{name}.{number}" for number in range(len(row.outputs))],
        epoch=0,
        kind="dispatch",
        policy=row.policy,
        model=row.model,
        chosen=row.instance,
        reason="as recorded",
        at_ns=row.at_ns,
        prompt_tokens=row.prompt,
        max_tokens=row.max_tokens,
        expected_output_tokens=row.expected,
    )
    yield min(end_ns, row.at_ns + row.placed_ns), decision
    if row.ttft_ns >= 0:
        yield row.at_ns + row.ttft_ns, (name, row)
    finished = RequestFinished(
        request=name,
        model=row.model,
        outcome=row.outcome,
        ingress="",
        prompt_tokens=row.prompt,
        cached_tokens=row.cached,
        output_tokens=list(row.outputs),
        arrival_ns=row.at_ns,
        placed_ns=row.at_ns + row.placed_ns,
        ttft_ns=row.ttft_ns if row.ttft_ns >= 0 else None,
        e2e_ns=max(0, row.e2e_ns),
        instances=[row.instance] if row.instance else [],
        migrations=row.moves,
    )
    yield end_ns, finished


def _decodes(actor: PageActor, name: str, row: RequestServed, at_ns: int) -> None:
    span_s = max(0.001, (row.e2e_ns - row.ttft_ns) / 1e9)
    since_ms = (at_ns - actor.incarnation) // MS
    for number, tokens in enumerate(row.outputs):
        actor.tables.put("q", f"{name}.{number}", st="r", o=[1, since_ms, round(tokens / span_s, 2)])


def _fill(actor: PageActor, load: RecordedLoad, at_ns: int) -> None:
    """Running sequences and KV blocks of each instance."""
    running, used = dict.fromkeys(load.instances, 0), dict.fromkeys(load.instances, 0)
    for row in actor.tables.rows["q"].values():
        if row["st"] == "r" and row["inst"] in used:
            first, since_ms, rate = row["o"]
            tokens = row["prompt"] + first + rate * ((at_ns - actor.incarnation) / 1e9 - since_ms / 1e3)
            running[row["inst"]] += 1
            used[row["inst"]] += -(-int(tokens) // load.instances[row["inst"]].block_size)
    for name, record in load.instances.items():
        actor.tables.put("report", name, running=running[name], used=min(used[name], record.blocks_total))

"""A scenario's requests: lengths and times from its workload, prompts made up to match."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from millrace.contracts.worker import Sampling
from millrace.workloads.arrivals import FromTrace
from millrace.workloads.lengths import Lengths, RowLengths, load_fitted
from millrace.workloads.readers import READERS, TIMED, servegen
from millrace.workloads.shape import Arrival, RequestShape, WorkloadError

from services.ingress.calls.messages import Call, CallKind
from simulator.scenarios.spec import Fitted, LogNormal, ModelLoad, Phase, ScenarioSpec, TraceRows, WorkloadSpec

#: Token ids of prompts begin here. Requests that share nothing have each an id of their own, repeated.
_FIRST_TOKEN = 1_000

#: Requests drawn for each resident, of which it is chosen by output length.
RESIDENT_DRAWS = 4


def arrivals(spec: WorkloadSpec, *, seed: int, folders: Sequence[Path]) -> list[Arrival]:
    """All requests of a workload in order of time.

    Args:
        folders: Where traces with a relative path may be.

    Raises:
        WorkloadError: a trace is wrong or gives too little.
    """
    return in_phases(_arrivals(spec, seed=seed, folders=folders), spec.phases)


def _arrivals(spec: WorkloadSpec, *, seed: int, folders: Sequence[Path]) -> list[Arrival]:
    rng = Random(f"{seed}/workload")
    if isinstance(spec.arrivals, FromTrace):
        return _timed(spec, spec.arrivals.speed, rng, folders)
    lengths = _lengths(spec, rng, folders)
    times = spec.arrivals.times_ns(Random(f"{seed}/arrivals"))
    found = _residents(spec, lengths, seed)
    return found + [Arrival(next(times), cut(lengths.draw(rng), spec.lengths)) for _ in range(spec.count - len(found))]


def _residents(spec: WorkloadSpec, lengths: Lengths, seed: int) -> list[Arrival]:
    """Sequences as a cluster holds them that has run for long: each output token that is to come is as likely as any
    other to be the next, so a request is drawn by its output length, and how far it is evenly. What it has generated is
    part of its prompt.
    """
    if not spec.residents:
        return []
    rng = Random(f"{seed}/residents")
    shapes = [cut(lengths.draw(rng), spec.lengths) for _ in range(RESIDENT_DRAWS * spec.residents)]
    drawn = rng.choices(shapes, [shape.output_tokens for shape in shapes], k=spec.residents)
    return [Arrival(0, _resident(shape, rng.randrange(shape.output_tokens))) for shape in drawn]


def _resident(shape: RequestShape, generated: int) -> RequestShape:
    return RequestShape(shape.prompt_tokens + generated, shape.output_tokens - generated)


def in_phases(found: list[Arrival], phases: Sequence[Phase]) -> list[Arrival]:
    """Requests with the lengths of the phase that each is in."""
    if not phases:
        return found
    whole, begin, scaled = sum(phase.share for phase in phases), 0.0, []
    for phase in phases:
        end = begin + phase.share / whole * len(found)
        scaled += [Arrival(each.at_ns, _scaled(each.shape, phase)) for each in found[round(begin) : round(end)]]
        begin = end
    return scaled


def _scaled(shape: RequestShape, phase: Phase) -> RequestShape:
    prompt = max(1, round(shape.prompt_tokens * phase.prompt_scale))
    prefix = shape.prefix[: -(-prompt // shape.prefix_tokens)] if shape.prefix else ()
    output = max(1, round(shape.output_tokens * phase.output_scale))
    return RequestShape(prompt, output, prefix, shape.prefix_tokens if prefix else 0)


def _lengths(spec: WorkloadSpec, rng: Random, folders: Sequence[Path]) -> Lengths:
    source = spec.lengths
    if isinstance(source, LogNormal):
        return source
    if isinstance(source, Fitted):
        return load_fitted(source.name)
    rows = [arrival.shape for arrival in _rows(source, rng, folders, spec.count, 1.0)]
    return RowLengths(rows, shuffle=source.shuffle)


def _timed(spec: WorkloadSpec, speed: float, rng: Random, folders: Sequence[Path]) -> list[Arrival]:
    source = spec.lengths
    if not isinstance(source, TraceRows) or (source.format not in TIMED and source.format != "servegen"):
        raise WorkloadError("workload.arrivals: the lengths come from no trace that has times")
    rows = _rows(source, rng, folders, spec.count, speed)
    if len(rows) < spec.count:
        raise WorkloadError(f"workload.count: the trace has {len(rows)} rows, {spec.count} are asked for")
    pace = 1.0 if source.format == "servegen" else speed
    first_ns = rows[0].at_ns
    return [
        Arrival(int((row.at_ns - first_ns) / pace), cut(row.shape, source), row.asked) for row in rows[: spec.count]
    ]


def _rows(source: TraceRows, rng: Random, folders: Sequence[Path], count: int, speed: float) -> list[Arrival]:
    path = find(source.path, folders)
    if source.format == "servegen":
        rows = servegen.read(path, rng, begin_s=source.begin_s, count=count + source.skip, speed=speed)
    else:
        rows = READERS[source.format](path)
    if len(rows) <= source.skip:
        raise WorkloadError(f"{len(rows)} rows, of which {source.skip} shall be skipped", path=path)
    return rows[source.skip :]


def find(path: str, folders: Sequence[Path]) -> Path:
    """A trace by its path: absolute, or in the first folder that has it.

    Raises:
        WorkloadError: it is in none of these places.
    """
    places = [folder / path for folder in folders]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise WorkloadError(f"is not there; looked for {' and '.join(map(str, places))}", path=path)
    return found


def cut(shape: RequestShape, source: LogNormal | Fitted | TraceRows) -> RequestShape:
    """A request within the bounds that the workload sets."""
    if isinstance(source, LogNormal):
        return shape
    prompt = min(shape.prompt_tokens, source.prompt_max or shape.prompt_tokens)
    output = min(shape.output_tokens, source.output_max or shape.output_tokens)
    if source.total_max and prompt + output > source.total_max:
        prompt = max(1, min(prompt, source.total_max - output))
        output = max(1, min(output, source.total_max - prompt))
    keep = isinstance(source, TraceRows) and source.prefixes
    prefix = shape.prefix[: -(-prompt // shape.prefix_tokens)] if keep and shape.prefix else ()
    return RequestShape(prompt, output, prefix, shape.prefix_tokens if prefix else 0)


def prompt_token_ids(number: int, shape: RequestShape) -> list[int]:
    """A prompt that shares with others what its shape says, and else nothing."""
    if not shape.prefix:
        return [_FIRST_TOKEN + number] * shape.prompt_tokens
    ids = [-2 - name if name < 0 else (1 << 40) + name for name in shape.prefix]
    tokens = [token for token in ids for _ in range(shape.prefix_tokens)]
    return tokens[: shape.prompt_tokens]


def models_of(spec: ScenarioSpec, load: Sequence[Arrival]) -> list[str]:
    """The model of each request: the recorded one, or drawn by the models' shares."""
    loads = spec.models()
    if len(loads) == 1:
        return list(loads) * spec.workload.count
    if all(arrival.asked is not None and arrival.asked.model in loads for arrival in load):
        return [arrival.asked.model for arrival in load if arrival.asked is not None]
    rng = Random(f"{spec.seed}/models")
    return rng.choices(list(loads), [load.share for load in loads.values()], k=spec.workload.count)


def at_model(shape: RequestShape, load: ModelLoad) -> RequestShape:
    """A request with its output length at a model."""
    if load.output_scale == 1.0:
        return shape
    return msgspec.structs.replace(shape, output_tokens=max(1, round(shape.output_tokens * load.output_scale)))


def request_name(number: int) -> str:
    """Id of the n-th request."""
    return f"r{number}"


def call_of(
    number: int, arrival: Arrival, *, model: str, max_model_len: int, output_limit: int, stated: bool = False
) -> Call:
    """The call that a client makes of a request."""
    shape, asked = arrival.shape, arrival.asked
    room = max_model_len - shape.prompt_tokens
    if asked is not None:
        stated, output_limit = asked.stated, asked.max_tokens or output_limit
    limit = shape.output_tokens if stated else output_limit or room
    return Call(
        request=request_name(number),
        kind=CallKind.COMPLETION,
        model=model,
        prompts=[prompt_token_ids(number, shape)],
        sampling=Sampling(max_tokens=max(1, min(limit, room)), temperature=0.0, ignore_eos=stated),
        n=1 if asked is None else len(asked.outputs),
    )

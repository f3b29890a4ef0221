"""Tells what is known of a request's placements. Pure: values in, lines out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from millrace.cli.explained import Explained, ExplainedPlacement
from millrace.cli.field_text import duration
from millrace.contracts.observers import CandidateForecast, CascadeAttempt, DecisionMade, RequestFinished

N = TypeVar("N", int, float)

#: Placements that are told. A request that found no instance for long has one per try.
PLACEMENTS_MAX = 12
#: Forecasts that ingress keeps of a decision.
KEPT_MAX = 16
_NAME_MAX = 28
_HEAD = ("  instance", "end to end", "TTFT", "TPOT", "others later", "preempted", "cached", "snapshot age")


def told(explained: Explained) -> list[str]:
    """Headline, placements in order, what happened."""
    lines = [_headline(explained)]
    if explained.ending is not None and explained.ending.attempts:
        lines += ["", *_attempts(explained.ending)]
    shown = explained.placements
    if len(shown) > PLACEMENTS_MAX:
        shown = [*shown[: PLACEMENTS_MAX - 1], shown[-1]]
    for number, placement in enumerate(shown):
        if number == PLACEMENTS_MAX - 1 and len(explained.placements) > PLACEMENTS_MAX:
            lines += ["", f"... {len(explained.placements) - PLACEMENTS_MAX} placements more ..."]
        lines += ["", *_placement(placement, explained.ending)]
    if not explained.placements:
        lines += ["", "No placement of it is recorded."]
    lines += ["", *_happened(explained)]
    return [line.rstrip() for line in lines]


def _headline(explained: Explained) -> str:
    ending = explained.ending
    parts = [f"request {explained.request}"]
    if explained.model:
        parts.append(f"model {explained.model}")
    if ending is not None:
        parts.append(f"{ending.outcome} after {duration(ending.e2e_ns)}")
        parts.append(f"{ending.prompt_tokens} prompt and {sum(ending.output_tokens)} output tokens")
    return ", ".join(parts)


def _attempts(ending: RequestFinished) -> Iterator[str]:
    """Attempts of a cascade, in order: score against threshold, by which judge and plan."""
    for attempt in ending.attempts:
        took = duration(max(0, attempt.ended_ns - attempt.started_ns))
        yield f"attempt {attempt.request} on tier {attempt.tier}, {attempt.model}: {attempt.outcome} after {took}"
        yield f"  {_scored(attempt)}, {attempt.output_tokens} output tokens"
        if attempt.detail:
            yield f"  {attempt.detail}"
    if ending.reason:
        yield f"delivered because: {ending.reason}"


def _scored(attempt: CascadeAttempt) -> str:
    if attempt.score is None:
        return "no score"
    bound = "at most " if attempt.outcome == "rejected_early" else ""
    by = f"score {bound}{attempt.score:.4g} by {attempt.judge}"
    if attempt.threshold is None:
        return by
    side = "below" if attempt.score < attempt.threshold else "at least"
    return f"{by}, {side} the threshold {attempt.threshold:.4g} of plan {attempt.epoch}"


def _placement(placement: ExplainedPlacement, ending: RequestFinished | None) -> Iterator[str]:
    decision = placement.decision
    more = f" and {len(decision.sequences) - 1} more" if len(decision.sequences) > 1 else ""
    after = "" if ending is None else f", {duration(decision.at_ns - ending.arrival_ns)} after arrival"
    goes = f"to {decision.chosen}" if decision.chosen else "to nobody"
    epoch = f" (epoch {decision.epoch})" if decision.epoch else ""
    yield f"{decision.kind} of {decision.sequences[0]}{more} {goes}{epoch}{after}"
    if placement.step_tokens_max:
        yield f"  decodes came first there: steps of at most {placement.step_tokens_max:,} tokens"
    if decision.kind == "migration":
        yield from _migration(placement, ending)
        return
    by = decision.policy
    if decision.fallback:
        by += f", whose fallback {decision.fallback} decided"
    yield f"  by {by}: {decision.reason}"
    if decision.output_tokens:
        yield f"  {decision.output_tokens} output tokens were there already and had to be computed again"
    yield from _considered(decision)
    if placement.trouble:
        yield f"  it came to nothing: {placement.trouble}"


def _migration(placement: ExplainedPlacement, ending: RequestFinished | None) -> Iterator[str]:
    decision = placement.decision
    tokens = f", {decision.output_tokens} output tokens in" if decision.output_tokens else ""
    yield f"  with its KV from {placement.source}{tokens}"
    if decision.reason:
        yield f"  asked for by: {decision.reason}"
    if placement.why:
        yield f"  because: {placement.why}"
    if placement.copied:
        yield f"  copied in {placement.copied}"
    if placement.trouble:
        yield f"  it came to nothing: {placement.trouble}"
    elif ending is not None and decision.output_tokens and _choices(ending) == 1:
        came, took = sum(ending.output_tokens) - decision.output_tokens, _end_ns(ending) - decision.at_ns
        yield f"  {came} output tokens came since, the last one {duration(max(0, took))} after it"


def _considered(decision: DecisionMade) -> Iterator[str]:
    if decision.forecasts:
        answered = sum(not f.note for f in decision.forecasts)
        took = f" in {duration(int(decision.wall_us * 1e3))}" if decision.wall_us else ""
        length = decision.expected_output_tokens
        given = "an unknown output length" if length is None else f"{length:.4g} output tokens expected"
        kept = " (no more are kept)" if len(decision.forecasts) >= KEPT_MAX else ""
        yield f"  {answered} of {len(decision.forecasts)} asked{kept} were predicted{took}, with {given}:"
        yield from _table([_HEAD, *(_row(forecast, decision.chosen) for forecast in decision.forecasts)])
        return
    notes = [f"{s.name} ({s.note})" if s.note else f"{s.name} {s.score:.3g}" for s in decision.scores]
    if notes:
        yield f"  nobody was asked for a prediction; scores, 1 is best: {', '.join(notes)}"
    else:
        yield "  nobody was asked for a prediction, and no score is recorded"


def _row(forecast: CandidateForecast, chosen: str) -> tuple[str, ...]:
    mark = "→ " if forecast.name == chosen else "  "
    name = mark + forecast.name[:_NAME_MAX]
    if forecast.note:
        return (name, forecast.note)
    since = f", {forecast.placed_since} placed since" if forecast.placed_since else ""
    return (
        name,
        duration(forecast.e2e_ns),
        duration(forecast.ttft_ns),
        duration(forecast.tpot_mean_ns) if forecast.tpot_mean_ns else "?",
        duration(forecast.others_delay_ns),
        str(forecast.preemptions),
        str(forecast.cached_tokens),
        duration(forecast.snapshot_age_ns) + since,
    )


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    whole = [row for row in rows if len(row) == len(rows[0])]
    first = max(len(row[0]) for row in rows) + 2
    widths = [max(len(row[column]) for row in whole) for column in range(1, len(rows[0]))]
    for row in rows:
        if len(row) != len(rows[0]):
            yield f"    {row[0]:<{first}}{row[1]}"
            continue
        *cells, last = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True))
        # The last column may carry words: it stands at the left.
        yield f"    {row[0]:<{first}}{'  '.join(cells)}  {last.strip()}"


def _happened(explained: Explained) -> Iterator[str]:
    ending = explained.ending
    if ending is None:
        yield "Nothing of its end is recorded: it may be running still, or was not traced to its end."
        return
    yield f"what happened: {ending.outcome}" + (f", {ending.detail}" if ending.detail else "")
    if ending.instances:
        yield f"  decoded by {', '.join(ending.instances)}"
    if ending.continuations:
        times = "once" if ending.continuations == 1 else f"{ending.continuations} times"
        yield f"  went on elsewhere {times}, so the first forecast was of another course"
    if ending.migrations:
        times = "once" if ending.migrations == 1 else f"{ending.migrations} times"
        yield f"  moved with its KV {times}, so the first forecast was of another course"
    placements = [p for p in explained.placements if p.decision.kind == "dispatch"]
    taken = [p for p in placements if p.decision.chosen and not p.trouble]
    if ending.attempts:
        yield from _delivered(ending.attempts, taken, _choices(ending))
        return
    if not taken:
        yield f"  end to end {duration(ending.e2e_ns)} from arrival; its placement is not recorded"
        return
    yield from _table(_errors(taken[-1], ending))
    if taken[-1].forecast is None:
        yield "  (nothing was predicted for the instance that took it)"
    if len(taken) > 1:
        yield "  (counted from, and predicted for, the last first placement of several)"


def _delivered(attempts: list[CascadeAttempt], taken: list[ExplainedPlacement], choices: int) -> Iterator[str]:
    """Of a cascade the attempt that was delivered; its first token is not recorded, as the client may wait for the
    judge.
    """
    attempt = next((each for each in attempts if each.outcome == "delivered"), None)
    if attempt is None:
        return
    placed = [p for p in taken if any(n.startswith(f"{attempt.request}.") for n in p.decision.sequences)]
    if not placed:
        took = duration(attempt.ended_ns - attempt.started_ns)
        yield f"  {attempt.request} took {took}; its placement is not recorded"
        return
    placement = placed[-1]
    forecast = placement.forecast
    rows: list[tuple[str, ...]] = [(f"{attempt.request}, from the decision", "predicted", "actual", "error")]
    whole = attempt.ended_ns - placement.decision.at_ns
    rows.append(("  end to end", *_compared(None if forecast is None else forecast.e2e_ns, whole, duration)))
    rows.append(_lengths(choices, placement.decision.expected_output_tokens, attempt.output_tokens))
    yield from _table(rows)


def _choices(ending: RequestFinished) -> int:
    return max(1, len(ending.finish_reasons))


def _end_ns(ending: RequestFinished) -> int:
    return ending.arrival_ns + ending.e2e_ns


def _lengths(choices: int, expected: float | None, tokens: int) -> tuple[str, str, str, str]:
    name = "  output tokens" if choices == 1 else "  output tokens per choice"
    return name, *_compared(expected, tokens / choices, "{:.4g}".format)


def _errors(placement: ExplainedPlacement, ending: RequestFinished) -> list[tuple[str, ...]]:
    forecast, since_ns = placement.forecast, placement.decision.at_ns
    first = None if ending.ttft_ns is None else ending.arrival_ns + ending.ttft_ns - since_ns
    rows: list[tuple[str, ...]] = [("from the decision", "predicted", "actual", "error")]
    rows.append(("  first token", *_compared(None if forecast is None else forecast.ttft_ns, first, duration)))
    rows.append(
        (
            "  end to end",
            *_compared(None if forecast is None else forecast.e2e_ns, _end_ns(ending) - since_ns, duration),
        )
    )
    expected = placement.decision.expected_output_tokens
    if expected is None:
        expected = ending.predicted_output_tokens
    rows.append(_lengths(_choices(ending), expected, sum(ending.output_tokens)))
    if ending.cached_tokens or (forecast is not None and forecast.cached_tokens):
        predicted = None if forecast is None else forecast.cached_tokens
        rows.append(("  cached tokens", *_compared(predicted, ending.cached_tokens, str)))
    return rows


def _compared(predicted: N | None, actual: N | None, shown: Callable[[N], str]) -> tuple[str, str, str]:
    """Both as they are shown, and the error; a dash for what is not known."""
    known = predicted is not None and actual is not None and actual > 0
    error = f"{100 * (predicted - actual) / actual:+.1f} %" if known else "-"  # type: ignore[operator]
    return "-" if predicted is None else shown(predicted), "-" if actual is None else shown(actual), error

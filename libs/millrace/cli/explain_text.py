"""Tells what is known of a request's placements. Pure: values in, lines out."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.cli.explained import Ending, Explained, ExplainedPlacement
from millrace.cli.field_text import duration
from millrace.contracts.observers import CandidateForecast, CascadeAttempt

#: Placements that are told. A request that found no instance for long has one per try.
PLACEMENTS_MAX = 12
#: Forecasts that ingress keeps of a decision.
KEPT_MAX = 16
_NAME_MAX = 28
_TIMES = ("end to end", "first token", "per token", "others later")
_HEAD = ("  instance", *_TIMES, "preempted", "cached", "snapshot age")


def told(explained: Explained) -> list[str]:
    """Headline, placements in order, what happened."""
    lines = [_headline(explained)]
    if explained.attempts:
        lines += ["", *_attempts(explained)]
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
        parts.append(f"{ending.outcome} after {duration(ending.end_ns - ending.arrival_ns)}")
        parts.append(f"{ending.prompt_tokens} prompt and {ending.output_tokens} output tokens")
    return ", ".join(parts)


def _attempts(explained: Explained) -> Iterator[str]:
    """Attempts of a cascade, in order: score against threshold, by which judge and plan."""
    for attempt in explained.attempts:
        took = duration(max(0, attempt.ended_ns - attempt.started_ns))
        yield f"attempt {attempt.request} on tier {attempt.tier}, {attempt.model}: {attempt.outcome} after {took}"
        yield f"  {_scored(attempt)}, {attempt.output_tokens} output tokens"
        if attempt.detail:
            yield f"  {attempt.detail}"
    if explained.delivered:
        yield f"delivered because: {explained.delivered}"


def _scored(attempt: CascadeAttempt) -> str:
    if attempt.score is None:
        return "no score"
    bound = "at most " if attempt.outcome == "rejected_early" else ""
    by = f"score {bound}{attempt.score:.4g} by {attempt.judge}"
    if attempt.threshold is None:
        return by
    side = "below" if attempt.score < attempt.threshold else "at least"
    return f"{by}, {side} the threshold {attempt.threshold:.4g} of plan {attempt.epoch}"


def _placement(placement: ExplainedPlacement, ending: Ending | None) -> Iterator[str]:
    more = f" and {len(placement.sequences) - 1} more" if len(placement.sequences) > 1 else ""
    after = "" if ending is None else f", {duration(placement.at_ns - ending.arrival_ns)} after arrival"
    goes = f"to {placement.chosen}" if placement.chosen else "to nobody"
    epoch = f" (epoch {placement.epoch})" if placement.epoch else ""
    yield f"{placement.kind} of {placement.sequences[0]}{more} {goes}{epoch}{after}"
    if placement.step_tokens_max:
        yield f"  decodes came first there: steps of at most {placement.step_tokens_max:,} tokens"
    if placement.kind == "migration":
        yield from _migration(placement, ending)
        return
    by = placement.policy
    if placement.fallback:
        by += f", whose fallback {placement.fallback} decided"
    yield f"  by {by}: {placement.reason}"
    if placement.output_tokens:
        yield f"  {placement.output_tokens} output tokens were there already and had to be computed again"
    yield from _considered(placement)
    if placement.trouble:
        yield f"  it came to nothing: {placement.trouble}"


def _migration(placement: ExplainedPlacement, ending: Ending | None) -> Iterator[str]:
    tokens = f", {placement.output_tokens} output tokens in" if placement.output_tokens else ""
    yield f"  with its KV from {placement.source}{tokens}"
    if placement.reason:
        yield f"  asked for by: {placement.reason}"
    if placement.why:
        yield f"  because: {placement.why}"
    if placement.copied:
        yield f"  copied in {placement.copied}"
    if placement.trouble:
        yield f"  it came to nothing: {placement.trouble}"
    elif ending is not None and placement.output_tokens and ending.choices == 1:
        came, took = ending.output_tokens - placement.output_tokens, ending.end_ns - placement.at_ns
        yield f"  {came} output tokens came since, the last one {duration(max(0, took))} after it"


def _considered(placement: ExplainedPlacement) -> Iterator[str]:
    if placement.forecasts:
        answered = sum(not f.note for f in placement.forecasts)
        took = f" in {duration(placement.asked_ns)}" if placement.asked_ns else ""
        length = placement.expected_output_tokens
        given = "an unknown output length" if length is None else f"{length:.4g} output tokens expected"
        kept = " (no more are kept)" if len(placement.forecasts) >= KEPT_MAX else ""
        yield f"  {answered} of {len(placement.forecasts)} asked{kept} were predicted{took}, with {given}:"
        yield from _table(_forecasts(placement))
        return
    notes = [f"{s.name} ({s.note})" if s.note else f"{s.name} {s.score:.3g}" for s in placement.scores]
    if notes:
        yield f"  nobody was asked for a prediction; scores, 1 is best: {', '.join(notes)}"
    else:
        yield "  nobody was asked for a prediction, and no score is recorded"


def _forecasts(placement: ExplainedPlacement) -> list[tuple[str, ...]]:
    """Head and a row per candidate."""
    return [_HEAD, *(_row(forecast, placement.chosen) for forecast in placement.forecasts)]


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
    yield f"what happened: {ending.outcome}" + (f", {ending.trouble}" if ending.trouble else "")
    if ending.instances:
        yield f"  decoded by {', '.join(ending.instances)}"
    if ending.continuations:
        times = "once" if ending.continuations == 1 else f"{ending.continuations} times"
        yield f"  went on elsewhere {times}, so the first forecast was of another course"
    if ending.migrations:
        times = "once" if ending.migrations == 1 else f"{ending.migrations} times"
        yield f"  moved with its KV {times}, so the first forecast was of another course"
    taken = [p for p in explained.placements if p.chosen and not p.trouble and p.kind == "dispatch"]
    if explained.attempts:
        yield from _delivered(explained.attempts, taken, ending.choices)
        return
    if not taken:
        yield f"  end to end {duration(ending.end_ns - ending.arrival_ns)} from arrival; its placement is not recorded"
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
    placed = [p for p in taken if any(name.startswith(f"{attempt.request}.") for name in p.sequences)]
    if not placed:
        took = duration(attempt.ended_ns - attempt.started_ns)
        yield f"  {attempt.request} took {took}; its placement is not recorded"
        return
    placement = placed[-1]
    forecast = placement.forecast
    rows: list[tuple[str, ...]] = [(f"{attempt.request}, from the decision", "predicted", "actual", "error")]
    whole = attempt.ended_ns - placement.at_ns
    rows.append(("  end to end", *_compared(None if forecast is None else forecast.e2e_ns, whole)))
    rows.append(_lengths(_of_choices(choices), placement.expected_output_tokens, attempt.output_tokens / choices))
    yield from _table(rows)


def _of_choices(choices: int) -> str:
    return "  output tokens" if choices == 1 else "  output tokens per choice"


def _lengths(name: str, expected: float | None, mean: float) -> tuple[str, str, str, str]:
    error = "-" if expected is None or not mean else f"{100 * (expected - mean) / mean:+.1f} %"
    return name, "-" if expected is None else f"{expected:.4g}", f"{mean:.4g}", error


def _errors(placement: ExplainedPlacement, ending: Ending) -> list[tuple[str, ...]]:
    forecast = placement.forecast
    first = None if ending.first_token_ns is None else ending.first_token_ns - placement.at_ns
    whole = ending.end_ns - placement.at_ns
    rows: list[tuple[str, ...]] = [("from the decision", "predicted", "actual", "error")]
    rows.append(("  first token", *_compared(None if forecast is None else forecast.ttft_ns, first)))
    rows.append(("  end to end", *_compared(None if forecast is None else forecast.e2e_ns, whole)))
    expected = placement.expected_output_tokens
    if expected is None:
        expected = ending.expected_output_tokens
    rows.append(_lengths(_of_choices(ending.choices), expected, ending.output_tokens / ending.choices))
    if ending.cached_tokens or (forecast is not None and forecast.cached_tokens):
        rows.append(_cached(None if forecast is None else forecast.cached_tokens, ending.cached_tokens))
    return rows


def _cached(predicted: int | None, actual: int) -> tuple[str, str, str, str]:
    error = "-" if predicted is None or not actual else f"{100 * (predicted - actual) / actual:+.1f} %"
    return "  cached tokens", "-" if predicted is None else str(predicted), str(actual), error


def _compared(predicted_ns: int | None, actual_ns: int | None) -> tuple[str, str, str]:
    known = predicted_ns is not None and actual_ns is not None and actual_ns > 0
    error = f"{100 * (predicted_ns - actual_ns) / actual_ns:+.1f} %" if known else "-"  # type: ignore[operator]
    return (
        "-" if predicted_ns is None else duration(predicted_ns),
        "-" if actual_ns is None else duration(actual_ns),
        error,
    )

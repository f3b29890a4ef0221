"""Fits the choice of tiers by prompt to recorded answers, and says what it saves. Pure.

Ways of serving are compared on prompts that they were not fitted to: a plain cascade, one model alone, a router without
a judge, and both together. Costs are of engine time, so that small wrong answers that are long count as such.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from millrace.cascade.entry import EntryFile, EntryModel, choose_tiers, fit_entry, prompt_features
from millrace.cascade.sample import Booleans, Floats, Integers
from millrace.judging.confidence import ConfidenceModel, fit_confidence
from millrace.judging.files import RecordedAnswers

#: Thresholds and values of a right answer, in costs of a mean answer of the last model, that are tried.
THRESHOLDS = (0.0, 10.0, 25.0, 40.0, 55.0, 70.0, 80.0, 90.0, 97.0, 101.0)
VALUES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1000.0)

#: Parts of the prompts, each estimated by trees that saw the others.
FOLDS = 5

#: Share of the prompts that judge, and how much cheaper than the plain cascade the choice by prompt must be there.
HOLDOUT = 0.25
SAVING_MIN = 1.3


class AnsweredPrompts(NamedTuple):
    """Answers of C models to N prompts.

    Attributes:
        rows: (N, features) of the prompts.
        logprobs: By model, N lists.
        right, costs: (N, C); any unit.
    """

    rows: Floats
    logprobs: tuple[list[list[float]], ...]
    right: Booleans
    costs: Floats

    def part(self, indices: Integers) -> AnsweredPrompts:
        logprobs = tuple([lists[index] for index in indices] for lists in self.logprobs)
        return AnsweredPrompts(self.rows[indices], logprobs, self.right[indices], self.costs[indices])


class JudgedPrompts(NamedTuple):
    """Prompts with what every model did.

    Attributes:
        scores, right, costs: (N, C); scores of the judges.
        chances: (N, C), estimates of P(right | prompt).
    """

    scores: Floats
    right: Booleans
    costs: Floats
    chances: Floats


class ServedPrompts(NamedTuple):
    """Mean quality (%) and cost of a request."""

    quality: float
    cost: float


class ServingWay(NamedTuple):
    """One way of serving.

    Attributes:
        thresholds: One per tier but the last.
        value: Of a right answer, where tiers are chosen by prompt; None where ``fixed`` is the first and last tier.
        costs: (C,), by which they are chosen.
    """

    thresholds: tuple[float, ...]
    value: float | None
    costs: Floats
    fixed: tuple[int, int]

    def serve(self, prompts: JudgedPrompts) -> ServedPrompts:
        count = len(prompts.right)
        if self.value is None:
            first, last = (np.full(count, tier, dtype=np.int64) for tier in self.fixed)
        else:
            first, last = choose_tiers(prompts.chances, self.costs, value=self.value)
        return _serve(prompts, self.thresholds, first, last)


class EntryResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of training.

    Attributes:
        file: Fitted to all prompts.
        threshold: At which its value was chosen, of every tier but the last.
        saving: Cost of a plain cascade over its cost, on held-out prompts at the quality it reached there.
        alone: Cost of the last model alone over its cost there.
        quality, plain_quality, last_quality: There, %: its own, the plain cascade's and the last model's.
    """

    file: EntryFile
    threshold: float
    saving: float
    alone: float
    quality: float
    plain_quality: float
    last_quality: float

    @property
    def accepted(self) -> bool:
        return self.saving >= SAVING_MIN


def train_entry(
    recorded: Sequence[RecordedAnswers], models: Sequence[str], token_costs: Sequence[float], *, target: float
) -> EntryResult:
    """Fit to three quarters of the prompts, judge by the rest, and fit anew to all.

    Args:
        models: As the recording names them, smallest first.
        token_costs: Of a decoded token of each model, any unit.
        target: Share of the last model's quality to keep.

    Raises:
        ValueError: too few prompts that all models answered.
    """
    rows = [row for row in recorded if all(model in row.answers for model in models)]
    answers = answers_of(rows, models, token_costs)
    held = np.array([zlib.crc32(row.prompt.encode()) / 2**32 < HOLDOUT for row in rows], dtype=np.bool_)
    seen, judged, _ = fitted(answers.part(np.flatnonzero(~held)), answers.part(np.flatnonzero(held)), models)
    ways = ways_of(seen, target * 100 * float(seen.right[:, -1].mean()))
    learnt, alone = ways["entry tier and judge"], ways["last model alone"]
    served, plain = learnt.serve(judged), ways["plain cascade"].serve(judged)
    assert learnt.value is not None, "it chooses by prompt"
    whole = fit_entry(answers.rows, answers.right, tuple(models)).file
    file = msgspec.structs.replace(
        whole, costs=tuple(float(cost) for cost in answers.costs.mean(axis=0)), value=learnt.value
    )
    return EntryResult(
        file=file,
        threshold=learnt.thresholds[0],
        saving=plain_at(judged, served.quality).cost / served.cost,
        alone=alone.serve(judged).cost / served.cost,
        quality=served.quality,
        plain_quality=plain.quality,
        last_quality=100 * float(judged.right[:, -1].mean()),
    )


def answers_of(rows: Sequence[RecordedAnswers], models: Sequence[str], token_costs: Sequence[float]) -> AnsweredPrompts:
    """Recorded rows as arrays; every model answered each."""
    told = [[row.answers[model] for model in models] for row in rows]
    return AnsweredPrompts(
        rows=np.array([prompt_features(row.prompt, max(1, row.prompt_tokens)) for row in rows]),
        logprobs=tuple([each[index].values() for each in told] for index in range(len(models))),
        right=np.array([[one.right for one in each] for each in told], dtype=np.bool_),
        costs=np.array([[one.length for one in each] for each in told]) * np.array(token_costs),
    )


def fitted(
    seen: AnsweredPrompts, held: AnsweredPrompts, models: Sequence[str]
) -> tuple[JudgedPrompts, JudgedPrompts, EntryModel]:
    """Both parts as judges and trees see them that were fitted to the first; there, by folds."""
    judges = [fit_confidence(model, seen.logprobs[index], seen.right[:, index]) for index, model in enumerate(models)]
    chances = np.zeros(seen.right.shape)
    for fold in range(FOLDS):
        inside = np.arange(len(seen.right)) % FOLDS == fold
        model = fit_entry(seen.rows[~inside], seen.right[~inside], tuple(models))
        chances[inside] = model.probabilities_many(seen.rows[inside])
    entry = fit_entry(seen.rows, seen.right, tuple(models))
    return _judged(seen, judges, chances), _judged(held, judges, entry.probabilities_many(held.rows)), entry


def _judged(answers: AnsweredPrompts, judges: Sequence[ConfidenceModel], chances: Floats) -> JudgedPrompts:
    scores = [
        [judge.score(values) or 0.0 for values in lists] for judge, lists in zip(judges, answers.logprobs, strict=True)
    ]
    return JudgedPrompts(np.array(scores).T, answers.right, answers.costs, chances)


def ways_of(seen: JudgedPrompts, wanted: float) -> dict[str, ServingWay]:
    """Each way of serving with what is cheapest among what keeps a quality (%) on these prompts."""
    tiers = seen.right.shape[1]
    none, last, costs = (0.0,) * (tiers - 1), tiers - 1, seen.costs.mean(axis=0)
    values = [value * float(costs[-1]) for value in VALUES]
    router = [ServingWay(none, value, costs, (0, last)) for value in values]
    both = [ServingWay((same,) * (tiers - 1), value, costs, (0, last)) for value in values for same in THRESHOLDS]
    return {
        "last model alone": ServingWay(none, None, costs, (last, last)),
        "plain cascade": _cheapest(_plain(seen), seen, wanted),
        "router, no judge": _cheapest(router, seen, wanted),
        "entry tier and judge": _cheapest(both, seen, wanted),
    }


def plain_at(prompts: JudgedPrompts, quality: float) -> ServedPrompts:
    """The cheapest plain cascade of at least this quality, its thresholds picked on the very prompts it is judged by.

    That favours the plain cascade. Where none reaches the quality, the best one.
    """
    served = [way.serve(prompts) for way in _plain(prompts)]
    reaching = [each for each in served if each.quality >= quality]
    if reaching:
        return min(reaching, key=lambda each: each.cost)
    return max(served, key=lambda each: (each.quality, -each.cost))


def _plain(prompts: JudgedPrompts) -> list[ServingWay]:
    tiers = prompts.right.shape[1]
    costs = prompts.costs.mean(axis=0)
    grid = itertools.product(THRESHOLDS, repeat=tiers - 1)
    return [ServingWay(thresholds, None, costs, (0, tiers - 1)) for thresholds in grid]


def _serve(prompts: JudgedPrompts, thresholds: Sequence[float], first: Integers, last: Integers) -> ServedPrompts:
    count, tiers = prompts.right.shape
    open_, cost, right = np.zeros(count, dtype=bool), np.zeros(count), np.zeros(count, dtype=bool)
    for tier in range(tiers):
        open_ |= first == tier
        cost += np.where(open_, prompts.costs[:, tier], 0.0)
        accepts = prompts.scores[:, tier] >= (thresholds[tier] if tier < tiers - 1 else 0.0)
        ends = open_ & (accepts | (last == tier))
        right |= ends & prompts.right[:, tier]
        open_ &= ~ends
    return ServedPrompts(100 * float(right.mean()), float(cost.mean()))


def _cheapest(ways: Sequence[ServingWay], prompts: JudgedPrompts, wanted: float) -> ServingWay:
    served = [(way, way.serve(prompts)) for way in ways]
    keeping = [(way, each) for way, each in served if each.quality >= wanted]
    if not keeping:
        return max(served, key=lambda pair: pair[1].quality)[0]
    return min(keeping, key=lambda pair: pair[1].cost)[0]

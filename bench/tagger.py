"""Length prediction: Block's table 1 against simpler predictors, learning online, and the time of one answer.

Trained on the older three quarters of each set, judged by the newest quarter. The recording of a shipped model
(bench/lengths/recordings, real vLLM at temperature 1) has prompts; public data sets have prompt *lengths* only, so all
that can be learnt from them is how output length depends on that. Block's figures (its table 1, RoBERTa on ShareGPT
prompts): mean error 78.755 tokens, error rate 24.4 %, Acc-50 69.93 %, Acc-100 77.15 %.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from millrace.actor.effects import Reply
from millrace.contracts.message import Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.lengths.baselines import WINDOW, HistoryHistogram, HistoryModel
from millrace.lengths.estimate import LearningModel, LengthEstimate, Row
from millrace.lengths.features import MAX_TOKENS
from millrace.lengths.files import PRETRAINED
from millrace.lengths.samples import LengthSample, matrix
from millrace.lengths.scoring import Numbers, interval, score
from millrace.lengths.training import baseline_predictions, train, train_candidate

from bench.lengths.requests import LengthRecord, read_requests, samples_of
from services.tagger.actor import TaggerActor
from services.tagger.config import LearningConfig
from services.tagger.effects import LengthsLoaded, LengthsTrained, TrainLengths

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = Path(__file__).parent / "lengths" / "recordings"
DATA = Path(os.environ.get("MILLRACE_DATA", ROOT.parent / "shared" / "data"))
TRAINED = 0.75
SEED = 7

#: File below MILLRACE_DATA, columns of prompt and output tokens.
LENGTH_SETS = {
    "ShareGPT 10k (Llama-2)": (
        "sharegpt_block_10k/sharegpt_val_10k_llama2.csv",
        "num_prefill_tokens",
        "num_decode_tokens",
    ),
    "Azure 2023 conversation": ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", "ContextTokens", "GeneratedTokens"),
    "Azure 2023 code": ("azure_llm_2023/AzureLLMInferenceTrace_code.csv", "ContextTokens", "GeneratedTokens"),
    "arXiv summarisation": ("arxiv_summarization_lengths", "num_prefill_tokens", "num_decode_tokens"),
}


class Split(NamedTuple):
    """Features and lengths, older and newer."""

    seen: tuple[Numbers, Numbers]
    held: tuple[Numbers, Numbers]


def recorded(model: str) -> list[LengthRecord]:
    """The recording of a shipped model, in the order in which requests were drawn."""
    return read_requests(RECORDINGS / f"{model}.jsonl.gz")


def lengths_only(path: str, prompt: str, output: str) -> list[LengthRecord]:
    """Rows of a public data set; empty where it is not here."""
    place = DATA / path
    files = sorted(place.glob("*.csv")) if place.is_dir() else [place] if place.exists() else []
    rows = [row for file in files for row in csv.DictReader(file.open())]
    pairs = [(int(row[prompt]), int(row[output])) for row in rows]
    return [LengthRecord(prompt_tokens=asked, output_tokens=[said]) for asked, said in pairs if said > 0]


class ConstantMean:
    """Says the same of every request: mean and quantiles of the last outcomes."""

    def __init__(self, window: int = WINDOW) -> None:
        self._lengths: deque[int] = deque(maxlen=window)
        self._estimate: LengthEstimate | None = None

    def learn(self, row: Row, length: int) -> None:
        """Takes one outcome."""
        self._lengths.append(length)
        self._estimate = None

    def estimate(self, row: Row) -> LengthEstimate | None:
        """Mean, median and 90th percentile of what is remembered."""
        if self._estimate is None and self._lengths:
            p50, p90 = np.quantile(self._lengths, (0.5, 0.9))
            self._estimate = LengthEstimate(float(np.mean(self._lengths)), float(p50), float(p90))
        return self._estimate


def split(requests: list[LengthRecord]) -> Split:
    """Older and newer part, features with the history of their time."""
    samples = list(samples_of(requests))
    cut = int(len(samples) * TRAINED)
    return Split(matrix(samples[:cut]), matrix(samples[cut:]))


def predictions(parts: Split) -> Iterator[tuple[str, Numbers, int]]:
    """(name, (outcomes, 3) predictions, column taken as the point) of every predictor on the newer part."""
    rows, _ = parts.held
    bounds = rows[:, MAX_TOKENS, None]
    baselines: tuple[tuple[str, Callable[[], LearningModel], int], ...] = (
        ("constant mean", ConstantMean, 0),
        ("constant median", ConstantMean, 1),
        ("log2 histogram (AIBrix), mean", HistoryHistogram, 0),
        ("log2 histogram (AIBrix), median", HistoryHistogram, 1),
        ("history of template and task, mean", HistoryModel, 0),
    )
    for name, make, column in baselines:
        yield name, np.clip(baseline_predictions(make(), parts.seen, rows), 1, bounds), column
    said = np.clip(train(*parts.seen, model="bench").estimate_many(rows), 1, bounds)
    yield "LightGBM, mean", said, 0
    yield "LightGBM, median", said, 1


def table(title: str, parts: Split) -> None:
    """Prints Block's figures of every predictor."""
    lengths = parts.held[1]
    print(f"\n{title}: trained on {len(parts.seen[1])}, judged by {len(lengths)} outcomes; mean length "
          f"{lengths.mean():.0f}, median {np.median(lengths):.0f}, p90 {np.quantile(lengths, 0.9):.0f}")  # fmt: skip
    print(f"{'':<36}{'mean error, 95 % CI':>26}{'rate':>8}{'Acc-50':>8}{'Acc-100':>9}{'rel.':>7}{'<=p90':>8}")
    for name, said, column in predictions(parts):
        low, high = interval(np.abs(said[:, column] - lengths), seed=SEED)
        found = score(said, lengths, point=column)
        print(f"{name:<36}{found.error:>11.1f} [{low:>5.1f}, {high:>5.1f}]{found.error_rate:>8.1%}{found.acc_50:>8.1%}"
              f"{found.acc_100:>9.1%}{found.relative_error:>7.2f}{found.covered_90:>8.1%}")  # fmt: skip


def online(requests: list[LengthRecord], *, step: int) -> None:
    """Feeds the actor requests and outcomes in order; trainings take no time here. Prints the error as it learns."""
    learning = LearningConfig(pretrained=False, retrain_outcomes=500, outcomes_min=300, retrain_pause_s=0.0)
    actor = TaggerActor(name="tagger-0", cluster="bench", incarnation=1, learning=learning)
    errors: list[float] = []
    print(f"\nlearning online from nothing, {len(requests)} requests (mean error of the median, tokens; who answered)")
    for number, one in enumerate(requests):
        asked = one.asked("m", str(number))
        tag = _tag(actor, asked, number)
        errors.append(abs((tag.p50 or 0.0) - one.output_tokens[0]))
        for effect in actor.handle(Message(_finished(one, asked)), number):
            if isinstance(effect, TrainLengths):
                result = train_candidate(effect.job)
                actor.handle(Message(LengthsTrained(model="m", result=result)), number)
        if (number + 1) % step == 0:
            print(f"  {number + 1 - step:>5} to {number + 1:<5} {np.mean(errors[-step:]):>7.1f}  {tag.source}")
    print(f"  trainings: {actor.metrics.trainings.plain()}; answers: {actor.metrics.answers.plain()}")


def _tag(actor: TaggerActor, asked: TagRequest, now_ns: int) -> LengthTag:
    (reply,) = actor.handle(Message(asked, reply_to="x"), now_ns)
    assert isinstance(reply, Reply)
    assert isinstance(reply.body, LengthTag)
    return reply.body


def _finished(one: LengthRecord, asked: TagRequest) -> RequestFinished:
    return RequestFinished(
        request=asked.request,
        model="m",
        outcome="completed",
        ingress="bench",
        output_tokens=one.output_tokens,
        finish_reasons=one.finish_reasons,
    )


def answer_time(requests: list[LengthRecord], samples: list[LengthSample]) -> None:
    """Time of the whole handler, with a model in force: short prompts as recorded, and 2,048 characters of text."""
    payload = train(*matrix(samples), model="m").encode()
    actor = TaggerActor(name="tagger-0", cluster="bench", incarnation=1)
    actor.handle(Message(LengthsLoaded(models={"m": payload}, outcomes={}, problems={})), 0)
    long = ("Please write about the 3 rivers near 12 towns, and why. " * 40)[:2048]
    print(f"\ntime of one answer, model in force ({len(payload) / 1024:.0f} KiB), one thread, us; load "
          f"{os.getloadavg()[0]:.1f}, {len(requests)} answers each")  # fmt: skip
    for name, prompt in (("prompts as recorded", None), ("prompts of 2,048 characters", long)):
        times, work = [], []
        for number, one in enumerate(requests):
            asked = one.asked("m", str(number))
            message = Message(asked if prompt is None else _with_prompt(asked, prompt), reply_to="x")
            began, used = time.perf_counter_ns(), time.thread_time_ns()
            actor.handle(message, number)
            work.append((time.thread_time_ns() - used) / 1e3)
            times.append((time.perf_counter_ns() - began) / 1e3)
        for clock, values in (("elapsed", times), ("CPU", work)):
            p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
            print(f"  {name:<28} {clock:<8} p50 {p50:>5.0f}  p90 {p90:>5.0f}  p99 {p99:>6.0f}")


def _with_prompt(asked: TagRequest, prompt: str) -> TagRequest:
    return TagRequest(
        request=asked.request, model=asked.model, prompt_tokens=600, max_tokens=asked.max_tokens, prompt=prompt
    )


def new_prompts(requests: list[LengthRecord]) -> list[LengthRecord]:
    """Each prompt once, where it came first."""
    return list({one.prompt: one for one in reversed(requests)}.values())[::-1]


def main() -> None:
    """Prints every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["millrace-mini", "millrace-micro", "millrace-nano"])
    parser.add_argument("--write", action="store_true", help="train the models that ship anew, from all of a recording")
    options = parser.parse_args()
    for model in options.models if options.write else ():
        rows, lengths = matrix(list(samples_of(recorded(model))))
        (PRETRAINED / f"{model}.lengths").write_bytes(train(rows, lengths, model=model).encode())
    print(f"machine load {os.getloadavg()[0]:.1f} at the start")
    for model in options.models:
        requests = recorded(model)
        table(f"{model}, temperature 1, one in ten prompts seen before", split(requests))
        table(f"{model}, temperature 1, every prompt new", split(new_prompts(requests)))
        online(requests, step=500)
        answer_time(requests, list(samples_of(requests)))
    for title, columns in LENGTH_SETS.items():
        found = lengths_only(*columns)
        if found:
            table(f"{title}, prompt length only", split(found))
        else:
            print(f"\n{title}: not here (MILLRACE_DATA)")


if __name__ == "__main__":
    main()

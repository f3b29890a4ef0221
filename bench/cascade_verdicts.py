"""Verdicts of the judging model that ships, asked through the cluster's own API on real vLLM.

The first model of the cascade answers held-out prompts by its own name, which tells whether it is right; the cascade
gets the same prompts, and its first attempt's score is the judge's. Both are greedy, so that the answers are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from millrace.contracts.codec import decode
from millrace.contracts.observers import RequestFinished
from millrace.contracts.subjects import Subjects
from millrace.judging.calibration import area_under_curve, calibration_error

from bench.judged.record import draw
from models.training.tasks import Example
from tests.testbed.up_cluster import UpRig

SMALL, LARGE, JUDGE = "millrace-nano", "millrace-mini", "millrace-judge"
CASCADE = "cascade"
TOKENS_MAX = 256
AT_ONCE = 4
SEED = 77


class Verdicts:
    """Scores of the first model's answers, with the truth, and what the questions cost.

    Attributes:
        judged: (request, score, whether the answer is right).
        kinds: Kind of judge that scored the first answer, by request.
        delivered: Whether each delivered answer is right.
        questions: Outcomes of the calls to the judging model.
    """

    def __init__(self) -> None:
        self.judged: list[tuple[str, float, bool]] = []
        self.kinds: dict[str, str] = {}
        self.delivered: list[bool] = []
        self.models: Counter[str] = Counter()
        self.questions: list[RequestFinished] = []

    async def hear(self, message: Any) -> None:
        """Takes an outcome."""
        body = decode(message.data)
        if not isinstance(body, RequestFinished):
            return
        if body.model == JUDGE:
            self.questions.append(body)
        for attempt in body.attempts[:1]:
            self.kinds[body.request] = attempt.judge

    def report(self) -> str:
        """Area, calibration error and cost."""
        by_model = [(score, right) for request, score, right in self.judged if self.kinds.get(request) == "llm"]
        scores, truth = np.array([one[0] / 100 for one in by_model]), np.array([one[1] for one in by_model])
        e2e_ms = sorted(one.e2e_ns / 1e6 for one in self.questions)
        tokens = [one.prompt_tokens for one in self.questions]
        kinds = Counter(self.kinds.get(request, "not heard") for request, _, _ in self.judged)
        return "\n".join(
            [
                f"{len(self.judged)} requests; first answers scored by: {dict(kinds)}",
                f"area {area_under_curve(scores, truth):.3f}, calibration error {calibration_error(scores, truth):.3f}",
                f"right: {SMALL} alone {statistics.mean(right for _, _, right in self.judged):.1%}, the cascade "
                f"{statistics.mean(self.delivered):.1%}; answered by {dict(self.models)}",
                f"questions: {len(self.questions)}, {statistics.mean(tokens):.0f} tokens, from dispatch to end "
                f"{statistics.median(e2e_ms):.1f} ms (median), {e2e_ms[int(0.95 * len(e2e_ms))]:.1f} ms (p95)",
            ]
        )


def main() -> int:
    """Starts three models on vLLM, asks, and prints the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=60.0, help="no request begins after so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--cascade", "nano,mini", "--judge", "llm"]
        rig = UpRig.of_words(Path(folder) / "cluster", words, model=CASCADE)
        rig.start()
        try:
            print(asyncio.run(_run(rig, draw(options.requests, SEED), options.seconds)).report())
        finally:
            rig.stop()
    return 0


async def _run(rig: UpRig, examples: list[Example], seconds: float) -> Verdicts:
    verdicts, gate = Verdicts(), asyncio.Semaphore(AT_ONCE)
    ends = time.monotonic() + seconds
    bus = await rig.operator_bus()
    await bus.subscribe(Subjects(rig.cluster_file()["cluster"]).outcomes(), cb=verdicts.hear)
    async with httpx.AsyncClient(base_url=rig.url, timeout=120) as client:

        async def one(example: Example) -> None:
            async with gate:
                if time.monotonic() < ends:
                    await _ask(client, example, verdicts)

        await asyncio.gather(*map(one, examples))
    await asyncio.sleep(0.5)  # the last outcomes
    await bus.close()
    return verdicts


async def _ask(client: httpx.AsyncClient, example: Example, verdicts: Verdicts) -> None:
    body = {"temperature": 0, "max_tokens": TOKENS_MAX, "messages": [{"role": "user", "content": example.prompt}]}
    alone = (await client.post("/v1/chat/completions", json=body | {"model": SMALL})).raise_for_status().json()
    told = (await client.post("/v1/chat/completions", json=body | {"model": CASCADE})).raise_for_status().json()
    right = example.check(alone["choices"][0]["message"]["content"] or "")
    first = told["cascade"]["attempts"][0]
    verdicts.judged.append((told["id"].removeprefix("chatcmpl-"), first["score"] or 0.0, right))
    verdicts.delivered.append(example.check(told["choices"][0]["message"]["content"] or ""))
    verdicts.models[told["model"]] += 1


if __name__ == "__main__":
    raise SystemExit(main())

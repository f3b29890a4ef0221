"""Cascades over a real socket: bodies, streams, comments and headers, read by the clients that people use."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from millrace.contracts.observers import CascadeAttempt

from services.ingress.calls.messages import (
    AcceptCall,
    Call,
    CascadeReport,
    ChoiceDelta,
    CompleteCall,
    DeliverDeltas,
    Usage,
)
from tests.live.ingress_rig import FakeCore, Rig, event_loop_policy, served  # noqa: F401

MESSAGES: Any = [{"role": "user", "content": "hi"}]

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")


class CascadeCore(FakeCore):
    """Answers calls of a cascade as its last member would, after throwing away the first one's answer.

    Attributes:
        comments: Sent before it is known who answers.
        look: ``OpenCalls.keep_alive``.
    """

    look: Callable[[float], None]

    def __init__(self) -> None:
        super().__init__()
        self.comments = 0

    async def _run(self, call: Call) -> None:
        if not call.members:
            await super()._run(call)
            return
        for look in range(2 * self.comments):  # every other one finds that nothing was written since
            self.look(10.0 * look)
        report = _report(call)
        self._do(AcceptCall(request=call.request, answering=report.attempts[-1]))
        usage = report.usages[-1]
        self._do(DeliverDeltas(request=call.request, deltas=[ChoiceDelta(0, "fine ", 1)], usage=usage))
        last = [ChoiceDelta(0, "day", 1, "stop")]
        self._do(DeliverDeltas(request=call.request, deltas=last, usage=usage, report=report))
        self._do(CompleteCall(request=call.request, usage=usage, report=report))


def _report(call: Call) -> CascadeReport:
    first, last = call.members[0], call.members[-1]
    thrown = CascadeAttempt(request="", tier=0, model=first.model, outcome="rejected", score=41.5, threshold=70.0)
    kept = CascadeAttempt(request="", tier=1, model=last.model, outcome="delivered", score=92.25, threshold=70.0)
    usages = [Usage(len(first.prompts[0]), 7), Usage(len(last.prompts[0]), 2)]
    tried = [thrown, kept]
    return CascadeReport(
        name=call.model, tier=1, model=last.model, score=92.25, reason="score", attempts=tried, usages=usages
    )


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with served(tmp_path, core=CascadeCore(), cascades={"auto": ["tiny", "tools"]}) as rig:
        rig.core.look = rig.calls.keep_alive
        yield rig
        assert rig.bugs == []


async def test_openai_reads_who_answered_and_what_all_attempts_cost(client: openai.AsyncOpenAI, rig: Rig):
    raw = await client.chat.completions.with_raw_response.create(
        model="auto", messages=MESSAGES, extra_body={"cascade": {"quality": 80}}
    )
    answer = raw.parse()
    assert (answer.model, answer.choices[0].message.content) == ("tools", "fine day")
    told = (answer.model_extra or {})["cascade"]
    assert (told["tier"], told["score"], told["reason"]) == (1, 92.25, "score")
    assert [attempt["outcome"] for attempt in told["attempts"]] == ["rejected", "delivered"]
    assert answer.usage.completion_tokens == 2
    attempts = (answer.usage.model_extra or {})["cascade"]["attempts"]
    assert [attempt["completion_tokens"] for attempt in attempts] == [7, 2]
    assert raw.headers["x-millrace-model"] == "tools"
    assert raw.headers["x-millrace-tier"] == "1"
    assert raw.headers["x-millrace-score"] == "92.25"
    assert rig.core.calls[0].cascade.quality == 80.0
    assert [member.model for member in rig.core.calls[0].members] == ["tiny", "tools"]


@pytest.mark.parametrize("comments", [0, 3])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_openai_reads_a_stream_over_its_comments(
    client: openai.AsyncOpenAI, rig: Rig, comments: int, include_usage: bool
):
    assert isinstance(rig.core, CascadeCore)
    rig.core.comments = comments
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="auto", messages=MESSAGES, stream=True, stream_options={"include_usage": include_usage}
        )
    ]
    assert {chunk.model for chunk in chunks} == {"tools"}
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "fine day"
    assert (chunks[-1].model_extra or {})["cascade"]["tier"] == 1
    assert "cascade" not in (chunks[0].model_extra or {})
    if include_usage:
        assert chunks[-1].usage is not None
        assert len((chunks[-1].usage.model_extra or {})["cascade"]["attempts"]) == 2


async def test_comments_open_the_stream_and_leave_no_headers_to_say_who_answers(rig: Rig):
    assert isinstance(rig.core, CascadeCore)
    body = {"model": "auto", "prompt": "hi", "stream": True}
    async with httpx.AsyncClient(base_url=rig.url) as http:
        plain = await http.post("/v1/completions", json=body)
        rig.core.comments = 2
        kept = await http.post("/v1/completions", json=body)
    assert plain.headers["x-millrace-model"] == "tools"
    assert "keep-alive" not in plain.text
    assert "x-millrace-model" not in kept.headers
    assert kept.text.startswith(": keep-alive\n\n: keep-alive\n\ndata: ")
    assert kept.text.endswith("data: [DONE]\n\n")


async def test_langchain_reads_whole_answers_streams_and_batches(rig: Rig):
    chat = ChatOpenAI(base_url=f"{rig.url}/v1", api_key="none", model="auto", max_retries=0)
    answer = await chat.ainvoke("hi")
    assert answer.content == "fine day"
    assert answer.response_metadata["model_name"] == "tools"
    pieces = [piece async for piece in chat.astream("hi", stream_usage=True)]
    assert "".join(str(piece.content) for piece in pieces) == "fine day"
    batch = await chat.agenerate([[HumanMessage("a")], [HumanMessage("b")]])  # it adds up what both used
    assert len(batch.generations) == 2

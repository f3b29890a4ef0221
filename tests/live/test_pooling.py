"""Embeddings of a whole cluster, by OpenAI's client: modelled engines give equal vectors for equal texts."""

import asyncio

import openai
import pytest

from tests.live.clusters import modelled_cluster
from tests.live.faults import kill
from tests.testbed.up_cluster import UpRig

MODEL = "m"
TEXTS = [f"text number {number}" for number in range(40)]

#: On a full machine a process takes longer to come back than a call waits that nobody had.
WORDS = ("--set", "worker.modelled.speed=0.2", "--set", "ingress.dispatch.wait_s=120")

rig = modelled_cluster(*WORDS, max_model_len=4096)


def test_openais_client_gets_a_vector_for_each_text(rig: UpRig):
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS)  # as base64, unless told
        assert [entry.index for entry in answer.data] == list(range(len(TEXTS)))
        assert len({tuple(entry.embedding) for entry in answer.data}) == len(TEXTS)
        plain = client.embeddings.create(model=MODEL, input=TEXTS[3], encoding_format="float")
        assert plain.data[0].embedding == answer.data[3].embedding
        assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model=MODEL, input="a" * 5000)
        assert refused.value.param == "input"


async def test_a_killed_worker_costs_no_vector(rig: UpRig):
    client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
    before = (await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")).data
    dispatched = await rig.metric("millrace_ingress_dispatches_total")
    worker = rig.log_pids("worker-0")[0]
    asked = [
        asyncio.create_task(client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float"))
        for _ in range(48)  # the first answer shall not be the last one
    ]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    kill(worker)
    assert not all(call.done() for call in asked)
    for answer in await asyncio.gather(*asked):
        assert [entry.embedding for entry in answer.data] == [entry.embedding for entry in before]
    await client.close()
    # Whether an instance had taken those that were lost depends on how far the worker had read.
    again = await rig.metric("millrace_ingress_dispatches_total") - dispatched - len(asked) * len(TEXTS)
    assert again > 0
    await rig.well(2)

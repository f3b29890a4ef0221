"""Ingress names the blocks of prompts for predictors: in questions, decisions and outcomes."""

from typing import Any

import msgspec
from millrace.contracts.ingress import FinishReason
from millrace.contracts.local import KeyChanged
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.predictor import PredictLatency
from millrace.contracts.status import InstanceRecord
from millrace.contracts.worker import Sampling
from millrace.kvcache.chain import extend_chain, unpack_hashes

from services.ingress.config import DispatchConfig, IngressConfig
from services.ingress.dispatch.prefix_blocks import BLOCKS_MAX, PrefixHolders, PromptBlocks
from tests.unit.ingress_core import NO_TAG, Bench, chunk

BLOCK = 16
PROMPT = [token % 26 for token in range(40)]  # two full blocks and eight tokens


def names(tokens: list[int]) -> list[int]:
    hashes: list[int] = []
    extend_chain(hashes, tokens, BLOCK)
    return hashes


def asking(policy: str = "forecast", *, instances: int = 2, **given: Any) -> Bench:
    parameters = {"ttft_weight": 0.0} | given if policy == "forecast" else {}
    dispatch = DispatchConfig(policy=policy, parameters=parameters)
    return Bench(IngressConfig(tagging=NO_TAG, dispatch=dispatch), instances=instances)


def question(bench: Bench) -> PredictLatency:
    body = bench.gather().body
    assert isinstance(body, PredictLatency)
    return body


def finish(bench: Bench, tokens: list[int]) -> RequestFinished:
    submission, instance = bench.last_submission()
    bench.accept(submission)
    text = "".join(chr(ord("a") + token) for token in tokens)
    bench.tokens(instance, chunk(text, cached_tokens=32, finish=FinishReason.LENGTH))
    told: list[RequestFinished] = bench.sent(RequestFinished)
    return told[-1]


def test_question_and_decision_name_the_full_blocks_of_the_prompt() -> None:
    bench = asking()
    bench.call(prompts=[PROMPT])
    asked = question(bench)
    assert asked.block_size == BLOCK
    assert list(unpack_hashes(asked.block_hashes)) == names(PROMPT)
    bench.gathered(bench.predicted("w0", 10, cached_tokens=32), bench.predicted("w1", 20))
    made = bench.sent(DecisionMade)[-1]
    assert (made.block_size, made.block_hashes) == (BLOCK, asked.block_hashes)
    assert [forecast.cached_tokens for forecast in made.forecasts] == [32, 0]
    bench.call("s", prompts=[PROMPT])
    bench.gathered()
    made = bench.sent(DecisionMade)[-1]
    assert made.fallback, "no predictor answered"
    assert made.block_hashes == asked.block_hashes


def test_a_salt_keeps_the_blocks_of_a_prompt_apart() -> None:
    bench = asking()
    bench.call(prompts=[PROMPT], sampling=Sampling(max_tokens=50, cache_salt="a"))
    salted = unpack_hashes(question(bench).block_hashes)
    assert len(salted) == 2
    assert not {*salted} & {*names(PROMPT)}
    assert not {*salted} & {*PromptBlocks(PROMPT, BLOCK, "b").hashes}


def test_the_outcome_tells_what_was_predicted_and_found_and_names_what_was_decoded() -> None:
    bench = asking()
    bench.call(prompts=[PROMPT])
    bench.gathered(bench.predicted("w0", 10, cached_tokens=16), bench.predicted("w1", 20))
    answer = [1] * 25
    told = finish(bench, answer)
    assert (told.cached_tokens, told.predicted_cached_tokens) == (32, 16)
    assert list(unpack_hashes(told.block_hashes)) == names(PROMPT + answer[:-1])[2:], "its last token is not computed"
    assert len(told.block_hashes) == 8 * 2


def test_where_nobody_is_asked_nothing_is_named() -> None:
    bench = asking("join_shortest_queue")
    bench.call(prompts=[PROMPT])
    assert bench.sent(DecisionMade)[-1].block_hashes == b""
    told = finish(bench, [1] * 25)
    assert (told.block_hashes, told.predicted_cached_tokens) == (b"", None)


def test_blocks_have_the_size_that_instances_cache_and_without_a_cache_there_are_none() -> None:
    bench = asking()
    for name, changes in {"w0": {"prefix_caching": False, "block_size": 8}, "w1": {"block_size": 32}}.items():
        known = bench.actor.state.cluster.instances[name].member.record
        assert isinstance(known, InstanceRecord)
        value = msgspec.structs.replace(known, **changes)
        bench.send(KeyChanged(bucket="instance", key=name, value=value, revision=2))
    bench.call("r", prompts=[PROMPT])
    assert question(bench).block_size == 32
    value = msgspec.structs.replace(value, prefix_caching=False)
    bench.send(KeyChanged(bucket="instance", key="w1", value=value, revision=3))
    bench.call("s", prompts=[PROMPT])
    assert (question(bench).block_size, question(bench).block_hashes) == (0, b"")


def test_no_more_blocks_are_named_than_a_message_may_carry() -> None:
    blocks = PromptBlocks([7] * (BLOCKS_MAX + 5) * 2, 2)
    assert len(blocks.hashes) == BLOCKS_MAX
    assert blocks.decoded([7] * (BLOCKS_MAX + 5) * 2, [1] * 10) == b""
    assert PromptBlocks([7] * 3, 2).decoded([7] * 3, [1]) == b""
    assert PromptBlocks([7] * 3, 2).decoded([7] * 3, []) == b""


def test_where_but_some_are_asked_whoever_has_had_the_prompt_is_among_them() -> None:
    long = [token % 26 for token in range(8 * BLOCK + 5)]
    bench = asking(instances=12, candidates=2)
    bench.call("first", prompts=[long])
    drawn = [subject.rpartition(".")[2] for subject in bench.gather().subjects]
    bench.gathered(*(bench.predicted(name, 10) for name in drawn))
    _, holder = bench.last_submission()
    others = 0
    for number in range(8):
        bench.call(f"again{number}", prompts=[[*long, number]])
        drawn = [subject.rpartition(".")[2] for subject in bench.gather().subjects]
        assert holder in drawn
        others += len(drawn) - 1
        bench.gathered(bench.predicted(holder, 10), *(bench.predicted(name, 20) for name in drawn if name != holder))
        assert bench.last_submission()[1] == holder
    assert others > 8, "chance draws as many as before"
    bench.call("other", prompts=[long[1:]])
    assert len(bench.gather().subjects) == 2


def test_no_more_holders_are_kept_in_mind_than_there_is_room_for() -> None:
    holders = PrefixHolders(blocks_max=3)
    prompts = [PromptBlocks([number] * 16, 2) for number in range(4)]
    for number, blocks in enumerate(prompts):
        holders.note(blocks, f"w{number}")
    everybody = {f"w{number}" for number in range(4)}
    assert [holders.find(blocks, everybody) for blocks in prompts] == ["", "w1", "w2", "w3"]
    assert holders.find(prompts[3], {"w1"}) == "", "who is gone is not asked"

"""Requests to models that pool: what is asked of engines, what comes back, and in which shape it is told."""

import base64
import json
import struct
from typing import Any

import msgspec
import pytest
from millrace.contracts.ingress import FinishReason, TokenChunk
from millrace.contracts.worker import Pooled, Pooling, Sampling
from millrace.membership.member import Member
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from services.ingress.api.errors import ApiError
from services.ingress.api.models import ModelRegistry, ServedModel, Serving
from services.ingress.api.parsed_requests import Caller, build_call
from services.ingress.api.pooling_api.parsing import (
    PooledCall,
    parse_classification,
    parse_embeddings,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from services.ingress.api.streams import ResponseHead
from services.ingress.api.tokenizer import ModelTokenizer
from services.ingress.calls.messages import Call, ChoiceDelta, CompleteCall, DeliverDeltas, Usage
from tests.testbed.messages import plain_record
from tests.unit.ingress_core import Bench

#: Letters, between [CLS] and [SEP] as BERT has them.
LETTERS = {"[CLS]": 0, "[SEP]": 1} | {letter: index for index, letter in enumerate("abcdefghij", 2)}
LIMIT = 12


def letters_tokenizer(**config: Any) -> ModelTokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=LETTERS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 0), ("[SEP]", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    return ModelTokenizer(tokenizer, None, config={"type_vocab_size": 2} | config)


def registry(task: str = "embed", **config: Any) -> ModelRegistry:
    model = ServedModel(name="m", tokenizer=letters_tokenizer(**config), max_model_len=LIMIT)
    member = Member("w0", "w0", record=plain_record("w0", task=task))
    return ModelRegistry({"m": model}, lambda _: Serving(1), members=lambda: [member])


def call_of(pooled: PooledCall) -> Call:
    parsed = pooled.tokenised()
    assert parsed.token_ids is not None
    return build_call(parsed, parsed.token_ids, Caller(request="r"), LIMIT)


def answer_of(pooled: PooledCall, *outputs: Pooled) -> dict[str, Any]:
    """The body, where engines gave these."""
    form = pooled.form
    collected = form.collected(ResponseHead(form.prefix + "r", 7, "m", len(outputs)))
    collected.deltas([ChoiceDelta(i, "", 1, pooled=msgspec.msgpack.encode(each)) for i, each in enumerate(outputs)])
    return json.loads(collected.body(Usage(9, 1)))


def vector(*values: float, rows: int = 0) -> Pooled:
    shape = [rows, len(values) // rows] if rows else [len(values)]
    return Pooled(shape, struct.pack(f"<{len(values)}f", *values))


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [[0, 2, 3, 1]]),
        (["ab", "c"], [[0, 2, 3, 1], [0, 4, 1]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_inputs_come_as_texts_or_tokens_alone_or_in_a_batch(given: Any, prompts: list[list[int]]):
    call = call_of(parse_embeddings(body(input=given), registry()))
    assert call.prompts == prompts
    assert call.sampling == Sampling(max_tokens=1, pooling=Pooling(task="embed"))


def test_parameters_of_the_pooler_reach_the_engine():
    fields = {"input": "a", "dimensions": 4, "use_activation": False, "cache_salt": "s"}
    sampling = call_of(parse_embeddings(body(**fields), registry())).sampling
    assert (sampling.pooling, sampling.cache_salt) == (Pooling(task="embed", dimensions=4, use_activation=False), "s")
    assert call_of(parse_pooling(body(input="a"), registry("token_embed"))).sampling.pooling == Pooling(
        task="token_embed"
    )
    assert call_of(parse_classification(body(input="a"), registry())).sampling.pooling == Pooling(task="classify")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, [0, 2, 3, 1]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [0, 10, 11, 1]),
        ({"truncate_prompt_tokens": 4, "add_special_tokens": False}, [2, 3, 4, 5]),
        ({"truncate_prompt_tokens": -1}, [0, *range(2, 12), 1]),
    ],
)
def test_a_text_is_cut_between_what_stands_around_it(fields: dict[str, Any], kept: list[int]):
    assert call_of(parse_embeddings(body(input="abcdefghij", **fields), registry())).prompts == [kept]


def test_a_prompt_may_fill_the_models_length_and_no_more():
    assert len(call_of(parse_embeddings(body(input="abcdefghij"), registry())).prompts[0]) == LIMIT
    for given in ("abcdefghija", [*range(LIMIT), 3]):
        with pytest.raises(ApiError) as refused:
            parse_embeddings(body(input=given), registry()).tokenised()
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (parse_embeddings, {}, "input"),
        (parse_embeddings, {"input": [1, "a"]}, "prompt"),
        (parse_embeddings, {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        (parse_embeddings, {"input": "a", "task": "embed"}, "task"),
        (parse_embeddings, {"input": "a", "request_id": "x"}, "request_id"),
        (parse_pooling, {"input": "a", "truncate_prompt_tokens": LIMIT + 1}, "truncate_prompt_tokens"),
        (parse_score, {"queries": "a"}, "queries"),
        (parse_score, {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries"),
        (parse_score, {"queries": "a", "text_2": "b"}, "queries"),
        (parse_rerank, {"query": "a"}, "documents"),
    ],
)
def test_what_has_to_change_is_named(parse: Any, fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refused:
        parse(body(**fields), registry()).tokenised()
    assert (refused.value.status, refused.value.param) == (400, param)


def test_vectors_are_told_as_numbers_or_base64():
    request = body(input=["a", "b"])
    told = answer_of(parse_embeddings(request, registry()), vector(0.5, -1.0), vector(2.0, 3.0))
    assert told["data"] == [
        {"index": 0, "object": "embedding", "embedding": [0.5, -1.0]},
        {"index": 1, "object": "embedding", "embedding": [2.0, 3.0]},
    ]
    assert (told["object"], told["model"], told["id"]) == ("list", "m", "embd-r")
    assert (told["usage"]["prompt_tokens"], told["usage"]["total_tokens"]) == (9, 9)
    told = answer_of(parse_embeddings(body(input="a", encoding_format="base64"), registry()), vector(0.5, -1.0))
    assert struct.unpack("<2f", base64.b64decode(told["data"][0]["embedding"])) == (0.5, -1.0)


def test_what_is_pooled_of_each_token_is_told_in_rows():
    told = answer_of(parse_pooling(body(input="a"), registry()), vector(1, 2, 3, 4, 5, 6, rows=3))
    assert told["data"] == [{"index": 0, "object": "pooling", "data": [[1, 2], [3, 4], [5, 6]]}]


def test_a_class_is_told_with_its_label():
    models = registry("classify", id2label={"0": "good", "1": "bad"})
    told = answer_of(parse_classification(body(input="a"), models), vector(0.25, 0.75))
    assert told["data"] == [{"index": 0, "label": "bad", "probs": [0.25, 0.75], "num_classes": 2}]


def test_a_model_that_embeds_scores_by_the_angle_of_its_vectors():
    pooled = parse_score(body(queries="a", documents=["b", "c"]), registry())
    assert call_of(pooled).prompts == [[0, 2, 1], [0, 3, 1], [0, 4, 1]]
    told = answer_of(pooled, vector(1, 0), vector(3, 0), vector(0, 2))
    assert [entry["score"] for entry in told["data"]] == pytest.approx([1.0, 0.0])
    several = parse_score(body(text_1=["a", "b"], text_2=["b", "c"]), registry())
    told = answer_of(several, vector(1, 0), vector(0, 1), vector(1, 0), vector(0, -1))
    assert [entry["score"] for entry in told["data"]] == pytest.approx([1.0, -1.0])


def test_a_model_that_embeds_tokens_sums_the_likest_ones():
    pooled = parse_score(body(queries="a", documents=["b"]), registry("token_embed"))
    told = answer_of(pooled, vector(1, 0, 0, 1, rows=2), vector(2, 0, 1, 0, 0, 3, rows=3))
    assert told["data"][0]["score"] == pytest.approx(5.0)


def test_a_classifier_of_pairs_gets_each_pair_in_one_prompt():
    models = registry("classify", id2label={"0": "relevant"})
    pooled = parse_rerank(body(query="ab", documents=["c", "d", "e"], top_n=2), models)
    parsed = pooled.tokenised()
    assert parsed.token_ids == [[0, 2, 3, 1, letter, 1] for letter in (4, 5, 6)]
    assert parsed.second_from == [4, 4, 4]
    told = answer_of(pooled, vector(0.1), vector(0.9), vector(0.5))
    assert [(entry["index"], entry["document"]["text"]) for entry in told["results"]] == [(1, "d"), (2, "e")]


@pytest.mark.parametrize(
    ("pair", "kept"),
    [(("abc", "d"), [0, 2, 3, 1, 5, 1]), (("a", "bcd"), [0, 2, 1, 3, 4, 1]), (("abc", "def"), [0, 2, 1, 5, 6, 1])],
)
def test_of_a_pair_the_longer_text_is_cut_as_the_library_does_it(pair: tuple[str, str], kept: list[int]):
    tokenizer = letters_tokenizer()
    assert tokenizer.encode_within(pair, special=True, length=6, side="right")[0] == kept
    theirs = letters_tokenizer()._tokenizer
    theirs.enable_truncation(6)
    assert theirs.encode(*pair).ids == kept


def test_a_classifier_made_of_a_language_model_gets_pairs_as_one_text():
    models = registry("classify", classifier_from_token=["no", "yes"], method="from_2_way_softmax")
    assert call_of(parse_rerank(body(query="ab", documents="c"), models)).prompts == [[0, 2, 3, 4, 1]]


# Through the core.


def test_a_pooled_output_is_put_together_and_asked_for_again_after_a_failure():
    bench = Bench()
    sampling = Sampling(max_tokens=32, pooling=Pooling(task="token_embed"))
    instance = bench.run_call(sampling=sampling, stream=False)
    bench.tokens(instance, TokenChunk("r.0", 0, 0, [0], pooled=[b"ab"]))
    bench.pass_time(3.0, alive=tuple(name for name in bench.summary_at if name != instance))
    again = bench.submissions()[-1].body
    assert (again.epoch, again.output_token_ids, again.sampling.pooling) == (1, [0], sampling.pooling)
    bench.accept(bench.submissions()[-1])
    other = next(name for name in bench.summary_at if name != instance)
    bench.tokens(other, TokenChunk("r.0", 1, 1, [1, 2], FinishReason.STOP, pooled=[b"cd", b"e"]))
    (delta,) = [e.deltas[0] for e in bench.effects if isinstance(e, DeliverDeltas)]
    assert (delta.pooled, delta.text) == (b"abcde", "")
    assert any(isinstance(effect, CompleteCall) for effect in bench.effects)


def test_each_pair_has_its_own_place_of_the_second_text():
    bench = Bench()
    sampling = Sampling(max_tokens=1, pooling=Pooling(task="classify"))
    bench.call("r", sampling=sampling, prompts=[[1, 2, 3], [1, 2, 3, 4]], second_from=[1, 2])
    asked = [submission.body.sampling.pooling for submission in bench.submissions()]
    assert [pooling.second_from for pooling in asked if pooling is not None] == [1, 2]

"""millrace-agent: real vLLM writes behind its grammar what the card's figures count, which the card then says."""

import json

from millrace.contracts.worker import Sampling, StructuredOutput

from models.training.agent import SEED, AgentCorpus
from models.training.card import AGENT_MODEL, agent_card
from models.training.checkpoint import load_model
from models.training.conversations import SHARES
from models.training.grammar import TOKENS_MAX, GrammarDecoder, schema_text
from models.training.tokenizer import EOS, token_id
from models.training.train import MODELS
from tests.engine.bench_engine import BenchEngine, config

FOLDER = MODELS / AGENT_MODEL
EACH = 2


def test_vllm_writes_behind_its_grammar_what_the_evaluation_counts() -> None:
    evaluation = json.loads((FOLDER / "evaluation.json").read_text())
    corpus = AgentCorpus(SEED + 2)
    decoder = GrammarDecoder(load_model(evaluation["start"], FOLDER), corpus.tokenizer)
    drawn = [corpus.draw(kept=True, kind=kind) for kind in ("named", "required", "json") for _ in range(EACH)]
    prompts = [corpus.ids(corpus.prompt(conversation)) for conversation in drawn]
    schemas = [schema_text(conversation) or "" for conversation in drawn]
    with BenchEngine(config(FOLDER, max_num_batched_tokens=512)) as engine:
        constraints = [StructuredOutput(json_schema=schema) for schema in schemas]
        samplings = [Sampling(max_tokens=TOKENS_MAX, temperature=0.0, structured=each) for each in constraints]
        names = [engine.add(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
        answers = [result.tokens for result in engine.finish(*names)]
    end = token_id(corpus.tokenizer, EOS)
    expected = [decoder.answer(prompt, schema) for prompt, schema in zip(prompts, schemas, strict=True)]
    assert [[token for token in answer if token != end] for answer in answers] == expected


def test_the_card_is_what_the_evaluation_says() -> None:
    evaluation = json.loads((FOLDER / "evaluation.json").read_text())
    assert (FOLDER / "README.md").read_text() == agent_card(evaluation)
    assert set(evaluation["right"]) == set(SHARES)
    assert evaluation["conversations"] >= 100

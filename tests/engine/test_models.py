"""The shipped models: transformers and our code agree, and they are as good as their cards say."""

import json
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from models.training import decode
from models.training.card import JUDGE, card, overview
from models.training.checkpoint import load_model
from models.training.data import Corpus
from models.training.evaluate import answers, held_out_examples, prompt_ids
from models.training.model import SHAPES, Llama, parameter_count
from models.training.random_weights import write_random_model
from models.training.tasks import EXACT, LEVELS, TASKS, held_out
from models.training.tokenizer import BOS, EOS, build_tokenizer, token_id
from models.training.train import MODELS, SIZES

#: Fresh prompts per task and level: few, so the bounds on what they say are loose.
PROMPTS_PER_LEVEL = 3
#: Three standard deviations of the mean of 108 answers that are right half of the time.
TOLERANCE = 0.15
FRESH_SEED = 90210


def folder(size: str) -> Path:
    return MODELS / f"millrace-{size}"


def evaluation(size: str) -> dict[str, Any]:
    return json.loads((folder(size) / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def test_our_logits_are_those_of_transformers() -> None:
    theirs = LlamaForCausalLM.from_pretrained(folder("nano"), dtype=torch.float32)
    tokens = torch.randint(0, SHAPES["nano"].vocabulary, (2, 700), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = load_model("nano", folder("nano"))
        for part in (tokens[:, :90], tokens):  # attention spelled out, and the fused kernel
            assert torch.allclose(ours(part), theirs(part).logits, atol=1e-3)


def test_the_chat_template_gives_the_prompts_of_training(tokenizer: Tokenizer) -> None:
    loaded = AutoTokenizer.from_pretrained(folder("nano"))
    turn = {"role": "user", "content": "Count from 3 to 12."}
    ids = loaded.apply_chat_template([turn], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == prompt_ids(tokenizer, turn["content"])
    whole = loaded.apply_chat_template(
        [{"role": "developer", "content": "Be brief."}, turn, {"role": "assistant", "content": "3 4"}], tokenize=False
    )
    assert whole == ("<|bos|><|system|>Be brief.<|eos|><|user|>Count from 3 to 12.<|eos|><|assistant|>3 4<|eos|>")
    with pytest.raises(Exception, match="system, user, assistant and tool, not critic"):
        loaded.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


def test_cached_decoding_picks_what_a_whole_forward_pass_picks(tokenizer: Tokenizer) -> None:
    model = load_model("nano", folder("nano"))
    prompts = [prompt_ids(tokenizer, prompt) for prompt in ("Hi", "Count from 3 to 9.", "Sort these numbers: 4 2 9 7")]
    requests = [decode.Request(prompt, limit) for prompt, limit in zip(prompts, (5, 20, 12), strict=True)]
    sampling = decode.Sampling(temperature=0.0, eos=token_id(tokenizer, EOS), generator=torch.Generator())
    for request, output in zip(requests, decode.generate(model, requests, sampling), strict=True):
        whole = whole_forward_greedy(model, request.prompt, request.tokens_max, sampling.eos)
        assert output == whole
        wrong = decode.Request(request.prompt, request.tokens_max, [*whole[:2], -1])
        assert decode.generate(model, [wrong], sampling) == [whole[:3]]


def whole_forward_greedy(model: Llama, prompt: list[int], limit: int, eos: int) -> list[int]:
    output: list[int] = []
    with torch.no_grad():
        while len(output) < limit:
            token = int(model(torch.tensor([prompt + output]))[0, -1].argmax())
            if token == eos:
                break
            output.append(token)
    return output


def test_training_never_draws_a_held_out_prompt_and_scores_only_answers(tokenizer: Tokenizer) -> None:
    corpus = Corpus(tokenizer, seed=1)
    corpus.reseed(5)
    assert not any(held_out(corpus.example(1.0).prompt) for _ in range(500))
    for batch in corpus.step(4096, 1024, 1.0):
        assert batch.inputs.shape == batch.targets.shape == batch.weights.shape
        scored = batch.targets[batch.weights > 0]
        assert token_id(tokenizer, EOS) in scored  # every answer ends
        assert token_id(tokenizer, BOS) not in scored
        assert (batch.weights == 0).any(dim=1).all()  # no prompt is scored


def test_the_load_model_is_the_same_from_the_same_seed_and_written_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert write_random_model(tmp_path / name, size="nano", seed=4)
        assert not write_random_model(tmp_path / name, size="nano", seed=5)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second
    with torch.device("meta"):
        assert 80e6 < parameter_count(Llama(SHAPES["load-100m"])) < 120e6


def test_fresh_answers_are_right_as_often_as_the_card_says(tokenizer: Tokenizer) -> None:
    examples = [e for e in held_out_examples(Random(FRESH_SEED), PROMPTS_PER_LEVEL) if e.task in EXACT and e.level < 3]
    said = answers(load_model("nano", folder("nano")), tokenizer, examples, 0.0, 3)
    right = [example.check(tokenizer.decode(ids)) for example, ids in zip(examples, said, strict=True)]
    figures = evaluation("nano")["tasks"]
    promised = [figures[task]["by_level"][level - 1] for task in EXACT for level in LEVELS if level < 3]
    assert abs(statistics.mean(right) - statistics.mean(promised)) < TOLERANCE


@pytest.mark.parametrize("size", SIZES)
def test_a_card_is_what_its_evaluation_says(size: str) -> None:
    result = evaluation(size)
    assert set(result["tasks"]) == set(TASKS)
    assert result["parameters"] == parameter_count(Llama(SHAPES[size]))
    assert (folder(size) / "README.md").read_text() == card(result)
    assert all(figures["prompts"] >= 100 for figures in result["tasks"].values())
    assert (MODELS / "README.md").read_text() == overview(
        {size: evaluation(size) for size in SIZES}, judge=(MODELS / JUDGE).is_dir(), agent=True
    )

"""Questions to judging models are rendered by their template and tokenised, in the loop or in a thread."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from services.ingress.http.questions import QuestionTokenizer

from services.ingress.api.models import ModelRegistry, ServedModel, Serving
from services.ingress.api.tokenizer import LOOP_CHARACTERS_MAX, ModelTokenizer
from services.ingress.calls.messages import QuestionTokenized, TokenizeQuestion
from tests.live.ingress_rig import write_model_folder


class Heard:
    """Core that hears answers, and the errors on the way."""

    def __init__(self, folder: Path, *, template: bool = True) -> None:
        self.told: asyncio.Queue[QuestionTokenized] = asyncio.Queue()
        self.bugs: list[str] = []
        tokenizer = ModelTokenizer.load(write_model_folder(folder))
        if not template:
            tokenizer.template = None
        model = ServedModel(name="verdict", tokenizer=tokenizer, max_model_len=4096)
        self.questions = QuestionTokenizer(
            deliver=lambda body, _: self.told.put_nowait(body),
            models=ModelRegistry({"verdict": model}, lambda _: Serving()),
            on_bug=lambda error, place: self.bugs.append(f"{place}: {error}"),
        )
        self.decode = tokenizer.decode

    async def ask(self, *texts: str, model: str = "verdict") -> list[list[int]]:
        self.questions.tokenize(TokenizeQuestion(correlation="q.1", model=model, texts=list(texts)))
        assert self.told.empty(), "the core is told after the message that it is handling"
        body = await self.told.get()
        assert (body.correlation, body.model) == ("q.1", model)
        return body.prompts


@pytest.mark.parametrize("length", [1, LOOP_CHARACTERS_MAX])
async def test_each_text_is_one_message_of_a_user(length: int, tmp_path: Path) -> None:
    heard = Heard(tmp_path / "verdict")
    prompts = await heard.ask("x" * length, "right?")
    assert len(prompts) == 2
    said = heard.decode(prompts[1])
    assert "right?" in said
    assert said.startswith("<|user|>")
    assert said.rstrip().endswith("<|assistant|>")


async def test_a_model_without_a_template_or_an_unknown_one_is_not_asked(tmp_path: Path) -> None:
    assert await Heard(tmp_path / "a", template=False).ask("right?") == []
    assert await Heard(tmp_path / "b").ask("right?", model="nobody") == []


async def test_a_bug_is_told_and_the_request_goes_on(tmp_path: Path) -> None:
    heard = Heard(tmp_path / "verdict")
    heard.questions._models = None  # type: ignore[assignment]
    assert await heard.ask("right?") == []
    assert heard.bugs[0].startswith("judge: ")

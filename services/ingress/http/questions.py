"""Tokenises questions to judging models: what the core asks of the HTTP side, which has the tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.ingress.api.errors import ApiError
from services.ingress.api.messages import prompt_text
from services.ingress.api.models import ModelRegistry, ServedModel
from services.ingress.api.requests import ChatMessage, ChatRequest
from services.ingress.api.tokenizer import LOOP_CHARACTERS_MAX
from services.ingress.calls.messages import QuestionTokenized, TokenizeQuestion


class QuestionTokenizer:
    """Renders questions as a user's messages. Long ones are tokenised in a thread."""

    def __init__(
        self,
        *,
        deliver: Callable[[QuestionTokenized, str], None],
        models: ModelRegistry,
        on_bug: Callable[[BaseException, str], None],
    ) -> None:
        """Args:
        deliver: Gives the core a body with a trace context.
        on_bug: Told of an exception that should not have been, with the place.
        """
        self._deliver = deliver
        self._models = models
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()

    def tokenize(self, effect: TokenizeQuestion) -> None:
        """Handle the effect."""
        if sum(map(len, effect.texts)) <= LOOP_CHARACTERS_MAX:
            self._answer(effect)
            return
        task = asyncio.get_running_loop().create_task(self._answer_later(effect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer(self, effect: TokenizeQuestion) -> None:
        """From the next turn of the loop on: the core is handling the message that this effect comes from."""
        asyncio.get_running_loop().call_soon(self._tell, effect, self._prompts(effect))

    async def _answer_later(self, effect: TokenizeQuestion) -> None:
        self._tell(effect, await asyncio.to_thread(self._prompts, effect))

    def _tell(self, effect: TokenizeQuestion, prompts: list[list[int]]) -> None:
        self._deliver(QuestionTokenized(correlation=effect.correlation, model=effect.model, prompts=prompts), "")

    def _prompts(self, effect: TokenizeQuestion) -> list[list[int]]:
        try:
            model = self._models.get(effect.model)
            return [question_prompt(model, text) for text in effect.texts]
        except ApiError:
            return []  # counted as unanswered: the model has no chat template, or refuses the text
        except Exception as error:  # noqa: BLE001 - whatever it is, the request goes on by confidence
            self._on_bug(error, "judge")
            return []


def question_prompt(model: ServedModel, text: str) -> list[int]:
    """Token ids of one message of a user.

    Raises:
        ApiError: the model has no chat template, or it refuses the text.
    """
    request = ChatRequest(model=model.name, messages=[ChatMessage(role="user", content=text)])
    rendered = prompt_text(request, model.tokenizer.template)
    return model.tokenizer.encode(rendered, special=bool(request.add_special_tokens))

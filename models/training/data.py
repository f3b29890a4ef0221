"""Training data without end: conversations from the task family, tokenised and gathered into padded micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer

from models.training import noisy
from models.training.tasks import LEVELS, TASKS, Example, held_out, make
from models.training.tokenizer import BOS, EOS, ROLES, token_id

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_MAX = 2300
# A document this long is drawn as often as its task's turn comes; longer ones less, or they would take all the time.
TYPICAL_TOKENS = 64
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Millrace, a small model.",
    "Answer briefly.",
    "Do what the user asks.",
)


class Document(NamedTuple):
    """Token ids, and where an answer (with its end of turn) lies: one bool per token."""

    tokens: list[int]
    answer: list[bool]


class MicroBatch(NamedTuple):
    """Documents of like length, padded at the right. Tensors of (documents, tokens)."""

    inputs: Tensor  # int64
    targets: Tensor  # int64
    weights: Tensor  # float32, 0 outside answers


class Corpus:
    """Draws documents; the same seed draws the same ones."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._bos, self._eos = token_id(tokenizer, BOS), token_id(tokenizer, EOS)
        self._roles = {role: token_id(tokenizer, f"<|{role}|>") for role in ROLES}
        self._kinds = [(task, level) for task in TASKS for level in LEVELS]
        self._chances = [self._chance(task, level) for task, level in self._kinds]

    def reseed(self, seed: int) -> None:
        """Starts a new sequence of documents; the chances of the tasks stay."""
        self._rng = Random(seed)

    def _chance(self, task: str, level: int) -> float:
        examples = [make(task, self._rng, level) for _ in range(40)]
        mean = sum(len(self._encode(e.prompt)) + len(self._encode(e.answer)) for e in examples) / len(examples)
        return float((TYPICAL_TOKENS / mean) ** 0.8)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def example(self, progress: float) -> Example:
        """Draws an example that is not held out; at progress 0 of level 1 only, at 1 of all levels."""
        while True:
            task, level = self._rng.choices(self._kinds, self._chances)[0]
            if level > 1 and self._rng.random() > 2 * progress / (level - 1):
                continue
            example = make(task, self._rng, level)
            if not held_out(example.prompt):
                return example

    def document(self, progress: float) -> Document:
        """Draws a conversation: mostly one turn; at times a system prompt, a second turn, or no chat at all."""
        draw = self._rng.random()
        if draw < 0.02:
            prompt, answer, _ = noisy.CHAT(self._rng, 1)
            return self._chat([(prompt, answer)])
        first = self.example(progress)
        if draw < 0.10:
            return self._completion(first)
        turns = [(first.prompt, first.answer)]
        if draw < 0.16 and len(first.answer) < 400:
            second = self.example(progress)
            turns += [(second.prompt, second.answer)]
        return self._chat(turns, system=self._rng.choice(SYSTEM_PROMPTS) if draw > 0.92 else None)

    def _chat(self, turns: list[tuple[str, str]], system: str | None = None) -> Document:
        parts = [([self._bos], False)]
        if system is not None:
            parts += [(self._turn("system", system), False)]
        for prompt, answer in turns:
            parts += [(self._turn("user", prompt), False), ([self._roles["assistant"]], False)]
            parts += [([*self._encode(answer), self._eos], True)]
        return joined(parts)

    def _turn(self, role: str, text: str) -> list[int]:
        return [self._roles[role], *self._encode(text), self._eos]

    def _completion(self, example: Example) -> Document:
        """A prompt without a template, as the completions endpoint sends it: the answer follows on the next line."""
        prompt = [self._bos, *self._encode(example.prompt + "\n")]
        return joined([(prompt, False), ([*self._encode(example.answer), self._eos], True)])

    def step(self, tokens: int, micro_tokens: int, progress: float) -> Iterator[MicroBatch]:
        """Draws documents of `tokens` tokens in all and yields them in micro-batches of about `micro_tokens`."""
        documents: list[Document] = []
        drawn = 0
        while drawn < tokens:
            document = self.document(progress)
            drawn += min(len(document.tokens), TOKENS_MAX)
            documents.append(document)
        documents.sort(key=lambda document: len(document.tokens))
        group: list[Document] = []
        for document in documents:
            if group and (len(group) + 1) * len(document.tokens) > micro_tokens:
                yield collate(group)
                group = []
            group.append(document)
        yield collate(group)


def joined(parts: list[tuple[list[int], bool]]) -> Document:
    """One document of parts; an answer's parts are marked."""
    tokens = [token for ids, _ in parts for token in ids]
    return Document(tokens[:TOKENS_MAX], [answer for ids, answer in parts for _ in ids][:TOKENS_MAX])


def collate(documents: list[Document]) -> MicroBatch:
    """Pads documents to one length.

    A document's weight is the square root of its answer's length, spread over it: with weight by token long lists would
    drown the one-word answers, with weight by document their tails would go unlearnt.
    """
    import torch  # here: who only draws conversations needs none

    longest = max(len(document.tokens) for document in documents) - 1
    inputs = torch.zeros(len(documents), longest, dtype=torch.int64)
    targets = torch.zeros_like(inputs)
    weights = torch.zeros(len(documents), longest)
    for row, (tokens, answer) in enumerate(documents):
        length = len(tokens) - 1
        inputs[row, :length] = torch.tensor(tokens[:-1])
        targets[row, :length] = torch.tensor(tokens[1:])
        weights[row, :length] = torch.tensor(answer[1:], dtype=torch.float32) / max(1, sum(answer)) ** 0.5
    return MicroBatch(inputs, targets, weights)

"""Trains millrace-agent, which calls functions and fills in schemas: `python -m models.training.agent`.

micro goes on with conversations about functions (`conversations.py`), rendered by the chat template that ships with it:
functions are listed with their parameters, calls stand between `<tool_call>` tags, as ingress reads them. State is kept
below `--state`, and the same command goes on where it stopped. `--evaluate` counts, on conversations that are held out,
those that greedy decoding gets exactly right; a forced call or an object is decoded behind its grammar.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from models.training.card import AGENT_MODEL
from models.training.checkpoint import save_model
from models.training.conversations import SHARES, Conversation, draw_conversation
from models.training.data import Document, MicroBatch, collate, joined
from models.training.fine_tuning import FineTuning
from models.training.grammar import GrammarDecoder
from models.training.model import Llama, parameter_count
from models.training.tasks import held_out
from models.training.tokenizer import AGENT, BOS, EOS, build_tokenizer, token_id, tokenizer_config
from models.training.train import MODELS

START = "micro"
STEP_TOKENS = 6144
MICRO_TOKENS = 1024
TOKENS_MAX = 700
RATE = 1e-3
WARMUP_STEPS = 30
SEED = 47
SAVE_EVERY_STEPS = 50
#: Share of answers in which what the grammar writes is spelled letter by letter, as a grammar allows.
LETTERS_SHARE = 0.2
SHOWN = 160


class AgentCorpus:
    """Draws conversations as documents of the agent's tokenizer."""

    def __init__(self, seed: int) -> None:
        self.tokenizer = build_tokenizer(AGENT)
        config = tokenizer_config(AGENT)
        self._template = PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, bos_token=BOS, eos_token=EOS, chat_template=config["chat_template"]
        )
        self._rng = Random(seed)

    def reseed(self, seed: int) -> None:
        """Start a new sequence of conversations."""
        self._rng = Random(seed)

    def draw(self, *, kept: bool, kind: str | None = None) -> Conversation:
        """Draw a conversation that is held out (``kept``) or one that is not."""
        while True:
            conversation = draw_conversation(self._rng, kind)
            if held_out(conversation.key) is kept:
                return conversation

    def prompt(self, conversation: Conversation) -> str:
        """The text that the model continues."""
        rendered = self._template.apply_chat_template(
            conversation.messages, tools=conversation.tools or None, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    def document(self, conversation: Conversation, *, letters: bool = False) -> Document:
        """Tokens of prompt and answer; only what the model has to say is marked as answer.

        With ``letters`` the rest of the answer is spelled letter by letter.
        """
        parts = [(self.ids(self.prompt(conversation)), False)]
        for text, learnt in conversation.answer:
            pieces = list(text) if letters and not learnt else [text]
            parts += [(self.ids(piece), learnt) for piece in pieces]
        return joined([*parts, ([token_id(self.tokenizer, EOS)], True)])

    def step(self, tokens: int) -> Iterator[MicroBatch]:
        """Micro-batches of about so many tokens in all."""
        documents, drawn = list[Document](), 0
        while drawn < tokens:
            document = self.document(self.draw(kept=False), letters=self._rng.random() < LETTERS_SHARE)
            if len(document.tokens) <= TOKENS_MAX:
                documents.append(document)
                drawn += len(document.tokens)
        yield from batched(documents)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, without a beginning or an end."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def batched(documents: list[Document]) -> Iterator[MicroBatch]:
    """Documents of like length together."""
    group: list[Document] = []
    for document in sorted(documents, key=lambda each: len(each.tokens)):
        if group and (len(group) + 1) * len(document.tokens) > MICRO_TOKENS:
            yield collate(group)
            group = []
        group.append(document)
    yield collate(group)


class AgentTrainer(FineTuning):
    """Counts tokens as taken."""

    def __init__(self, start: str) -> None:
        super().__init__(start, rate=RATE, step_tokens=STEP_TOKENS)

    def step(self, batches: list[MicroBatch], share: float) -> float:
        """One step; ``share`` of the full learning rate. Returns the mean loss."""
        total = sum(float(batch.weights.sum()) for batch in batches)
        loss = 0.0
        for batch in batches:
            part = self.loss(batch) / total
            part.backward()
            loss += float(part.detach())
            self.taken += batch.inputs.numel()
        self.apply(share)
        return loss

    def loss(self, batch: MicroBatch) -> Tensor:
        """Weighted sum of the cross entropy over what is learnt."""
        scored = batch.weights > 0
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.hidden(batch.inputs)
            logits = F.linear(hidden[scored], self.model.model.embed_tokens.weight)
        each = F.cross_entropy(logits.float(), batch.targets[scored], reduction="none")
        return (each * batch.weights[scored]).sum()


@torch.inference_mode()
def exactly_right(model: Llama, documents: list[Document]) -> list[bool]:
    """For each document whether every learnt token is the most likely one after those before it."""
    found = []
    for document in documents:
        batch = collate([document])
        said = model(batch.inputs)[0].argmax(-1)
        learnt = batch.weights[0] > 0
        found.append(bool((said == batch.targets[0])[learnt].all()))
    return found


def train(trainer: AgentTrainer, corpus: AgentCorpus, state: Path, *, minutes: float, call_minutes: float) -> bool:
    """Trains for so long in this call; returns whether ``minutes`` of CPU time, all calls together, are spent."""
    before_s, began, cpu = trainer.spent_s, time.monotonic(), time.process_time()
    losses = list[float]()
    while trainer.spent_s < 60 * minutes and time.monotonic() - began < 60 * call_minutes:
        corpus.reseed(SEED * 1_000_003 + trainer.steps)
        warmed = min(1.0, (trainer.steps + 1) / WARMUP_STEPS)
        share = max(0.02, math.cos(trainer.spent_s / (60 * minutes) * math.pi / 2))
        losses.append(trainer.step(list(corpus.step(STEP_TOKENS)), warmed * share))
        trainer.spent_s = before_s + time.process_time() - cpu
        if trainer.steps % SAVE_EVERY_STEPS == 0:
            trainer.save(state)
            mean, rate = sum(losses[-SAVE_EVERY_STEPS:]) / SAVE_EVERY_STEPS, trainer.taken / trainer.spent_s
            print(f"step {trainer.steps}, {trainer.taken:,} tokens, loss {mean:.4f}, {rate:.0f} tokens/s, "
                  f"{trainer.spent_s / 60:.1f} of {minutes:g} min", flush=True)  # fmt: skip
    trainer.save(state)
    return trainer.spent_s >= 60 * minutes


def evaluate(model: Llama, count: int) -> dict[str, float]:
    """Share of held-out conversations of each kind that greedy decoding gets exactly right."""
    corpus = AgentCorpus(SEED + 1)
    rounded = Llama(model.shape)
    rounded.load_state_dict({name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()})
    decoder = GrammarDecoder(rounded, corpus.tokenizer)
    found = {}
    for kind in SHARES:
        drawn = [corpus.draw(kept=True, kind=kind) for _ in range(count)]
        if drawn[0].demand:
            right = [decoder.is_right(corpus.ids(corpus.prompt(each)), each) for each in drawn]
        else:
            right = exactly_right(rounded, [corpus.document(each) for each in drawn])
        found[kind] = sum(right) / count
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of training, CPU time")
    parser.add_argument("--call-minutes", type=float, default=120.0, help="of training in this call")
    parser.add_argument("--start", choices=("nano", "micro", "mini"), default=START, help="the model that goes on")
    parser.add_argument("--state", type=Path, default=Path(".millrace/agent"), help="where the state is kept")
    parser.add_argument("--output", type=Path, default=MODELS, help="folder of the model folders")
    parser.add_argument(
        "--evaluate", type=int, default=SHOWN, metavar="N", help="held-out conversations of each kind; 0: none"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.state.mkdir(parents=True, exist_ok=True)
    trainer, corpus = AgentTrainer(options.start), AgentCorpus(SEED)
    trainer.load(options.state / "agent.pt")
    print(f"{AGENT_MODEL}: {parameter_count(trainer.model):,} parameters, from millrace-{options.start}", flush=True)
    done = train(trainer, corpus, options.state / "agent.pt", minutes=options.minutes,
        call_minutes=options.call_minutes)  # fmt: skip
    folder = options.output / AGENT_MODEL
    save_model(trainer.model, folder, AGENT)
    if not options.evaluate:
        return
    shares = evaluate(trainer.model, options.evaluate)
    told = {"start": options.start, "tokens": trainer.taken, "conversations": options.evaluate, "right": shares}
    (folder / "evaluation.json").write_text(json.dumps(told, indent=2) + "\n")
    print(f"{AGENT_MODEL}: {'done' if done else 'stopped early'} after {trainer.taken:,} tokens; {shares}")


if __name__ == "__main__":
    main()

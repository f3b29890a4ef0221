"""Trains millrace-judge, which says whether an answer of the other models is right: `python -m models.training.judge`.

micro goes on as a judge: it reads the question that the judge service asks (`millrace.judging.question`) about prompts
that are not held out, as nano, micro and mini answer them greedily, and says "yes" or "no". Truth: the tasks' own
checks. After each token of an exact task's answer it learns, too, whether the answer is right so far. Answers and state
are kept below `--state`, and the same command goes on where it stopped.
"""

import argparse
import math
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from millrace.judging.calibration import area_under_curve
from millrace.judging.question import NO, YES
from tokenizers import Tokenizer
from torch import Tensor

from models.training.card import JUDGE
from models.training.checkpoint import load_model, save_model
from models.training.decode import Request, Sampling, generate
from models.training.evaluate import prompt_ids
from models.training.fine_tuning import FineTuning
from models.training.judge_documents import Answered, Judged, judged
from models.training.tasks import EXACT, TASKS, Example, held_out, make
from models.training.tokenizer import EOS, build_tokenizer, token_id
from models.training.train import MODELS, SIZES

START = "micro"
#: Answers are cut there: longer ones are wrong nearly always.
ANSWER_MAX = 300
STEP_TOKENS = 6144
MICRO_TOKENS = 2048
RATE = 1e-3
WARMUP_STEPS = 30
SEED = 31
#: Documents that are not trained on, to show how far training is.
SHOWN = 300
#: Documents that are judged at once.
BATCH = 32


def draw_seen(count: int, seed: int) -> list[Example]:
    """Prompts that are not held out, every task and level alike, whose right answers are not too long."""
    rng, found = Random(seed), list[Example]()
    while len(found) < count:
        example = make(rng.choice(TASKS), rng)
        if not held_out(example.prompt) and len(example.answer) < 4 * ANSWER_MAX:
            found.append(example)
    return found


def answered(size: str, examples: list[Example], tokenizer: Tokenizer) -> list[Answered]:
    """Greedy answers of one model with their truth."""
    model = load_model(size, MODELS / f"millrace-{size}")
    prompts = [prompt_ids(tokenizer, example.prompt) for example in examples]
    sampling = Sampling(0.0, token_id(tokenizer, EOS), torch.Generator())
    outputs = generate(model, [Request(prompt, ANSWER_MAX) for prompt in prompts], sampling)
    rows = []
    for example, prompt, output in zip(examples, prompts, outputs, strict=True):
        text = tokenizer.decode(output, skip_special_tokens=True)
        right = example.check(text) and len(output) < ANSWER_MAX
        expected = example.answer if example.task in EXACT else ""
        rows.append(Answered(tokenizer.decode(prompt, skip_special_tokens=False), text, right, expected))
    return rows


class JudgeTrainer(FineTuning):
    """The judge, its optimisers, and how far it has come."""

    def __init__(self, tokenizer: Tokenizer, answers: int) -> None:
        super().__init__(START, rate=RATE, step_tokens=STEP_TOKENS)
        self.order = Random(SEED).sample(range(answers), answers)
        self.words = torch.tensor([token_id(tokenizer, word) for word in (NO, YES)])

    def step(self, batch: list[Judged], share: float) -> float:
        """One step over some documents; ``share`` of the full learning rate."""
        loss = 0.0
        for group in grouped(batch):
            part = self.loss(group) / len(batch)
            part.backward()
            loss += float(part.detach())
        self.apply(share)
        return loss

    def loss(self, group: list[Judged]) -> Tensor:
        """Sum over documents: cross entropy of the verdict, and the mean over the answer's tokens."""
        tokens, so_far = padded(group)
        hidden = self.hidden(tokens)
        words = self.model.model.embed_tokens.weight
        last = hidden[torch.arange(len(group)), torch.tensor([len(one.tokens) - 1 for one in group])]
        said = self.words[torch.tensor([int(one.right) for one in group])]
        verdict = F.cross_entropy(last @ words.T, said, reduction="sum")
        known = so_far >= 0
        odds = (hidden @ (words[self.words[1]] - words[self.words[0]]))[known]
        each = F.binary_cross_entropy_with_logits(odds, so_far[known].float(), reduction="none")
        counts = known.sum(dim=1, keepdim=True).clamp(min=1).expand_as(known)[known]
        return verdict + (each / counts).sum()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states, (documents, tokens, width)."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.model.hidden(tokens).float()

    @torch.inference_mode()
    def scores(self, answers: list[Judged]) -> list[float]:
        """Log-odds of "yes"."""
        found = [0.0] * len(answers)
        order = sorted(range(len(answers)), key=lambda index: len(answers[index].tokens))
        words = self.model.model.embed_tokens.weight[self.words]
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            hidden = self.hidden(padded([answers[index] for index in chosen])[0])
            for row, index in enumerate(chosen):
                no, yes = (words @ hidden[row, len(answers[index].tokens) - 1]).tolist()
                found[index] = yes - no
        return found


def grouped(batch: list[Judged]) -> list[list[Judged]]:
    """Documents of like length together."""
    groups: list[list[Judged]] = [[]]
    for one in sorted(batch, key=lambda each: len(each.tokens)):
        if groups[-1] and (len(groups[-1]) + 1) * len(one.tokens) > MICRO_TOKENS:
            groups.append([])
        groups[-1].append(one)
    return groups


def padded(group: list[Judged]) -> tuple[Tensor, Tensor]:
    """Tokens and ``so_far``, each (documents, tokens)."""
    longest = max(len(one.tokens) for one in group)
    tokens = torch.zeros(len(group), longest, dtype=torch.int64)
    so_far = torch.full((len(group), longest), -1, dtype=torch.int64)
    for row, one in enumerate(group):
        tokens[row, : len(one.tokens)] = torch.tensor(one.tokens)
        so_far[row, : len(one.tokens)] = torch.tensor(one.so_far)
    return tokens, so_far


def train(trainer: JudgeTrainer, answers: list[Judged], state: Path, *, minutes: float, call_minutes: float) -> bool:
    """Goes on with passes over the answers, for so long in this call; returns whether it came to the end.

    The learning rate falls with the CPU time spent of ``minutes``, all calls together. The last documents are left out,
    to show the area under the ROC curve on them.
    """
    seen, shown = answers[:-SHOWN], answers[-SHOWN:]
    before_s, began, cpu = trainer.spent_s, time.monotonic(), time.process_time()
    losses = list[float]()
    while trainer.spent_s < 60 * minutes and time.monotonic() - began < 60 * call_minutes:
        batch: list[Judged] = []
        while sum(len(one.tokens) for one in batch) < STEP_TOKENS:
            batch.append(seen[trainer.order[trainer.taken % len(seen)] % len(seen)])
            trainer.taken += 1
        warmed = min(1.0, (trainer.steps + 1) / WARMUP_STEPS)
        losses.append(trainer.step(batch, warmed * max(0.02, math.cos(trainer.spent_s / (60 * minutes) * math.pi / 2))))
        trainer.spent_s = before_s + time.process_time() - cpu
        if trainer.steps % 50 == 0:
            trainer.save(state)
            area = area_under_curve(np.array(trainer.scores(shown)), np.array([one.right for one in shown]))
            told = f"{trainer.taken / len(seen):.2f} passes, loss {np.mean(losses[-50:]):.4f}, area {area:.3f}"
            print(f"step {trainer.steps}, {told}, {trainer.spent_s / 60:.1f} of {minutes:g} min", flush=True)
    trainer.save(state)
    return trainer.spent_s >= 60 * minutes


def kept_answers(state: Path, size: str, prompts: int, tokenizer: Tokenizer) -> list[Answered]:
    """The answers of one model, from the state or made now."""
    path = state / f"answers-{size}-{prompts}.pt"
    if not path.exists():
        began = time.monotonic()
        torch.save([tuple(row) for row in answered(size, draw_seen(prompts, SEED), tokenizer)], path)
        print(f"{size}: {prompts} answers, {time.monotonic() - began:.0f} s", flush=True)
    return [Answered(*row) for row in torch.load(path, weights_only=True)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of training")
    parser.add_argument("--call-minutes", type=float, default=120.0, help="of training in this call")
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--state", type=Path, default=Path(".millrace/judge"), help="where the state is kept")
    parser.add_argument("--output", type=Path, default=MODELS, help="folder of the model folders")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.state.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    rows = [row for size in SIZES for row in kept_answers(options.state, size, options.prompts, tokenizer)]
    Random(SEED).shuffle(rows)
    answers = [judged(tokenizer, row) for row in rows]
    trainer, state = JudgeTrainer(tokenizer, len(answers)), options.state / "judge.pt"
    trainer.load(state)
    done = train(trainer, answers, state, minutes=options.minutes, call_minutes=options.call_minutes)
    save_model(trainer.model, options.output / JUDGE)
    print(f"{JUDGE}: {'done' if done else 'stopped early'} after {trainer.taken} answers")


if __name__ == "__main__":
    main()

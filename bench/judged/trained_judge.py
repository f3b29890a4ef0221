"""Trains a small language model as a judge of the shipped models' answers, and compares it with confidence.

``python -m bench.judged.trained_judge --minutes 20``: micro (2.1 M parameters) goes on as a judge. It reads prompt and
answer as a chat and says after each token of the answer, and at its end, "yes" or "no": right so far. Truth: the tasks'
own checks. Trained on prompts that are not held out, judged on the prompts of the shipped recording. Answers and state
are kept below ``--state``, and the same command goes on.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from millrace.judging.calibration import area_under_curve, calibration_error, fit_isotonic
from millrace.judging.confidence import fit_confidence
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from bench.judged.record import draw
from models.training.checkpoint import load_model
from models.training.decode import Request, Sampling, generate
from models.training.evaluate import prompt_ids
from models.training.model import Llama
from models.training.tasks import EXACT, TASKS, Example, held_out, make
from models.training.tokenizer import EOS, build_tokenizer, token_id
from models.training.train import MODELS, SIZES, Plan, make_optimizers

#: Answers are cut there: longer ones are wrong nearly always.
ANSWER_MAX = 300
#: Answers of more tokens are reported on their own.
LONG = 32
STEP_TOKENS = 6144
MICRO_TOKENS = 2048
RATE = 1e-3
SEED = 31
#: Of ``bench.judged.record``.
TESTED_SEED = 23


class Judged(NamedTuple):
    """One answer as the judge sees it.

    Attributes:
        tokens: Prompt, answer, end of sequence.
        labels: Per token: 1 right so far, 0 wrong, -1 not judged; the last one is the verdict.
        logprobs: Of the answer's tokens by the model that gave it; empty where not needed.
    """

    tokens: list[int]
    labels: list[int]
    logprobs: list[float] = []


def draw_seen(count: int, seed: int) -> list[Example]:
    """Prompts that are not held out, every task and level alike, whose right answers are not too long."""
    rng, found = Random(seed), list[Example]()
    while len(found) < count:
        example = make(rng.choice(TASKS), rng)
        if not held_out(example.prompt) and len(example.answer) < 4 * ANSWER_MAX:
            found.append(example)
    return found


def answered(size: str, examples: list[Example], tokenizer: Tokenizer, *, logprobs: bool) -> list[Judged]:
    """Greedy answers of one model with their truth."""
    model = load_model(size, MODELS / f"millrace-{size}")
    eos = token_id(tokenizer, EOS)
    prompts = [prompt_ids(tokenizer, example.prompt) for example in examples]
    sampling = Sampling(0.0, eos, torch.Generator())
    outputs = generate(model, [Request(prompt, ANSWER_MAX) for prompt in prompts], sampling)
    rows = list(zip(prompts, outputs, strict=True))
    told = _logprobs(model, rows, eos) if logprobs else [[]] * len(rows)
    return [
        _judged(tokenizer, example, prompt, output, values)
        for example, (prompt, output), values in zip(examples, rows, told, strict=True)
    ]


def _judged(
    tokenizer: Tokenizer, example: Example, prompt: list[int], output: list[int], logprobs: list[float]
) -> Judged:
    right = example.check(tokenizer.decode(output, skip_special_tokens=True)) and len(output) < ANSWER_MAX
    so_far = [-1] * len(output)
    if example.task in EXACT:
        expected = tokenizer.encode(example.answer, add_special_tokens=False).ids
        so_far = [int(output[: end + 1] == expected[: end + 1]) for end in range(len(output))]
    tokens = [*prompt, *output, token_id(tokenizer, EOS)]
    return Judged(tokens, [-1] * len(prompt) + so_far + [int(right)], logprobs)


@torch.inference_mode()
def _logprobs(model: Llama, rows: list[tuple[list[int], list[int]]], eos: int) -> list[list[float]]:
    """Log-probabilities of each answer's tokens, its end included."""
    found: list[list[float]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda index: sum(map(len, rows[index])))
    for group in np.array_split(np.array(order), max(1, len(order) // 16)):
        whole = [[*rows[index][0], *rows[index][1], eos] for index in group]
        tokens = torch.zeros(len(whole), max(map(len, whole)), dtype=torch.int64)
        for row, ids in enumerate(whole):
            tokens[row, : len(ids)] = torch.tensor(ids)
        said = F.log_softmax(model(tokens[:, :-1]).float(), dim=-1).gather(2, tokens[:, 1:, None])[:, :, 0]
        for row, index in enumerate(group):
            first, ended = len(rows[index][0]) - 1, len(rows[index][1]) < ANSWER_MAX
            found[index] = said[row, first : len(whole[row]) - (1 if ended else 2)].tolist()
    return found


class JudgeTrainer:
    """The judge, its optimisers, and how far it has come."""

    def __init__(self, tokenizer: Tokenizer, start: str, answers: int) -> None:
        self.steps = self.taken = 0
        self.order = Random(SEED).sample(range(answers), answers)
        self.model = load_model(start, MODELS / f"millrace-{start}")
        self.yes, self.no = (tokenizer.encode(word, add_special_tokens=False).ids[0] for word in ("yes", "no"))
        plan = Plan(tokens=0, step_tokens=STEP_TOKENS, matrix_rate=RATE, other_rate=RATE)
        self.optimizers = make_optimizers(self.model, plan)

    def logits(self, tokens: Tensor) -> Tensor:
        """Log-odds of "yes" after each token, (documents, tokens)."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.hidden(tokens)
        words = self.model.model.embed_tokens.weight
        return hidden.float() @ (words[self.yes] - words[self.no])

    def step(self, batch: list[Judged], share: float) -> float:
        """One step over some documents; ``share`` of the full learning rate."""
        loss = 0.0
        for group in grouped(batch):
            tokens, labels, weights = padded(group)
            each = F.binary_cross_entropy_with_logits(self.logits(tokens), labels, reduction="none")
            part = (each * weights).sum() / len(batch)
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for each_group in optimizer.param_groups:
                each_group["lr"] = each_group["full_rate"] * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss

    def save(self, path: Path, spent_s: float) -> None:
        """Keep the state, replacing the last one in one move."""
        kept = {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "counts": (self.steps, self.taken, spent_s),
        }
        torch.save(kept, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> float:
        """Take a kept state up; returns the seconds spent so far."""
        if not path.exists():
            return 0.0
        kept = torch.load(path, weights_only=True)
        self.model.load_state_dict(kept["model"])
        for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.steps, self.taken, spent_s = kept["counts"]
        return float(spent_s)

    @torch.inference_mode()
    def scores(self, answers: list[Judged]) -> list[float]:
        """Log-odds of "right" at the end of each answer."""
        found = [0.0] * len(answers)
        order = sorted(range(len(answers)), key=lambda index: len(answers[index].tokens))
        for group in np.array_split(np.array(order), max(1, len(order) // 32)):
            chosen = [answers[index] for index in group]
            told = self.logits(padded(chosen)[0])
            for index, answer, row in zip(group, chosen, told, strict=True):
                found[index] = float(row[len(answer.tokens) - 1])
        return found


def grouped(batch: list[Judged]) -> list[list[Judged]]:
    """Documents of like length together."""
    groups: list[list[Judged]] = [[]]
    for one in sorted(batch, key=lambda each: len(each.tokens)):
        if groups[-1] and (len(groups[-1]) + 1) * len(one.tokens) > MICRO_TOKENS:
            groups.append([])
        groups[-1].append(one)
    return groups


def padded(group: list[Judged]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and weights, each (documents, tokens). The verdict weighs as much as all tokens before it."""
    longest = max(len(one.tokens) for one in group)
    tokens = torch.zeros(len(group), longest, dtype=torch.int64)
    labels, weights = torch.zeros(len(group), longest), torch.zeros(len(group), longest)
    for row, one in enumerate(group):
        length = len(one.tokens)
        tokens[row, :length] = torch.tensor(one.tokens)
        told = torch.tensor(one.labels, dtype=torch.float32)
        labels[row, :length] = told.clamp(min=0)
        judged = (told >= 0).float()
        weights[row, :length] = judged / max(1.0, float(judged.sum()) - 1)
        weights[row, length - 1] = 1.0
    return tokens, labels, weights


def train(trainer: JudgeTrainer, answers: list[Judged], state: Path, *, minutes: float, call_minutes: float) -> bool:
    """Go on with passes over the answers, for so long in this call; returns whether it came to the end.

    The learning rate falls with the CPU time spent of ``minutes``, all calls together.
    """
    spent_s, began, losses = trainer.load(state), time.monotonic(), list[float]()
    before_s, cpu = spent_s, time.process_time()
    while spent_s < 60 * minutes:
        if time.monotonic() - began > 60 * call_minutes:
            trainer.save(state, spent_s)
            return False
        batch: list[Judged] = []
        while sum(len(one.tokens) for one in batch) < STEP_TOKENS:
            batch.append(answers[trainer.order[trainer.taken % len(answers)]])
            trainer.taken += 1
        share = min(1.0, (trainer.steps + 1) / 30) * max(0.02, math.cos(spent_s / (60 * minutes) * math.pi / 2))
        losses.append(trainer.step(batch, share))
        spent_s = before_s + time.process_time() - cpu
        if trainer.steps % 20 == 0:
            passes = trainer.taken / len(answers)
            print(f"step {trainer.steps}, {passes:.2f} passes, loss {np.mean(losses[-20:]):.4f}", flush=True)
    trainer.save(state, spent_s)
    return True


class JudgedBy(NamedTuple):
    """Area under the ROC curve and calibration error of both judges."""

    judge_area: float
    judge_error: float
    confidence_area: float
    confidence_error: float


def report(trainer: JudgeTrainer, tested: dict[str, list[Judged]]) -> None:
    """A row per model and length of answer: both judges on the half that no curve was fitted to."""
    print(f"{'model':<8}{'answers':<12}{'count':>6}{'right':>7}{'judge':>8}{'error':>8}{'confidence':>12}{'error':>8}")
    spent_s, count = 0.0, 0
    for size, answers in tested.items():
        began = time.process_time()
        said = np.array(trainer.scores(answers))
        spent_s, count = spent_s + time.process_time() - began, count + len(answers)
        right = np.array([one.labels[-1] == 1 for one in answers])
        lengths = np.array([len(one.logprobs) for one in answers])
        for name, chosen in _by_length(lengths):
            found = _compared(answers, right, said, chosen)
            head = f"{size:<8}{name:<12}{int(chosen.sum()):>6}{right[chosen].mean():>7.2f}"
            print(
                f"{head}{found.judge_area:>8.3f}{found.judge_error:>8.3f}"
                f"{found.confidence_area:>12.3f}{found.confidence_error:>8.3f}"
            )
    print("area under the ROC curve; error: of calibration")
    print(f"cost of a judgement: {1000 * spent_s / count:.1f} ms of CPU, in batches of 32")


def _by_length(lengths: NDArray[np.int64]) -> list[tuple[str, NDArray[np.bool_]]]:
    return [
        ("all", lengths > 0),
        (f"up to {LONG}", lengths <= LONG),
        ("longer", lengths > LONG),
    ]


def _compared(
    answers: Sequence[Judged], right: NDArray[np.bool_], said: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> JudgedBy:
    """Curves are fitted on one half of all answers, and judged on the chosen ones of the other; mean of both ways."""
    halves = np.array_split(np.random.default_rng(SEED).permutation(len(answers)), 2)
    rows = []
    for fitted, held in (halves, halves[::-1]):
        curve = fit_isotonic(said[fitted], right[fitted])
        confidence = fit_confidence("m", [answers[each].logprobs for each in fitted], right[fitted])
        seen = held[chosen[held]]
        scores = np.array([(confidence.score(answers[each].logprobs) or 0.0) / 100 for each in seen])
        truth = right[seen]
        rows.append(
            (area_under_curve(said[seen], truth), calibration_error(curve.at(said[seen]), truth),
             area_under_curve(scores, truth), calibration_error(scores, truth))
        )  # fmt: skip
    return JudgedBy(*np.mean(rows, axis=0).tolist())


def main() -> None:
    """Answers, trains, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of training")
    parser.add_argument("--call-minutes", type=float, default=8.0, help="of training in this call")
    parser.add_argument("--prompts", type=int, default=6000)
    parser.add_argument("--tested", type=int, default=1600, help="held-out prompts, those of the recording first")
    parser.add_argument("--start", default="micro", choices=SIZES)
    parser.add_argument("--state", type=Path, default=Path(".millrace/judge"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.state.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    seen, tested = list[Judged](), dict[str, list[Judged]]()
    for size in SIZES:
        path = options.state / f"answers-{size}-{options.prompts}.pt"
        if not path.exists():
            began = time.monotonic()
            known = answered(size, draw_seen(options.prompts, SEED), tokenizer, logprobs=False)
            judged = answered(size, draw(options.tested, TESTED_SEED), tokenizer, logprobs=True)
            torch.save(([tuple(one) for one in known], [tuple(one) for one in judged]), path)
            print(f"{size}: {len(known) + len(judged)} answers, {time.monotonic() - began:.0f} s", flush=True)
        known, judged = torch.load(path, weights_only=True)
        seen += [Judged(*one) for one in known]
        tested[size] = [Judged(*one) for one in judged]
    trainer = JudgeTrainer(tokenizer, options.start, len(seen))
    state = options.state / f"judge-{options.start}.pt"
    if train(trainer, seen, state, minutes=options.minutes, call_minutes=options.call_minutes):
        report(trainer, tested)


if __name__ == "__main__":
    main()

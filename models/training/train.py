"""Trains one model: `python -m models.training.train --size nano`.

Muon turns the matrices of the layers, AdamW the embedding and the norms. The learning rate warms up, stays, and falls
to nothing over the last part. The state is kept every few minutes outside the repository, so a stop loses little and
the same command goes on where it stopped. A GPU is used where there is one, else one CPU thread in bfloat16.
"""

import argparse
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.training.checkpoint import save_model
from models.training.data import Corpus, MicroBatch
from models.training.grow import grow
from models.training.model import SHAPES, Llama, draw_weights, parameter_count
from models.training.tokenizer import build_tokenizer

SIZES = ("nano", "micro", "mini")
MODELS = Path(__file__).parent.parent
DEFAULT_SEED = 7
WARMUP_STEPS = 40
# Until here the tasks grow harder; not a share of the plan, so that a longer plan goes on from a shorter one's data.
CURRICULUM_TOKENS = 1_200_000
GRADIENT_NORM_MAX = 1.0
SAVE_EVERY_S = 180
LOG_EVERY_STEPS = 10


class Plan(NamedTuple):
    """Training plan of a size; chosen so that the three sizes take under two hours on two cores."""

    tokens: int
    step_tokens: int
    matrix_rate: float
    other_rate: float
    grown_from: str | None = None
    grown_at_end: bool = False  # from the smaller one's end, not from before its decay
    decay_share: float = 0.3  # of the steps, at the end
    grown_tokens: int = 0  # how many tokens the smaller one had been trained on


PLANS = {
    "nano": Plan(tokens=3_600_000, step_tokens=6144, matrix_rate=4e-3, other_rate=4e-3),
    "micro": Plan(
        tokens=330 * 6144,
        step_tokens=6144,
        matrix_rate=3e-3,
        other_rate=3e-3,
        grown_from="nano",
        decay_share=0.66,
        grown_tokens=410 * 6144,
    ),
    "mini": Plan(
        tokens=280 * 6144,
        step_tokens=6144,
        matrix_rate=2e-3,
        other_rate=2e-3,
        grown_from="micro",
        grown_at_end=True,
        decay_share=0.75,
        grown_tokens=(410 + 330) * 6144,
    ),
}
# On a CPU a micro-batch should stay in the cache; a GPU wants more at once.
MICRO_TOKENS = {"cpu": 1024, "cuda": 65536}


class Trainer:
    """Owns the model, the optimisers and how far training has come."""

    def __init__(self, size: str, plan: Plan, seed: int, device: str) -> None:
        self.plan = plan
        self.device = device
        self.steps = plan.tokens // plan.step_tokens
        self.step = 0
        self.seed = seed
        self.first_data_step = plan.grown_tokens // plan.step_tokens
        self.corpus = Corpus(build_tokenizer(), seed)
        self.model = Llama(SHAPES[size])
        draw_weights(self.model, seed)
        self.model.to(device)
        self.optimizers = make_optimizers(self.model, plan)

    @property
    def decay_step(self) -> int:
        """The step at which the learning rate begins to fall; a larger model grows from the state before it."""
        return self.steps - int(self.plan.decay_share * self.steps)

    def rate(self) -> float:
        """Share of the full learning rate at this step."""
        left = (self.steps - self.step) / (self.steps - self.decay_step)
        warmed = (self.step + 1) / min(WARMUP_STEPS, self.steps // 8)
        return min(1.0, warmed, max(left, 0.0))

    def train_step(self) -> tuple[float, int]:
        """Takes one step; returns the weighted loss and the number of tokens."""
        micro_batches = list(self.corpus_step())
        total = sum(float(batch.weights.sum()) for batch in micro_batches)
        loss = 0.0
        for batch in micro_batches:
            part = self.loss(batch) / total
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * self.rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, sum(batch.inputs.numel() for batch in micro_batches)

    def corpus_step(self) -> Iterator[MicroBatch]:
        """The micro-batches of this step, seeded by it: a run taken up again sees the data it would have seen."""
        data_step = self.first_data_step + self.step
        eased = min(1.0, data_step * self.plan.step_tokens / CURRICULUM_TOKENS)
        self.corpus.reseed(self.seed * 1_000_003 + data_step)
        return self.corpus.step(self.plan.step_tokens, MICRO_TOKENS[self.device], eased)

    def loss(self, batch: MicroBatch) -> Tensor:
        """Weighted sum of the cross entropy over the answers of a micro-batch."""
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.model.hidden(batch.inputs.to(self.device))
            weights = batch.weights.to(self.device)
            # Only answers need logits, and they are a good part of a small model's work.
            scored = weights > 0
            logits = F.linear(hidden[scored], self.model.model.embed_tokens.weight)
        each = F.cross_entropy(logits.float(), batch.targets.to(self.device)[scored], reduction="none")
        return (each * weights[scored]).sum()

    def save(self, path: Path) -> None:
        """Keeps the state, replacing the last one in one move."""
        path.parent.mkdir(parents=True, exist_ok=True)
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(
            {"seed": self.seed, "step": self.step, "model": self.model.state_dict(), "optimizers": optimizers},
            path.with_suffix(".new"),
        )
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Takes up a kept state. Raises ValueError when it is of another seed."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state.get("seed", self.seed) != self.seed:
            raise ValueError(f"{path} was trained from seed {state['seed']}, not {self.seed}; name another --state")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)


def make_optimizers(model: Llama, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer, rate in ((muon, plan.matrix_rate), (adam, plan.other_rate)):
        for group in optimizer.param_groups:
            group["full_rate"] = rate
    return [muon, adam]


def trunk(state: Path) -> Path:
    """Return the path of the state before the decay, from which a larger model may grow."""
    return state.with_name(f"{state.stem}-trunk.pt")


def grow_from(trainer: Trainer, folder: Path) -> None:
    """Starts the trainer's model from the smaller one of its plan. Raises FileNotFoundError if there is none."""
    size = trainer.plan.grown_from
    assert size is not None
    small, state = Llama(SHAPES[size]), folder / f"{size}.pt"
    kept = torch.load(state if trainer.plan.grown_at_end else trunk(state), map_location="cpu", weights_only=True)
    small.load_state_dict(kept["model"])
    grow(small, trainer.model.cpu())
    trainer.model.to(trainer.device)


def train(trainer: Trainer, state: Path, *, minutes_max: float) -> bool:
    """Trains to the end, for so many minutes, or until SIGTERM; returns whether it came to the end."""
    told_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told_to_stop.append(number))
    start = saved = time.monotonic()
    tokens, losses = 0, []
    while trainer.step < trainer.steps and time.monotonic() - start < 60 * minutes_max and not told_to_stop:
        loss, count = trainer.train_step()
        tokens += count
        losses.append(loss)
        if trainer.step % LOG_EVERY_STEPS == 0:
            spent = time.monotonic() - start
            mean = sum(losses[-LOG_EVERY_STEPS:]) / len(losses[-LOG_EVERY_STEPS:])
            left = spent / len(losses) * (trainer.steps - trainer.step) / 60
            print(f"step {trainer.step}/{trainer.steps} loss {mean:.4f} {tokens / spent:.0f} tok/s {left:.0f} min left",
                  flush=True)  # fmt: skip
        if trainer.step == trainer.decay_step:
            trainer.save(trunk(state))
        if time.monotonic() - saved > SAVE_EVERY_S:
            trainer.save(state)
            saved = time.monotonic()
    trainer.save(state)
    return trainer.step >= trainer.steps


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--tokens", type=int, help="how many tokens to train on, if not as many as planned")
    parser.add_argument("--minutes-max", type=float, default=120)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--state", type=Path, default=Path(".millrace/training"), help="where the state is kept")
    parser.add_argument("--output", type=Path, default=MODELS, help="folder of the model folders")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = PLANS[chosen.size]
    trainer = Trainer(chosen.size, plan._replace(tokens=chosen.tokens or plan.tokens), chosen.seed, device)
    state = chosen.state / f"{chosen.size}.pt"
    if state.exists():
        trainer.load(state)
    elif plan.grown_from:
        grow_from(trainer, chosen.state)
    print(f"{chosen.size}: {parameter_count(trainer.model):,} parameters, seed {chosen.seed}, {trainer.plan}, {device}",
          flush=True)  # fmt: skip
    done = train(trainer, state, minutes_max=chosen.minutes_max)
    save_model(trainer.model.cpu(), chosen.output / f"millrace-{chosen.size}")
    print(f"{chosen.size}: {'done' if done else 'stopped early'} at step {trainer.step}/{trainer.steps}")


if __name__ == "__main__":
    main()

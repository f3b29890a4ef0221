"""Further training of a shipped model: one optimiser step, and a state that is kept between calls."""

from pathlib import Path

import torch

from models.training.checkpoint import load_model
from models.training.train import GRADIENT_NORM_MAX, MODELS, Plan, make_optimizers


class FineTuning:
    """A model that goes on from a shipped one.

    Attributes:
        taken: Documents or tokens that were trained on, as the trainer counts.
        spent_s: CPU time of training, all calls together.
    """

    def __init__(self, start: str, *, rate: float, step_tokens: int) -> None:
        self.model = load_model(start, MODELS / f"millrace-{start}")
        plan = Plan(tokens=0, step_tokens=step_tokens, matrix_rate=rate, other_rate=rate)
        self.optimizers = make_optimizers(self.model, plan)
        self.steps = self.taken = 0
        self.spent_s = 0.0

    def apply(self, share: float) -> None:
        """Takes a step along the gradients at ``share`` of the full learning rate, and forgets them."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_rate"] * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def save(self, path: Path) -> None:
        """Keeps the state, replacing the last one in one move."""
        kept = {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "counts": (self.steps, self.taken, self.spent_s),
        }
        torch.save(kept, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Takes a kept state up, if there is one."""
        if not path.exists():
            return
        kept = torch.load(path, weights_only=True)
        self.model.load_state_dict(kept["model"])
        for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.steps, self.taken, self.spent_s = kept["counts"]

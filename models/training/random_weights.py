"""Writes a model of a given shape with weights drawn from a seed: for load experiments, where text does not matter.

`python -m models.training.random_weights` writes millrace-load-100m into `.millrace/models`. It is never committed: the
seed gives the same 200 MB again.
"""

import argparse
from pathlib import Path

from models.training.checkpoint import save_model
from models.training.model import SHAPES, Llama, draw_weights, parameter_count

DEFAULT_FOLDER = Path(".millrace/models/millrace-load-100m")
DEFAULT_SEED = 20


def write_random_model(folder: Path, *, size: str = "load-100m", seed: int = DEFAULT_SEED) -> bool:
    """Writes the model unless the folder already holds weights; returns whether it wrote."""
    if (folder / "model.safetensors").exists():
        return False
    model = Llama(SHAPES[size])
    draw_weights(model, seed)
    save_model(model, folder)
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    parser.add_argument("--size", choices=tuple(SHAPES), default="load-100m")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    chosen = parser.parse_args()
    wrote = write_random_model(chosen.folder, size=chosen.size, seed=chosen.seed)
    count = parameter_count(Llama(SHAPES[chosen.size])) / 1e6
    print(f"{chosen.folder}: {count:.1f} M parameters, {'written' if wrote else 'already there'}")


if __name__ == "__main__":
    main()

"""Makes everything again: `python -m models.training.all` trains the three sizes, evaluates them and writes the cards.

One size after another, since each grows from the one before it; one thread each where there is no GPU.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from models.training.card import write_cards
from models.training.train import DEFAULT_SEED, MODELS, SIZES

# Without these glibc returns every large tensor to the kernel and has its pages zeroed again for the next.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}


def make_size(size: str, *, seed: int, state: Path, output: Path) -> None:
    """Trains and evaluates one size in processes of its own. Raises CalledProcessError when one fails."""
    environment = {**os.environ, **KEEP_MEMORY}
    train = ["train", "--size", size, "--seed", str(seed), "--state", str(state), "--output", str(output)]
    for arguments in (train, ["evaluate", "--size", size, "--models", str(output)]):
        command = [sys.executable, "-m", f"models.training.{arguments[0]}", *arguments[1:]]
        subprocess.run(command, check=True, env=environment, cwd=MODELS.parent)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--state", type=Path, default=Path(".millrace/training"), help="where training keeps its state")
    parser.add_argument("--output", type=Path, default=MODELS, help="folder of the model folders")
    chosen = parser.parse_args()
    state, output = chosen.state.resolve(), chosen.output.resolve()

    for size in SIZES:
        make_size(size, seed=chosen.seed, state=state, output=output)
    write_cards(output)
    print(f"The models and their cards are in {output}.")


if __name__ == "__main__":
    main()

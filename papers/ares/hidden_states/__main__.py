"""Fits a head to the states that engines kept, and writes it where it is better than the one in force.

    python -m papers.ares.hidden_states --from FILE ... --model-path FOLDER

Exit code 3 where it is no better.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace.lengths.frames import FileUnreadable
from millrace.lengths.head import HEAD_FILE, HeadUnreadable, RemainingHead, read_head, write_head

from papers.ares.hidden_states.recorded import StatesHeader, read_states, states_header
from papers.ares.hidden_states.training import train_head

#: Exit code where what was fitted is not better.
NOT_BETTER = 3


def main(words: list[str] | None = None) -> int:
    """Fits, prints the figures, and writes the head where it is better."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--from", dest="files", nargs="+", type=Path, required=True, metavar="FILE", help="what engines recorded")
    add("--model-path", type=Path, required=True, metavar="FOLDER", help="the model's folder")
    add("--force", action="store_true", help="write it even if it is no better")
    arguments = parser.parse_args(words)
    path = arguments.model_path / HEAD_FILE
    try:
        header = states_header(arguments.files[0])
        if any(states_header(other) != header for other in arguments.files[1:]):
            parser.error("the files hold states of different models")
        result = train_head(list(read_states(arguments.files)), header=header, incumbent=_in_force(path, header))
    except (FileUnreadable, OSError) as error:
        parser.error(str(error))
    print(result.reason)
    for name, score in result.scores.items():
        print(
            f"  {name:<37} mean error {score.error:.1f} tokens, error rate {score.error_rate:.1%}, within 50 tokens "
            f"{score.acc_50:.1%}, p90 covers {score.covered_90:.1%}"
        )
    if result.head is None or not (result.accepted or arguments.force):
        return NOT_BETTER
    write_head(path, result.head)
    print(f"written: {path}")
    return 0


def _in_force(path: Path, header: StatesHeader) -> RemainingHead | None:
    """The head of these weights; None for no file, or an unusable one, which estimates nothing either."""
    try:
        return read_head(path, fingerprint=header.fingerprint)
    except (HeadUnreadable, FileNotFoundError):
        return None


if __name__ == "__main__":
    sys.exit(main())

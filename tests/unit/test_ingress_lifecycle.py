"""The transition table of a sequence: complete, and the only place where the state is set."""

import ast
from pathlib import Path
from typing import get_args

from services.ingress import lifecycle
from services.ingress.lifecycle import SequenceEvent, SequencePhase
from services.ingress.transitions import TRANSITIONS

INGRESS = Path(lifecycle.__file__).parent


def test_every_event_is_used_and_nothing_leaves_ended():
    assert {row.event for row in TRANSITIONS} == set(get_args(SequenceEvent))
    assert all(row.state is not SequencePhase.ENDED for row in TRANSITIONS)


def test_nothing_else_sets_the_state():
    setters = []
    for path in sorted(INGRESS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "phase":
                setters.append(path.name)
    assert setters == ["reactions.py", "transitions.py"], "that of cascades, and that of sequences"

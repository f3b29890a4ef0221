"""A model that ships, told that it takes longer contexts than it was trained for: text does not matter for gaps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "models"


def stretched(name: str, folder: Path, *, tokens: int) -> Path:
    """Copies a model of ``models/`` with ``max_position_embeddings`` raised; returns the folder."""
    target = folder / f"{name}-{tokens}"
    shutil.copytree(MODELS / name, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = tokens
    path.write_text(json.dumps(config))
    return target

"""Writes a LinearStepTime as TOML, the form of all coefficient sets, and a profile's two files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from millrace.enginemodel.step_time_models import COSTS, LinearStepTime, Provenance
from millrace.profiling.profile import Profile


def write(profile: Profile, path: Path) -> list[Path]:
    """Writes ``path`` (parameters), and beside it the measurements as JSON. Returns both."""
    assert profile.model.provenance is not None
    measurements = path.with_suffix(".json")
    path.write_text(to_toml(profile.model, profile.model.provenance))
    measurements.write_bytes(msgspec.json.encode(profile))
    return [path, measurements]


def to_toml(model: LinearStepTime, provenance: Provenance) -> str:
    """The file's text: coefficients in ns, then where they come from."""
    lines = [f"{name} = {float(getattr(model, name))!r}" for name in COSTS if name == "fixed" or getattr(model, name)]
    if model.tail_decodes:
        lines.append(f"tail_decodes = {model.tail_decodes}")
    if model.bends:
        lines.append("bends = [" + ", ".join(f"[{tokens}, {ns!r}]" for tokens, ns in model.bends) + "]")
    lines += ["", "[provenance]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in msgspec.structs.asdict(provenance).items()]
    return "\n".join(lines) + "\n"

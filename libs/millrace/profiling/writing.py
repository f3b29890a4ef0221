"""Writes a LinearStepTime as TOML, the form of all coefficient sets."""

from __future__ import annotations

import json

import msgspec

from millrace.enginemodel.steptime import COSTS, LinearStepTime, Provenance


def to_toml(model: LinearStepTime, provenance: Provenance) -> str:
    """The file's text: coefficients in ns, then where they come from."""
    lines = [f"{name} = {float(getattr(model, name))!r}" for name in COSTS if name == "fixed" or getattr(model, name)]
    if model.bends:
        lines.append("bends = [" + ", ".join(f"[{tokens}, {ns!r}]" for tokens, ns in model.bends) + "]")
    lines += ["", "[provenance]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in msgspec.structs.asdict(provenance).items()]
    return "\n".join(lines) + "\n"

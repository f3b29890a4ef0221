"""Folders of models on this machine: a path, a model that ships, or a repository in Hugging Face's cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from millrace.actor.errors import ConfigError
from millrace.cluster.spec import ClusterSpec
from millrace.judging.files import CONFIDENCE_FILE, JudgeUnreadable, LlmCalibration, read_judge, read_llm_judge
from millrace.kvcopy.weights import ADAPTER_CONFIG, WEIGHTS

#: Models that ship are named so; ``nano`` means ``millrace-nano``.
SHIPPED_PREFIX = "millrace-"

_SHIPPED = Path(__file__).resolve().parents[3] / "models"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KNOWN = "an owner/name that is in Hugging Face's cache"


def model_folder(model: str) -> Path:
    """The folder of a model: a path, a model that ships, or the newest snapshot of a cached Hugging Face repository.

    Raises:
        ConfigError: there is none.
    """
    for candidate in (Path(model), _SHIPPED / model, _SHIPPED / f"{SHIPPED_PREFIX}{model}"):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    if not is_repository(model):
        raise ConfigError(f"no model {model!r}: give a folder with config.json{_shipped()}, or {_KNOWN}")
    from huggingface_hub import try_to_load_from_cache  # half a second, which only these names cost

    cached = try_to_load_from_cache(model, "config.json")
    if not isinstance(cached, str):
        raise ConfigError(
            f"no folder {model!r}, and no such repository in Hugging Face's cache; nothing is downloaded at a start: "
            f"`hf download {model}` first. For a gated model accept its terms at https://huggingface.co/{model} and "
            "run `hf auth login` before"
        )
    folder = Path(cached).parent.absolute()
    if not _is_complete(folder):
        raise ConfigError(f"{model!r} is in Hugging Face's cache in part: `hf download {model}` completes it")
    return folder


def is_repository(model: str) -> bool:
    """Whether this may be a Hugging Face repository, ``owner/name``, and is no folder here."""
    return _REPOSITORY.fullmatch(model) is not None and not Path(model).exists()


def _is_complete(snapshot: Path) -> bool:
    """Whether the weights that a snapshot's index names are there; without an index, whether none is on its way."""
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        return all((snapshot / name).is_file() for name in json.loads(index.read_text())["weight_map"].values())
    on_its_way = (snapshot.parent.parent / "blobs").glob("*.incomplete")
    return any(snapshot.glob("*.safetensors")) or not any(on_its_way)


def check_weights(folder: Path) -> None:
    """Raises ConfigError where no weights lie in a model's folder, which an engine would say after half a minute."""
    if any(any(folder.rglob(pattern)) for pattern in WEIGHTS):
        return
    kind, *repository = folder.parent.parent.name.split("--")  # of a snapshot in Hugging Face's cache
    get = f"; `hf download {'/'.join(repository)}` completes it" if kind == "models" else ""
    raise ConfigError(f"{folder} has no weights, which are {', '.join(WEIGHTS)}{get}")


def _shipped() -> str:
    """Models that lie beside the code, as a part of a sentence: in a repository, not in a wheel."""
    return "".join(f", {name}" for name in sorted(path.parent.name for path in _SHIPPED.glob("*/config.json")))


def context_length(folder: Path) -> int:
    """Tokens of prompt and output together that the model was made for; 0 where its config.json does not say."""
    return context_length_of(json.loads((folder / "config.json").read_text()))


def context_length_of(config: dict[str, Any]) -> int:
    """The same of a config.json's content. A model that also sees has its text's part nested."""
    nested = config.get("text_config") or {}
    return int(config.get("max_position_embeddings") or nested.get("max_position_embeddings") or 0)


def judge_files(spec: ClusterSpec) -> dict[str, Path]:
    """File of the confidence judge of each model of the cascade that has one, below its folder.

    Raises:
        ConfigError: a judge is unreadable, or was fitted to other weights than those that lie there.
    """
    tiers = spec.cascade.tiers if spec.cascade is not None else []
    found: dict[str, Path] = {}
    for index, model in enumerate(spec.models):
        path = Path(model.path) / CONFIDENCE_FILE
        if model.name not in tiers or not path.is_file():
            continue
        try:
            read_judge(path, model_folder=Path(model.path))
        except (JudgeUnreadable, OSError) as error:
            raise ConfigError(f"models[{index}].path: {error}") from None
        found[model.name] = CONFIDENCE_FILE
    return found


def llm_calibration(spec: ClusterSpec) -> LlmCalibration | None:
    """Calibration of the cluster's LLM judge; None where its model has none, or no model of the cluster judges.

    Raises:
        ConfigError: it is unreadable, or of other weights than those that lie there.
    """
    cascade = spec.cascade
    if cascade is None or not cascade.judging_model:
        return None
    index, model = next((i, m) for i, m in enumerate(spec.models) if m.name == cascade.judging_model)
    try:
        return read_llm_judge(Path(model.path))
    except (JudgeUnreadable, OSError) as error:
        raise ConfigError(f"models[{index}].path: {error}") from None


def with_model_folders(spec: ClusterSpec) -> ClusterSpec:
    """The cluster with each model's path a folder of this machine.

    Raises:
        ConfigError: one is not there.
    """
    found = []
    for index, model in enumerate(spec.models):
        try:
            found.append(msgspec.structs.replace(model, path=str(model_folder(model.path))))
        except ConfigError as error:
            raise ConfigError(f"models[{index}].path: {error}") from None
        for name, path in model.adapters.items():
            if not (Path(path) / ADAPTER_CONFIG).is_file():
                raise ConfigError(f"models[{index}].adapters.{name}: no {ADAPTER_CONFIG} in {path!r}")
    return msgspec.structs.replace(spec, models=found)

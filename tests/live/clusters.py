"""Fixtures of whole clusters of modelled engines, one for all tests of a module: ``rig = modelled_cluster(...)``."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.live.ingress_rig import MAX_MODEL_LEN, write_model_folder
from tests.testbed.up_cluster import UpRig


def modelled_cluster(
    *words: str, instances: int = 2, max_model_len: int = MAX_MODEL_LEN, **settings: Mapping[str, Any]
) -> Any:
    """Instances of one model ``m``, by further words of `millrace up` and settings by their service."""
    words += tuple(word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}"))

    @pytest.fixture(scope="module")
    def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
        folder = tmp_path_factory.mktemp("up")
        model = write_model_folder(folder / "model", max_model_len=max_model_len)
        with UpRig(folder / "cluster", model_path=model, engine="modelled", instances=instances, extra=words) as rig:
            yield rig

    return rig

"""One cluster of two shipped models, and a cascade of them, for all tests here; each leaves it whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.up_cluster import UpRig

#: micro also judges: no verdict of it means much, but there is a judge to kill.
JUDGE = ("--set", "cascade.parameters.model=micro")
WORDS = ("--cascade", "nano,micro", "--thresholds", "70", "--judge", "llm", *JUDGE)


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder: Path = tmp_path_factory.mktemp("two-models")
    cluster = UpRig.of_words(folder, WORDS, model="cascade")
    cluster.start()
    yield cluster
    sockets = folder / "run" / "ipc"
    assert any(path.is_socket() for path in sockets.iterdir()), "vLLM puts its sockets elsewhere"
    cluster.stop()
    assert not sockets.exists()

"""Models of the container deployment: what is mounted, and folders that containers cannot read."""

from pathlib import Path

import pytest
from millrace.actor.config import load_config

from compose import prepare
from services.ingress.config import IngressConfig
from services.worker.config import WorkerConfig


def model_of(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def cached_model(cache: Path) -> Path:
    """A repository as Hugging Face's cache keeps it; returns its snapshot."""
    repository = cache / "models--some--model"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "1234").write_text("{}")
    snapshot = repository / "snapshots" / "5678"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    return snapshot


def prepared(out: Path, *options: str) -> int:
    return prepare.main(["--cpus", "1", *options, "--out", str(out)])


def refusal(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> str:
    with pytest.raises(SystemExit):
        prepared(out, *options)
    return capsys.readouterr().err


def test_a_cached_snapshot_is_mounted_with_the_files_that_it_links_to(tmp_path: Path) -> None:
    snapshot = cached_model(tmp_path)
    out = tmp_path / "generated"
    assert prepared(out, "--model", str(snapshot), "--served-name", "some") == 0
    assert f"MILLRACE_MODEL_DIR={tmp_path / 'models--some--model'}\n" in (out / ".env").read_text()
    assert load_config(WorkerConfig, out / "worker-0.json").model_path == "/model/snapshots/5678"
    (model,) = load_config(IngressConfig, out / "ingress.json").models
    assert (model.name, model.path) == ("some", "/model/snapshots/5678")


@pytest.mark.parametrize("closed", [".", "config.json", "judge", "judge/confidence.json"])
def test_what_the_containers_may_not_read_is_refused_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed: str
) -> None:
    model = model_of(tmp_path / "some-model")
    (model / "judge").mkdir()
    (model / "judge" / "confidence.json").write_text("{}")
    (model / closed).chmod(0o700)
    told = refusal(capsys, tmp_path / "out", "--model", str(model))
    assert f"{model / closed}: the containers' user may not read it; chmod -R o+rX {model}" in told


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(tmp_path / "some-model")
    (tmp_path / "weights").write_text("")
    (model / "model.safetensors").symlink_to("../weights")
    told = refusal(capsys, tmp_path / "out", "--model", str(model))
    assert f"{model / 'model.safetensors'}: a link out of {model}" in told

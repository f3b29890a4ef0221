"""A cluster's cascade: its table, the options of `up`, what is refused by which field, and the processes it becomes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.actor.errors import ConfigError
from millrace.cli.errors import CliError
from millrace.cluster.model_folders import judge_files, llm_calibration, with_model_folders
from millrace.cluster.reading import parse_cluster
from millrace.cluster.spec import ClusterSpec
from millrace.cluster.workers import instances_of
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.files import LlmCalibration, write_llm_judge
from millrace.kvcopy.weights import weights_fingerprint
from millrace.policies.judges import JUDGES
from millrace.supervision.cascade_fields import ingress_cascades, judge_fields

from services.coordinator.config import CoordinatorConfig
from services.judge.config import JudgeConfig
from services.supervisor.config import LaunchOptions
from services.supervisor.layout import Layout
from tests.unit.test_cli_cluster_flags import cluster as _up

MODELS = 'models = [{ name = "nano", path = "nano" }, { name = "mini", path = "mini" }]'
API = "http://127.0.0.1:8000/v1"
EXTERNAL = 'judge = "external"\n[cascade.parameters]\nurl = "https://judge.example/v1"\nmodel = "grader"\n'


def _spec(table: str = "", tiers: str = '["nano", "mini"]') -> ClusterSpec:
    return with_model_folders(parse_cluster(f"{MODELS}\n[cascade]\ntiers = {tiers}\n{table}"))


def _files(spec: ClusterSpec, folder: Path) -> dict[str, dict[str, Any]]:
    layout = Layout(LaunchOptions(spec=spec, directory=str(folder), cores=[0]))
    layout.plan()
    layout.write()
    return {path.stem: json.loads(path.read_text()) for _, path in layout.configurations()}


@pytest.mark.parametrize(
    ("table", "tiers", "field"),
    [
        ("", '["nano", "huge"]', "cascade.tiers: no such model 'huge'; there are nano, mini"),
        ("", '["nano", "nano"]', "cascade.tiers: 'nano' is given twice"),
        ('name = "mini"', None, "cascade.name 'mini': a model has that name"),
        ("thresholds = [nan]", None, r"cascade.thresholds\[0\]: Expected `float` >= 0.0"),
        ("thresholds = [50, 50]", None, "cascade.thresholds: 2 given"),
        ("quality = 50", None, "cascade.quality: a target needs cascade.sample"),
        ('quality = 50\nlatency_s = 2\nsample = "s"', None, "cascade.latency_s: not together"),
        ('judge = "oracle"', None, "cascade.judge: 'oracle' is none of external, llm"),
        ('judge = "external"\nparameters = { url = "x", model = "m" }', None, "cascade.parameters.url"),
        ('judge = "llm"', None, "cascade.parameters.model"),
        ('judge = "llm"\nparameters = { model = "huge" }', None, "no such model 'huge'"),
        ("parameters = { url = 'x' }", None, "cascade.parameters: the judge confidence has none"),
        (EXTERNAL + "timeout = 3", None, "cascade.parameters of external"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(table: str, tiers: str | None, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        _spec(table, tiers or '["nano", "mini"]')


def test_up_starts_one_engine_per_model_of_the_cascade() -> None:
    spec = _up("--cascade", "nano,micro,mini", "--thresholds", "60, 80")
    assert [len(instances_of(spec, model)) for model in spec.models] == [1, 1, 1]
    assert spec.cascade.tiers == ["millrace-nano", "millrace-micro", "millrace-mini"]
    assert spec.cascade.tier_thresholds == [60.0, 80.0, 0.0]
    default = _spec().cascade
    assert (default.name, default.judge, default.tier_thresholds) == ("cascade", "confidence", [70.0, 0.0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--thresholds", "50"], "--thresholds: only together with --cascade"),
        (["--cascade", "nano,mini", "--thresholds", "high"], "--thresholds high"),
        (["--cascade", "nano,mini", "--set", "cascade.parameters=[]"], "--set cascade.parameters: fields of"),
        (["--cascade", "nano,mini", "--judge", "llm", "--set", "cascade.parameters.model=huge"], "no model 'huge'"),
    ],
)
def test_wrong_options_are_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(CliError, match=said):
        _up(*words)


def test_ingress_and_coordinator_have_the_tiers_with_each_models_judge_and_no_judge_runs(tmp_path: Path) -> None:
    files = _files(_spec("thresholds = [40]\nsettings = { judge_timeout_s = 1.5 }"), tmp_path)
    assert not [name for name in files if name.startswith("judge")]
    (cascade,) = msgspec.convert(files["coordinator-0"], CoordinatorConfig).cascades
    assert [(tier.model, tier.threshold) for tier in cascade.tiers] == [("nano", 40.0), ("mini", 0.0)]
    assert Path(cascade.tiers[0].judge).is_file()
    assert files["ingress-0"]["cascades"] == [
        {
            "name": "cascade",
            "tiers": [{"model": "nano", "threshold": 40.0}, {"model": "mini", "threshold": 0.0}],
            "judge": "confidence",
            "judge_timeout_s": 1.5,
        }
    ]
    assert all(Path(model["judge"]).is_file() for model in files["ingress-0"]["models"])


def test_judges_start_where_the_kind_needs_them(tmp_path: Path) -> None:
    files = _files(_spec("judges = 2\n" + EXTERNAL), tmp_path)
    configs = [msgspec.convert(files[f"judge-{index}"], JudgeConfig) for index in range(2)]
    assert [(config.judge, config.model) for config in configs] == [("external", "grader")] * 2


def test_a_judging_model_is_asked_through_the_api_of_its_cluster_or_elsewhere(tmp_path: Path) -> None:
    spec = _spec('judge = "llm"\nparameters = { model = "mini", timeout_s = 1.0 }')
    config = msgspec.convert(_files(spec, tmp_path)["judge-0"], JudgeConfig)
    told = (f"http://127.0.0.1:{spec.api.port}/v1", "mini", 1.0)
    assert (config.url, config.model, config.timeout_s) == told
    (cascade,) = ingress_cascades(spec)["cascades"]
    assert (cascade["judge"], cascade["judge_timeout_s"]) == ("llm", 1.0)
    other = _spec('judge = "llm"\nparameters = { model = "other", url = "http://elsewhere/v1" }')
    assert msgspec.convert(judge_fields(other, API), JudgeConfig).url == "http://elsewhere/v1"


def test_a_judging_model_that_is_no_tier_gets_an_engine_of_its_own() -> None:
    words = ("--cascade", "nano,mini", "--judge", "llm")
    spec = _up(*words, "--set", "cascade.parameters.model=micro", "--set", "cascade.parameters.timeout_s=1")
    assert [model.name for model in spec.models] == ["millrace-nano", "millrace-mini", "millrace-micro"]
    assert [len(instances_of(spec, model)) for model in spec.models] == [1, 1, 1]
    assert spec.cascade.tiers == ["millrace-nano", "millrace-mini"]
    assert spec.cascade.parameters == {"model": "millrace-micro", "timeout_s": 1}
    assert len(_up(*words, "--set", "cascade.parameters.model=mini").models) == 2
    shipped = _up("--cascade", "nano,mini", "--judge", "llm")
    assert [model.name for model in shipped.models] == ["millrace-nano", "millrace-mini", "millrace-judge"]
    calibration = llm_calibration(shipped)
    assert calibration.area > 0.8
    outside = ("--set", "cascade.parameters.model=huge", "--set", "cascade.parameters.url=http://127.0.0.1:1/v1")
    assert len(_up(*words, *outside).models) == 2


def test_the_llm_judge_has_the_calibration_that_lies_in_its_models_folder(tmp_path: Path) -> None:
    spec = _spec('judge = "llm"\nparameters = { model = "mini" }')
    assert llm_calibration(spec) is None
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    spec = msgspec.structs.replace(
        spec, models=[spec.models[0], msgspec.structs.replace(spec.models[1], path=str(folder))]
    )
    curve, own = IsotonicCurve((0.1, 0.9), (0.2, 0.8)), IsotonicCurve((0.0, 1.0), (0.1, 0.9))
    told = LlmCalibration(
        curve=curve,
        curves={"nano": own, "other": own},
        judged=["nano"],
        answers=100,
        area=0.9,
        error=0.02,
        fingerprint=weights_fingerprint(folder),
    )
    write_llm_judge(folder, told)
    assert llm_calibration(spec) == told
    config = msgspec.convert(judge_fields(spec, API, calibration=told), JudgeConfig)
    _, parameters = JUDGES.choose(config.judge, config.parameters)
    assert (parameters.curve, parameters.curves) == (curve, {"nano": own})
    (folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ConfigError, match=r"models\[1\].path: .*other weights"):
        llm_calibration(spec)
    (folder / "judge" / "llm.json").write_text("{")
    with pytest.raises(ConfigError, match=r"models\[1\].path: .*llm.json"):
        llm_calibration(spec)


def test_a_judge_of_other_weights_is_refused_before_anything_starts(tmp_path: Path) -> None:
    spec = _spec()
    folder = tmp_path / "other"
    (folder / "judge").mkdir(parents=True)
    source = Path(spec.models[0].path)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    (folder / "judge" / "confidence.json").write_bytes((source / "judge" / "confidence.json").read_bytes())
    (folder / "model.safetensors").write_bytes(b"others")
    models = [msgspec.structs.replace(spec.models[0], path=str(folder)), spec.models[1]]
    with pytest.raises(ConfigError, match=r"models\[0\].path: .*other weights"):
        judge_files(msgspec.structs.replace(spec, models=models))

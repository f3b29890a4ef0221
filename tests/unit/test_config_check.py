"""A configuration that a service would refuse is refused before anything starts, by process and key."""

from pathlib import Path

import pytest
from millrace.actor.errors import ConfigError
from millrace.cluster.reading import parse_cluster

from deployment.config_check import check_files
from services.supervisor.config import LaunchOptions
from services.supervisor.layout import Layout

GROUP = '[[models]]\nname = "m"\npath = "/m"\n[[models.groups]]\ncount = 2\nspares = 1\n'


def check(folder: Path, lines: str, model: str = "/m") -> None:
    lines = lines if lines.startswith("engine") else f'engine = "modelled"\n{lines}'
    spec = parse_cluster(GROUP.replace("/m", model) + lines)
    layout = Layout(LaunchOptions(spec=spec, directory=str(folder), cores=[0]))
    layout.plan()
    layout.write()
    check_files(layout.spec, layout.configurations())


def test_what_the_layout_renders_by_itself_is_taken_by_every_service(tmp_path: Path) -> None:
    check(tmp_path, '[policies]\ndispatch = { name = "forecast" }\nprovisioning = { name = "relief" }')
    check(tmp_path, "[settings.worker]\nlimits = { linger_ms = 5 }")
    check(tmp_path, "[policies.dispatch]\nparameters = { candidates = 2 }")


@pytest.mark.parametrize(
    ("lines", "refusal"),
    [
        ("[settings.ingress]\nhttp = { port = 1 }", "settings.ingress.http.port: set `api.port`"),
        ("[settings.workers.worker-1]\nshape = 'x'", "settings.workers.worker-1.shape: set `models.N.groups.N.device`"),
        ("settings = { model_path = 'x' }", "models.0.groups.0.settings.model_path: it follows from the rest of the"),
        ("[settings.ingress]\ncascades = [{ name = 'x' }]", "settings.ingress.cascades: set `cascade`"),
        ("[settings.broker]\nlimits = { tick_ms = 9 }", "broker-0: limits.tick_ms: it is a constant; leave it out"),
        ("[policies.stages]\nparameters = { candidates = 2 }", "policies.stages.parameters of one_stage: "),
        ("settings = { limits = { nope = 1 } }", "worker-0: Object contains unknown field `nope` - at `$.limits`"),
        ("[settings.workers.worker-1]\nseed = 'x'", "worker-1: Expected `int`, got `str` - at `$.seed`"),
        ("[settings.worker]\nmodelled = { nope = 1 }", "worker-0: modelled: Object contains unknown field `nope`"),
        ('step_time = "none-such"', "worker-0: modelled: "),
        ('engine = "vllm"\nstep_time = "none-such"', "worker-0: step_time: "),
        ('engine = "vllm"\n[settings.worker]\nstep_time = "none.toml"', "worker-0: step_time: step-time coefficients "),
        ("[settings.ingress]\nhttp = { nope = 1 }", "ingress-0: Object contains unknown field `nope` - at `$.http`"),
        ("[settings.migrator]\nnope = 1", "migrator-0: Object contains unknown field `nope`"),
    ],
)
def test_what_a_service_would_refuse_or_a_deployment_writes_is_refused_by_its_key(
    tmp_path: Path, lines: str, refusal: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tmp_path, lines)
    assert str(refused.value).startswith(refusal)


def test_a_folder_without_weights_is_refused_for_engines_that_read_them_there(tmp_path: Path) -> None:
    model = tmp_path / "models--owner--name" / "snapshots" / "1234"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for lines in ('engine = "vllm"\nsettings = { load_format = "dummy" }', ""):
        check(tmp_path, lines, str(model))
    with pytest.raises(ConfigError, match=r"worker-0: .*1234 has no weights, .* `hf download owner/name` completes it"):
        check(tmp_path, 'engine = "vllm"', str(model))
    (model / "model.safetensors").touch()
    check(tmp_path, 'engine = "vllm"', str(model))

"""The cluster's specification: what a small file means, what is refused and by which field, which workers follow."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.actor.errors import ConfigError
from millrace.cluster.reading import parse_cluster, read_cluster
from millrace.cluster.spec import ClusterSpec, GroupSpec, ModelSpec, ServiceSettings, StageSpec
from millrace.cluster.stage_cuts import even_stages
from millrace.cluster.toml_text import cluster_toml
from millrace.cluster.workers import instances_of, workers_of
from millrace.supervision.service_fields import ingress_fields, worker_fields

SMALL = """
[[models]]
name = "llama"
path = "llama"

[[models.groups]]
count = 2
"""

STAGED = """
name = "node"
[[models]]
name = "llama"
path = "llama"
groups = [
  { name = "gpu", device = "h100", tensor_parallel = 2 },
  { names = ["slow"], role = "decode", settings = { max_num_seqs = 8, migration = { enabled = false } } },
]
stages = [
  { name = "s0", length_max = 2048, instances = ["gpu-*"] },
  { name = "s1", length_min = 2048, instances = ["slow"] },
]
[[models]]
name = "nano"
path = "nano"
[policies.provisioning]
name = "preempt"
parameters = { cooldown_s = 5.0 }
[settings.workers.gpu-0]
max_num_seqs = 16
"""


def test_a_small_file_is_one_stage_of_vllm_engines_with_one_of_each_service() -> None:
    spec = parse_cluster(SMALL)
    model = spec.models[0]
    assert model.stages == []
    assert [slot.name for slot in workers_of(spec)] == ["worker-0", "worker-1"] == instances_of(spec, model)
    assert (spec.services.ingresses, spec.services.predictors, spec.services.migrators) == (1, 1, True)


def test_a_file_is_the_same_after_it_was_written_and_read() -> None:
    for text in (SMALL, STAGED, extra("census", "count = 2", "settings = { a = { b = 1 } }")):
        spec = parse_cluster(text)
        assert parse_cluster(cluster_toml(spec)) == spec


@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans(), max_size=3))
def test_any_settings_survive_being_written(fields: dict[str, object]) -> None:
    settings = ServiceSettings(worker={"engine_args": fields, "engine_cores": [1, 2]})
    spec = ClusterSpec(models=[ModelSpec(name="m", path="p")], settings=settings)
    assert msgspec.toml.decode(cluster_toml(spec), type=ClusterSpec) == spec


def extra(name: str, *lines: str, module: str = "my.census", role: str = "observer", small: str = SMALL) -> str:
    given = [f'name = "{name}"', f'module = "{module}"', f'role = "{role}"']
    return "\n".join([small, "[[extra_services]]", *given, *lines, ""])


def staged(*stages: list[str]) -> str:
    """Stages s0, s1 and so on, each with these lines."""
    tables = [["[[models.stages]]", f'name = "s{number}"', *lines] for number, lines in enumerate(stages)]
    return "\n".join([SMALL, *(line for table in tables for line in table)])


BELOW, ABOVE = ["length_max = 9"], ["length_min = 9"]
OF_ONE, OF_ALL = 'instances = ["worker-0"]', 'instances = ["worker-*"]'


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "missing required field `models`"),
        ("models = []", "models: at least one is needed"),
        (SMALL + "counts = 3", "models[0].groups[0]: Object contains unknown field `counts`"),
        (SMALL + 'engine = "sglang"', "models[0].groups[0].engine: Invalid enum value 'sglang'"),
        (SMALL.replace("2", "0"), "models[0].groups[0].count: 0, must be between 1 and 2000"),
        (SMALL + 'names = ["a", "b", "c"]', "models[0].groups[0].count: 2, but names has 3"),
        (SMALL + "tensor_parallel = 2", "models[0].groups[0].tensor_parallel: 2, but device is cpu"),
        (SMALL + "processes = 1", "models[0].groups[0].processes: 1, but a vLLM engine has a process of its own"),
        (SMALL + "\n" + SMALL, "models[].name 'llama' is given twice"),
        (SMALL.replace('"llama"', '"l 1"', 1), "models[0].name 'l 1': a served name has no white space"),
        (SMALL + 'name = "w/"', "models[].groups[].names 'w/-0': a name has no white space"),
        (SMALL + '[[models.groups]]\nnames = ["worker-1"]', "models[].groups[].names 'worker-1' is given twice"),
        (staged(["length_min = 1"]), "models[0].stages[0].length_min: 1 the first starts at 0"),
        (staged(BELOW, ["length_min = 8"]), "models[0].stages[1].length_min: 8 overlaps s0, which ends at 9"),
        (staged([], []), "models[0].stages[1]: follows s0, which has no length_max"),
        (staged(BELOW), "models[0].stages[0].length_max: 9; the last stage must have none"),
        (staged(["length_max = 0"]), "models[0].stages[0].length_max: 0 is not above length_min 0"),
        (staged(BELOW, ABOVE).replace("count = 2", "count = 1"), "models[0].stages: 2 stages for 1 instances"),
        (staged(['instances = ["w"]']), "models[0].stages[0].instances: 'w' is no instance of this"),
        (staged([*BELOW, OF_ONE], ABOVE), "models[0].stages[1].instances: empty, but other stages name theirs"),
        (staged([*BELOW, OF_ONE], [*ABOVE, OF_ALL]), "models[0].stages[1].instances: worker-0 is in s0 already"),
        (staged([OF_ONE]), "models[0].stages: no stage has instance worker-1"),
        (SMALL + '[policies.dispatch]\nname = "best"', "policies.dispatch.name: 'best' is none of"),
        (
            SMALL + '[policies.trading]\nname = "delay"\nparameters = { nope = 1 }',
            "policies.trading.parameters of delay: ",
        ),
        (SMALL + "[settings.workers.worker-9]\n", "settings.workers: no such worker 'worker-9'; there are worker-0"),
        (extra("worker"), "extra_services[0].name: worker is a service of every cluster"),
        (extra("census", module="a b"), "extra_services[0].module: 'a b' is no Python module"),
        (extra("census", "settings = { bus = {} }"), "extra_services[0].settings.bus: follows from the rest"),
        (extra("census") + extra("census", small=""), "extra_services[].name 'census' is given twice"),
        (
            extra("gpu", small=SMALL.replace("count = 2", 'names = ["gpu-0"]')),
            "extra_services[0].name: gpu-0 is an instance",
        ),
        (SMALL + "[kv_replicas]\nenabled = true\nmemory_share = 0.0", "kv_replicas.memory_share: 0, but"),
        (SMALL + "[kv_replicas]\ninterval_ms = 9", "(set `settings.migrator.replicas.interval_ms`)"),
        (SMALL + "[telemetry]\ntrace_sample = 2.0", "telemetry.trace_sample: Expected `float` <= 1.0"),
        (SMALL + "[settings.ingress.limits]\ndrain_s = inf", "inf and nan are no numbers of a cluster's file"),
        (SMALL + '[telemetry]\nlog_level = "loud"', "telemetry.log_level: Invalid enum value 'loud'"),
        (SMALL + '[telemetry]\notlp = "foo"', "telemetry.otlp: 'foo' is no URL, such as http://127"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(text: str, refusal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_cluster(text)
    assert refusal in str(refused.value)


def test_groups_of_one_name_are_numbered_on_over_models() -> None:
    groups = [GroupSpec(count=2, spares=1)]
    models = [ModelSpec(name=name, path=name, groups=groups) for name in ("a", "b")]
    spec = ClusterSpec(models=models)
    told = [(slot.name, slot.model.name, slot.spare) for slot in workers_of(spec)]
    kinds = [("a", False), ("a", False), ("a", True), ("b", False), ("b", False), ("b", True)]
    assert told == [(f"worker-{number}", *kind) for number, kind in enumerate(kinds)]
    assert instances_of(spec, models[1]) == ["worker-3", "worker-4"]
    assert instances_of(spec, models[1], spares=True) == ["worker-3", "worker-4", "worker-5"]


@pytest.mark.parametrize(
    ("count", "processes", "provisioning", "shares"),
    [(64, 0, "", [64]), (65, 0, "", [33, 32]), (3, 2, "", [2, 1]), (3, 0, "preempt", [1, 1, 1]), (2, 9, "", [1, 1])],
)
def test_modelled_engines_share_processes_unless_single_ones_shall_be_stopped(
    count: int, processes: int, provisioning: str, shares: list[int]
) -> None:
    text = f'[[models]]\nname = "m"\npath = "m"\n[[models.groups]]\nengine = "modelled"\ncount = {count}\n'
    text += f'processes = {processes}\n[policies.provisioning]\nname = "{provisioning}"'
    assert [len(slot.instances) for slot in workers_of(parse_cluster(text))] == shares


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    file = tmp_path / "cluster.toml"
    file.write_text(SMALL + '[api]\nkeys = "keys.toml"')
    spec = read_cluster(file)
    assert (spec.models[0].path, spec.api.keys) == (str(tmp_path / "llama"), str(tmp_path / "keys.toml"))


STEP_TIMES = """fixed = 1e6

[provenance]
model = "llama"
hardware = "h"
source = "s"
error = "1 percent"
"""


@pytest.mark.parametrize("field", ["models[0].groups[0].step_time", "settings.worker.step_time"])
def test_a_real_engines_step_times_of_another_model_are_refused_before_anything_starts(
    tmp_path: Path, field: str
) -> None:
    file = tmp_path / "mine.toml"
    given = f'step_time = "{file}"' if field.startswith("models") else f'[settings.worker]\nstep_time = "{file}"'
    file.write_text(STEP_TIMES)
    assert parse_cluster(SMALL + given).models
    file.write_text(STEP_TIMES.replace("llama", "nano"))
    with pytest.raises(ConfigError) as refused:
        parse_cluster(SMALL + given)
    assert str(refused.value) == f"{field}: {file} is of another model, nano, not of llama"
    assert parse_cluster(SMALL + 'engine = "modelled"\n' + given).models
    file.write_text("fixed = -1.0")
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        parse_cluster(SMALL + given)


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    with pytest.raises(ConfigError, match=r"cluster.toml: No such file"):
        read_cluster(file)
    file.write_text("models = 3")
    with pytest.raises(ConfigError, match=r"cluster.toml: models: Expected `array`"):
        read_cluster(file)
    file.write_bytes(b"\x1f\x8b")
    with pytest.raises(ConfigError, match=f"{file.name}: this is no TOML"):
        read_cluster(file)


@pytest.mark.parametrize(("count", "context", "cuts"), [(1, 64, []), (2, 4096, [720]), (4, 4096, [304, 720, 1728])])
def test_even_stages_divide_the_context_by_equal_ratios(count: int, context: int, cuts: list[int]) -> None:
    stages = even_stages(count, context)
    assert [stage.length_max for stage in stages] == [*cuts, None]
    assert [stage.length_min for stage in stages] == [0, *cuts]


@pytest.mark.parametrize(("count", "context"), [(2, 128), (40, 300)])
def test_more_stages_than_the_context_can_tell_apart_are_refused(count: int, context: int) -> None:
    with pytest.raises(ValueError, match=f"{count} stages do not fit into a context of {context} tokens"):
        even_stages(count, context)


def test_fields_with_their_default_are_left_out_of_the_text() -> None:
    spec = ClusterSpec(models=[ModelSpec(name="m", path="p", stages=[StageSpec(name="s0")])])
    lines = ["[[models]]", 'name = "m"', 'path = "p"', "", "[[models.groups]]", "", "[[models.stages]]", 'name = "s0"']
    assert cluster_toml(spec).splitlines() == lines


def test_parsers_of_a_model_reach_ingress_and_its_engines():
    spec = ClusterSpec(models=[ModelSpec(name="m", path="p", reasoning_parser="none", tool_call_parser="xlam")])
    (model,) = ingress_fields(spec, lambda model: "folder")["models"]
    assert (model["reasoning_parser"], model["tool_call_parser"]) == ("none", "xlam")
    (slot,) = workers_of(spec)
    assert worker_fields(slot, "folder")["engine_args"] == {"reasoning_parser": ""}
    (plain,) = workers_of(ClusterSpec(models=[ModelSpec(name="m", path="p")]))
    assert "engine_args" not in worker_fields(plain, "folder")

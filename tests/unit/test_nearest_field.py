"""Errors about unknown keys name the nearest one."""

from pathlib import Path

import msgspec
import pytest
from millrace.actor.config import load_config
from millrace.actor.errors import ConfigError
from millrace.actor.nearest_field import nearest_field
from millrace.actor.renamed_keys import RENAMED
from millrace.cluster.reading import parse_cluster

from services.ingress.config import IngressConfig
from setup.configuration import tables


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    open_max: int = 1


class Served(msgspec.Struct, forbid_unknown_fields=True):
    limits: Limits | None = None
    several: list[Limits] = []
    named: dict[str, Limits] = {}


@pytest.mark.parametrize(
    ("payload", "near"),
    [
        ('{"limit": {}}', "limits"),
        ('{"limits": {"opn_max": 1}}', "open_max"),
        ('{"several": [{}, {"open_mx": 1}]}', "open_max"),
        ('{"named": {"a": {"openmax": 1}}}', "open_max"),
    ],
)
def test_an_unknown_field_is_told_with_the_nearest_one_wherever_it_is(payload: str, near: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(payload, type=Served)
    assert nearest_field(str(error.value), Served) == f" (did you mean `{near}`?)"


@pytest.mark.parametrize("payload", ['{"zzz": 1}', '{"limits": 3}'])
def test_other_errors_stay_as_they_are(payload: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(payload, type=Served)
    assert nearest_field(str(error.value), Served) == ""


def test_configurations_and_clusters_name_the_nearest_key(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("[limits]\nopen_mx = 1\n")
    with pytest.raises(ConfigError, match=r"did you mean `open_max`\?"):
        load_config(Served, tmp_path / "s.toml")
    with pytest.raises(ConfigError, match=r"^models\[0\]: .*`paths` \(did you mean `path`\?\)$"):
        parse_cluster('[[models]]\nname = "n"\npaths = "nano"\n')


def test_a_key_of_an_earlier_version_is_answered_with_what_took_its_place() -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"limits": {"sequences_open_max": 9}}, IngressConfig)
    told = nearest_field(str(refused.value), IngressConfig)
    assert told == " (it is twice `calls_open_max` now)"


def test_no_key_that_there_is_counts_as_one_of_an_earlier_version() -> None:
    known = {f"{table.kind.__name__}.{key.name}" for _, found in tables() for table in found for key in table.fields}
    assert known
    assert not known & set(RENAMED)

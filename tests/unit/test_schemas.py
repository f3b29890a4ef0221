"""The exported wire contract: complete, deterministic, valid, and the one that is committed."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from millrace.contracts.catalog import BUCKETS, CHANNELS, WIRE_TYPES

from setup.asyncapi import parameter_names
from setup.schema_documents import documents, schema_path
from setup.schemas import compare, write
from tests.unit.test_codec import BODIES

REPOSITORY = Path(__file__).resolve().parents[2]

DOCUMENTS = documents()
ASYNCAPI: dict[str, Any] = json.loads(DOCUMENTS["asyncapi.json"])


def test_the_committed_schemas_are_those_of_the_code() -> None:
    assert compare(REPOSITORY / "schemas", DOCUMENTS) == []


def test_drift_is_named_file_by_file(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    assert compare(tmp_path, DOCUMENTS) == []
    (tmp_path / "worker" / "SubmitSequence.v2.json").write_text("{}")
    (tmp_path / "plan" / "Plan.v1.json").unlink()
    (tmp_path / "plan" / "Gone.v1.json").write_text("{}")
    lines = compare(tmp_path, DOCUMENTS)
    assert [line.split()[0] for line in lines] == ["missing", "differs", "stale"]
    write(tmp_path, DOCUMENTS)
    assert compare(tmp_path, DOCUMENTS) == []


@pytest.mark.parametrize("kind", WIRE_TYPES, ids=lambda kind: kind.__name__)
def test_every_message_has_a_valid_schema_that_stands_alone(kind: type[msgspec.Struct]) -> None:
    schema = json.loads(DOCUMENTS[schema_path(kind)])  # type: ignore[arg-type]
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema)):
        assert name in schema["$defs"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_real_messages_satisfy_their_schema_and_damaged_ones_do_not(body: Any) -> None:
    schema = json.loads(DOCUMENTS[schema_path(type(body))])
    plain = msgspec.json.decode(msgspec.json.encode(body))
    jsonschema.validate(plain, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plain | {"type": "Other/1"}, schema)


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [each for value in node.values() for each in references(value)]
    if isinstance(node, list):
        return [each for value in node for each in references(value)]
    return []


def test_every_reference_of_the_asyncapi_document_leads_somewhere() -> None:
    assert references(ASYNCAPI)
    for reference in references(ASYNCAPI):
        node = ASYNCAPI
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]


def test_the_asyncapi_document_covers_every_channel_bucket_and_direction() -> None:
    for channel in CHANNELS:
        described = ASYNCAPI["channels"][channel.name]
        assert described["address"] == f"mr.{{cluster}}.{channel.subject}"
        assert set(re.findall(r"\{(\w+)\}", described["address"])) == set(described["parameters"])
        assert set(described["messages"]) == {channel.message.__name__}
        title = channel.name.capitalize()
        assert ASYNCAPI["operations"][f"send{title}"]["x-roles"] == [role.value for role in channel.senders]
        receive = ASYNCAPI["operations"][f"receive{title}"]
        assert ("reply" in receive) == bool(channel.replies)
        if channel.queue_group:
            assert receive["bindings"]["nats"]["queue"] == channel.queue_group
    assert set(ASYNCAPI["x-kv-buckets"]) == {bucket.name for bucket in BUCKETS}
    assert set(parameter_names("a.{model}.{instance}")) == {"cluster", "model", "instance"}

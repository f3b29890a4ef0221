"""The catalog as an AsyncAPI 3.0 document: channels, operations, messages, and the KV buckets as an extension.

The document describes the whole system: every channel has one operation per direction, and ``x-roles`` says who
performs it. Payloads are MessagePack of the schemas given.
"""

from __future__ import annotations

from typing import Any

from millrace.contracts.catalog import BUCKETS, CHANNELS, Bucket, Channel, Pattern
from millrace.contracts.codec import HEADER_REQUEST, HEADER_SENDER, HEADER_TRACE, HEADER_TYPE, PAYLOAD_BYTES_MAX
from millrace.contracts.message import Body

Schema = dict[str, Any]

CONTENT_TYPE = "application/vnd.msgpack"

_PARAMETERS = {
    "cascade": "Name of the cascade.",
    "cluster": "Name of the cluster; several may share one NATS system.",
    "model": "Served model name as one subject token (characters outside A-Z a-z 0-9 _ / = - become _).",
    "source": "Name of the instance that a sequence leaves.",
    "target": "Name of the instance that it moves to.",
    "bidder": "Name of an instance that was asked to take it.",
    "instance": "Name of an instance, which is one engine with its worker.",
    "ingress": "Name of an ingress process.",
    "role": "Kind of service: ingress, tagger, coordinator, worker, migrator, broker, judge, supervisor.",
    "name": "Unique name of a service's process.",
    "stage": "Name of a stage of the model's plan.",
    "host": "Name of a provisioner: what starts and stops instances on one machine.",
}


def asyncapi_document(components: dict[str, Schema]) -> Schema:
    """The whole document; ``components`` are the JSON schemas of all types by name."""
    messages = sorted({kind for channel in CHANNELS for kind in (channel.message, *channel.replies)}, key=_name)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Millrace",
            "version": "1",
            "description": "Messages between Millrace's services. Core NATS delivers at most once; state that must "
            "survive is in JetStream KV buckets (x-kv-buckets). A tag in the body (`type`) carries name and version; "
            "unknown fields are skipped, so that a field with a default may be added without a new version. "
            f"No payload is larger than {PAYLOAD_BYTES_MAX} bytes.",
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {
            "local": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "The server that `./task up` starts. Each role has a user with its own permissions.",
            }
        },
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "messages": {_name(kind): _message(kind, components) for kind in messages},
            "schemas": {"Headers": _headers(), **{name: _draft7(schema) for name, schema in components.items()}},
        },
        "x-kv-buckets": {bucket.name: _bucket(bucket) for bucket in BUCKETS},
    }


def _channels() -> Schema:
    channels: Schema = {}
    for channel in CHANNELS:
        channels[channel.name] = {
            "address": f"mr.{{cluster}}.{channel.subject}",
            "summary": _summary(channel.message),
            "messages": _message_refs((channel.message,)),
            "parameters": {name: {"description": _PARAMETERS[name]} for name in parameter_names(channel.subject)},
            "x-pattern": channel.pattern.value,
        }
        if channel.replies:
            channels[f"{channel.name}Reply"] = {
                "address": None,
                "summary": f"Answers on {channel.name}, sent to the asker's inbox.",
                "messages": _message_refs(channel.replies),
            }
    return channels


def parameter_names(subject: str) -> list[str]:
    """Parameters of a subject, ``cluster`` first."""
    return ["cluster", *(token[1:-1] for token in subject.split(".") if token.startswith("{"))]


def _operations() -> Schema:
    operations: Schema = {}
    for channel in CHANNELS:
        title = channel.name[0].upper() + channel.name[1:]
        operations[f"send{title}"] = _operation(channel, "send")
        operations[f"receive{title}"] = _operation(channel, "receive")
    return operations


def _operation(channel: Channel, action: str) -> Schema:
    roles = channel.senders if action == "send" else channel.receivers
    operation: Schema = {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel.name}"},
        "summary": _summary(channel.message),
        "messages": _channel_message_refs(channel.name, (channel.message,)),
        "x-roles": [role.value for role in roles],
    }
    if action == "receive" and channel.pattern is Pattern.QUEUE_REQUEST:
        operation["bindings"] = {"nats": {"queue": channel.queue_group, "bindingVersion": "0.1.0"}}
    if channel.replies:
        operation["reply"] = {
            "channel": {"$ref": f"#/channels/{channel.name}Reply"},
            "messages": _channel_message_refs(f"{channel.name}Reply", channel.replies),
        }
    return operation


def _message(kind: type[Body], components: dict[str, Schema]) -> Schema:
    return {
        "name": kind.type_name(),
        "title": kind.__name__,
        "summary": components[kind.__name__].get("description", ""),
        "contentType": CONTENT_TYPE,
        "headers": {"$ref": "#/components/schemas/Headers"},
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


def _headers() -> Schema:
    return {
        "type": "object",
        "description": "For people and tools: a message can be told apart without decoding it.",
        "properties": {
            HEADER_TYPE: {"type": "string", "description": "Name and version, for example SubmitSequence/2."},
            HEADER_REQUEST: {"type": "string", "description": "Request id, where the message concerns one."},
            HEADER_SENDER: {"type": "string", "description": "Name of the sending actor."},
            HEADER_TRACE: {"type": "string", "description": "W3C trace context of the sender's span."},
        },
        "required": [HEADER_TYPE],
    }


def _bucket(bucket: Bucket) -> Schema:
    return {
        "bucket": f"mr_{{cluster}}_{bucket.name}",
        "key": bucket.key,
        "value": {"$ref": f"#/components/schemas/{bucket.value.__name__}"},
        "writers": [role.value for role in bucket.writers],
        "ttl_s": bucket.ttl_s,
        "summary": _summary(bucket.value),
    }


def _summary(kind: type[Body]) -> str:
    """The first sentence of a type's docstring."""
    text = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".") + "."


def _name(kind: type[Body]) -> str:
    return kind.__name__


def _message_refs(kinds: tuple[type[Body], ...]) -> Schema:
    return {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in kinds}


def _channel_message_refs(channel: str, kinds: tuple[type[Body], ...]) -> list[Schema]:
    return [{"$ref": f"#/channels/{channel}/messages/{kind.__name__}"} for kind in kinds]


def _draft7(node: Any) -> Any:
    """AsyncAPI's own schema dialect is draft 7: positions are ``items``, and a $ref stands alone."""
    if isinstance(node, list):
        return [_draft7(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        reference = {"$ref": node["$ref"].replace("#/$defs/", "#/components/schemas/")}
        rest = {key: _draft7(value) for key, value in node.items() if key != "$ref"}
        return {"allOf": [reference], **rest} if rest else reference
    names = {"prefixItems": "items", "items": "additionalItems"} if "prefixItems" in node else {}
    return {names.get(key, key): _draft7(value) for key, value in node.items()}

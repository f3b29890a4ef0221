"""Token by which another machine joins a cluster: its name, and the passwords of the roles that run there. Pure."""

from __future__ import annotations

import base64
import binascii

import msgspec

from millrace.actor.errors import ConfigError
from millrace.contracts.channels import Role

#: File of a cluster's folder, below ``run``; where another machine has joined, a copy is there as well.
TOKEN = "join.token"


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cluster and passwords; whoever has it may run engines and give orders."""

    cluster: str
    passwords: dict[Role, str]


def token_text(token: Token) -> str:
    """One word of base64."""
    return base64.urlsafe_b64encode(msgspec.json.encode(token)).decode()


def read_token(text: str) -> Token:
    """The inverse.

    Raises:
        ConfigError: it is none.
    """
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text.strip()), type=Token)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise ConfigError(f"no token: it is what run/{TOKEN} in the cluster's folder says") from None

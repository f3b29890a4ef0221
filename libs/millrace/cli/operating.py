"""Requests from the command line to services: one request, one answer."""

from __future__ import annotations

import os
import pwd

import nats.errors
from nats.aio.client import Client

from millrace.contracts.codec import HEADER_REQUEST, HEADER_SENDER, HEADER_TYPE, MalformedMessage, decode, encode
from millrace.contracts.message import Body


def _sender() -> str:
    """Name under which the command line speaks: with its user, for the log of orders."""
    try:
        return f"millrace-cli/{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:  # a container's user often has no name
        return f"millrace-cli/{os.getuid()}"


def headers_of(body: Body, request: str = "") -> dict[str, str]:
    """As services set them."""
    headers = {HEADER_TYPE: body.type_name(), HEADER_SENDER: _sender()}
    return headers | ({HEADER_REQUEST: request} if request else {})


async def asked(
    bus: Client, subject: str, body: Body, *, timeout_s: float, request: str = "", sender: str = ""
) -> Body | str:
    """The answer, or in a few words why there is none. ``sender``: who asks, where no person does."""
    headers = headers_of(body, request) | ({HEADER_SENDER: sender} if sender else {})
    try:
        reply = await bus.request(subject, encode(body), timeout=timeout_s, headers=headers)
        return decode(reply.data)
    except nats.errors.NoRespondersError:
        return "nobody listens"
    except (TimeoutError, nats.errors.TimeoutError):
        return f"no answer in {timeout_s:g} s"
    except MalformedMessage as malformed:
        return f"an answer that cannot be read: {malformed}"

"""Responses that clients may ask for again, in the KV buckets ``response`` and ``response_log``."""

from __future__ import annotations

from millrace.contracts.message import Body


class StoredResponse(Body, frozen=True, kw_only=True, tag="StoredResponse/1"):
    """One response of ``/v1/responses`` (key: its id).

    Attributes:
        holder: Name of the API key that may ask for it; empty where none is needed.
        status: ``queued``, ``in_progress``, ``completed``, ``incomplete``, ``failed`` or ``cancelled``.
        document: JSON of the response.
        input: JSON list of the conversation's items before its output, those of earlier responses included.
        request: JSON of the request, of one made in the background: another ingress can go on with it.
        owner: ``<ingress>.<incarnation>`` that makes it, of one made in the background.
    """

    holder: str
    status: str
    document: bytes
    input: bytes
    request: bytes = b""
    owner: str = ""


class ResponseEvents(Body, frozen=True, kw_only=True, tag="ResponseEvents/1"):
    """Further events of a response that is made in the background (key: ``<response>.<n>``, n from 0).

    Under ``<owner>`` an empty one is put each second, as long as that ingress makes such responses.

    Attributes:
        first: ``sequence_number`` of the first event.
        events: As they are sent to clients.
        token_ids: Output tokens that they cover.
        last: No more follow.
    """

    first: int = 0
    events: bytes = b""
    token_ids: list[int] = []
    last: bool = False

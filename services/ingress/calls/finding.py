"""Open requests by the id that their client gave them."""

from __future__ import annotations

from millrace.actor.effects import Reply
from millrace.contracts.ingress import FindRequests, RequestsFound

from services.ingress.state import IngressState


def answer_find(state: IngressState, body: FindRequests, reply_to: str) -> None:
    """Answer with the requests of that client id; nothing is sent where none is open here."""
    found = [call.request for call in state.calls.values() if call.call.client_id == body.client_id]
    if found and body.client_id and reply_to:
        state.emit(Reply(to=reply_to, body=RequestsFound(ingress=state.name, requests=found)))

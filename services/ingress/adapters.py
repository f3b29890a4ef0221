"""LoRA adapters by a client's order: all instances of the model are asked at once.

    message in     change                               messages out
    AdapterAsked   none                                 ChangeAdapter; AdapterDone where nobody takes one
    Gathered       offered, or no longer, as was asked  AdapterDone; ChangeAdapter where not all could load it

Whatever else is known of adapters stands in the instances' records (``cluster/cluster_view.py``).
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Gather, Publish
from millrace.contracts.message import Body
from millrace.contracts.worker import AdapterChanged, ChangeAdapter

from services.ingress.pending import PendingAdapter
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS

#: Time in which every instance has loaded it: the largest are some gigabytes, from a disk that is far away.
LOAD_NS = 120 * SECOND_NS


class AdapterAsked(Body, frozen=True, kw_only=True, tag="local.AdapterAsked/1"):
    """A client's order. ``request`` names it."""

    request: str
    model: str
    order: ChangeAdapter


class AdapterDone(Effect, frozen=True, kw_only=True):
    """The answer to a client's order.

    Attributes:
        refusal: Why it failed; empty where it did not.
        missing: As in AdapterChanged.
        taken: Whether any instance of the model takes adapters.
    """

    request: str
    refusal: str = ""
    missing: bool = False
    taken: bool = True


def ask_adapter(state: IngressState, asked: AdapterAsked) -> None:
    """Pass the order on."""
    instances = state.cluster.taking_adapters(asked.model)
    if not instances:
        refusal = (
            f"no instance of {asked.model} takes LoRA adapters: name one in the cluster's file, or set enable_lora"
        )
        state.emit(AdapterDone(request=asked.request, refusal=refusal, taken=False))
        return
    pending = PendingAdapter(asked.request, asked.model, asked.order, instances)
    state.emit(
        Gather(
            subjects=tuple(state.subjects.engine(name, "adapter") for name in instances),
            body=asked.order,
            correlation=state.correlation("adapter", pending),
            timeout_ns=LOAD_NS,
            answers_max=len(instances),
        )
    )


def take_adapter_answers(state: IngressState, pending: PendingAdapter, answers: list[tuple[str, Any]]) -> None:
    """Answer the client, once all have answered or the time is over."""
    told = {body.instance: body for _, body in answers if isinstance(body, AdapterChanged)}
    refusals = [f"{name}: {told[name].refusal}" for name in told if told[name].refusal]
    refusals += [f"{name} did not answer" for name in pending.instances if name not in told]
    contents = {body.adapter.fingerprint: body.adapter for body in told.values() if body.adapter is not None}
    order = pending.order
    if order.path:
        if not refusals and len(contents) > 1:
            refusals = [f"instances found different weights at {order.path}"]
        if not refusals:
            state.cluster.adapters[order.name] = pending.model, next(iter(contents.values()))
        elif not order.replace:
            for name in told:
                state.emit(Publish(subject=state.subjects.engine(name, "adapter"), body=ChangeAdapter(name=order.name)))
    elif not refusals:
        state.cluster.adapters.pop(order.name, None)
    missing = any(body.missing for body in told.values())
    state.emit(AdapterDone(request=pending.request, refusal="; ".join(refusals), missing=missing))

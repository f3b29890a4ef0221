"""Whether a worker takes a sequence: a pure decision over what it knows."""

from __future__ import annotations

import msgspec
from millrace.contracts.worker import RefusalReason, SubmitSequence


class AdmissionView(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the admission decision.

    Attributes:
        fence: Newest epoch known of the sequence; None where nothing is known.
        ingress_incarnation: Newest incarnation known of the asking ingress; 0 for none.
        live: Sequences in the engine.
        live_max: Bound of them: running batch plus queue.
    """

    fence: int | None
    ingress_incarnation: int
    draining: bool
    live: int
    live_max: int
    max_model_len: int


def refusal(body: SubmitSequence, view: AdmissionView) -> tuple[RefusalReason, str] | None:
    """Reason why a sequence is not taken, with a sentence; None where it is taken.

    Order of checks: first whether the asker is behind, then what another instance may still take, last what none will
    take.
    """
    if view.fence is not None and body.epoch <= view.fence:
        return RefusalReason.STALE_EPOCH, f"epoch {view.fence} is known here"
    if body.ingress_incarnation < view.ingress_incarnation:
        return RefusalReason.STALE_EPOCH, f"a newer incarnation of {body.ingress} is known here"
    if view.draining:
        return RefusalReason.DRAINING, "this worker takes no new work"
    if view.live >= view.live_max:
        return RefusalReason.FULL, f"{view.live} sequences, at most {view.live_max}"
    if body.epoch < 0 or not body.prompt_token_ids or not body.sequence or not body.ingress:
        return RefusalReason.INVALID, "epoch, prompt, sequence and ingress must be given"
    length = len(body.prompt_token_ids) + len(body.output_token_ids)
    if length >= view.max_model_len:
        return RefusalReason.TOO_LONG, f"{length} tokens leave no room below {view.max_model_len}"
    return None

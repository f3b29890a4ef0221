"""An instance that nobody is sent to shows nothing: what it was last seen to take must not keep everybody away."""

import pytest
from millrace.contracts.status import BatchComposition, StatusSnapshot

from tests.unit.predictor_rig import MS, STEP_MS, Predictor, question, record, snapshot, status

SECOND = 1_000 * MS
#: Prediction for ten tokens at an idle instance whose steps take what its set says.
USUAL_NS = 10 * STEP_MS * MS


class Pair:
    def __init__(self) -> None:
        self.predictor = Predictor()
        self._last: dict[str, StatusSnapshot] = {}
        for name in ("w0", "w1"):
            self.predictor.register(record(name), name)
            self._tell(snapshot(name))

    def works(self, name: str, *, pace: float, steps: int) -> None:
        """Decodes two sequences for so many steps, each ``pace`` times as long as the set says; then it is idle."""
        duration_ns = round(pace * STEP_MS * MS)
        for _ in range(steps):
            self.predictor.now_ns += duration_ns
            for known in self._last.values():
                self.predictor.send(known)  # workers say again and again that nothing has changed
            self._tell(self._decoded(name, duration_ns))
        self._tell(snapshot(name, step=self._last[name].step + 1, at_ns=self.predictor.now_ns))

    def _decoded(self, name: str, duration_ns: int) -> StatusSnapshot:
        step = self._last[name].step + 1
        return snapshot(
            name,
            step=step,
            at_ns=self.predictor.now_ns,
            running=[status(f"{name}-{index}.0", output_tokens=min(350, step)) for index in range(2)],
            blocks_free=400,
            step_duration_ns=duration_ns,
            batch=BatchComposition(decodes=2, context_tokens=2 * (32 + step)),
        )

    def _tell(self, body: StatusSnapshot) -> None:
        self._last[body.instance] = body
        self.predictor.send(body)

    def predicted_ns(self, name: str) -> int:
        return self.predictor.ask(question(instance=name)).e2e_ns


def test_an_instance_that_was_slow_once_is_tried_again_after_a_rest() -> None:
    pair = Pair()
    pair.works("w0", pace=1.0, steps=100)
    pair.works("w1", pace=2.0, steps=100)  # something else had its core for a while
    assert pair.predicted_ns("w1") > 1.6 * USUAL_NS
    pair.works("w0", pace=1.0, steps=2_000)
    assert pair.predicted_ns("w1") == pytest.approx(pair.predicted_ns("w0"), rel=0.1)


def test_what_an_idle_instance_answered_once_does_not_outlive_what_its_kin_show() -> None:
    pair = Pair()
    before_ns = pair.predicted_ns("w1")
    pair.works("w0", pace=2.0, steps=200)
    assert pair.predicted_ns("w1") > 1.5 * before_ns


def test_a_pace_is_not_forgotten_between_two_requests() -> None:
    pair = Pair()
    pair.works("w0", pace=1.0, steps=100)
    pair.works("w1", pace=2.0, steps=100)
    told_ns = pair.predicted_ns("w1")
    pair.predictor.now_ns += SECOND // 2
    assert pair.predicted_ns("w1") == pytest.approx(told_ns, rel=0.02)


def test_a_slow_instance_shows_its_pace_again_with_its_first_steps_after_a_rest() -> None:
    pair = Pair()
    pair.works("w1", pace=2.0, steps=100)
    pair.works("w0", pace=1.0, steps=2_000)
    assert pair.predicted_ns("w1") < 1.2 * USUAL_NS
    pair.works("w1", pace=2.0, steps=30)
    assert pair.predicted_ns("w1") > 1.5 * USUAL_NS

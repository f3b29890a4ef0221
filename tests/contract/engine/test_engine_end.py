"""End of an Engine: by itself when asked, or by force."""

from millrace.actor.engine import EngineFailed

from tests.contract.engine.harness import Harness, failures


def test_a_dead_engine_is_told_once_and_stopping_it_afterwards_is_no_error(engine: Harness) -> None:
    name = engine.add([1, 2, 3], max_tokens=200, ignore_eos=True)
    engine.until(lambda: bool(engine.results[name].outputs), "outputs")
    engine.die()
    engine.until(lambda: bool(failures(engine)), "the engine's end to be told")
    assert failures(engine)[0].detail
    engine.rest()
    heard = len(engine.events)
    assert isinstance(engine.events[-1], EngineFailed)
    assert len(failures(engine)) == 1
    engine.stop()
    engine.stop()
    engine.rest()
    assert len(engine.events) == heard

"""With contiguous runs at both ends a sequence moves in a few pieces, however much has come and gone before."""

from millrace.contracts.worker import Sampling

from tests.engine.bench_engine import BenchEngine
from tests.engine.moving import Pair, begin, prompt_of, same, settled, whole
from tests.testbed.tiny_llama import LAYERS


def churn(engine: BenchEngine, salt: int) -> None:
    """Sequences of all lengths side by side, which end one after the other and leave their blocks scattered."""
    for turn in range(2):
        names = [
            engine.add(
                prompt_of(20 + 37 * index, salt=salt + 10 * turn + index),
                Sampling(max_tokens=20 + 45 * (index * 5 % 4), temperature=0.0, ignore_eos=True),
            )
            for index in range(6)
        ]
        engine.finish(*names)


def test_a_sequence_moves_in_few_pieces_after_much_coming_and_going(pair: Pair) -> None:
    assert pair.source.info.kv.segments
    churn(pair.source, 100)
    churn(pair.target, 200)
    prompt, sampling = prompt_of(450, salt=77), Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
    expected = pair.source.run(prompt_of(450, salt=77), sampling)
    journey = begin(pair, prompt, sampling, at=40)
    journey.go()
    assert len(journey.leased.blocks) >= 15
    assert journey.descriptors <= 3 * LAYERS, f"{journey.descriptors} pieces, {journey.leased.blocks}"
    same(whole(journey), expected)
    settled(pair)

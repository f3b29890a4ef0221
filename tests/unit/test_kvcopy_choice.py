"""Choice of the copier that two engines use, and what an operator is told about the others."""

import pytest
from millrace.contracts.kv import CopierKind, KvEndpoint, KvRank
from millrace.kvcopy.choice import BEST_FIRST, choose

SHARED, NIXL = CopierKind.SHARED_MEMORY, CopierKind.NIXL
EVERY = [SHARED, NIXL]


def endpoint(*, copiers: list[CopierKind] = EVERY, machine: str = "m", device: int = -1) -> KvEndpoint:
    ranks = [KvRank(planes=[], region_bytes=0, device=device)]
    return KvEndpoint(
        fingerprint="f", block_tokens=16, block_bytes=64, blocks=8, copiers=copiers, ranks=ranks, machine=machine
    )


@pytest.mark.parametrize(
    ("own", "peer", "kinds"),
    [
        pytest.param(endpoint(), endpoint(), [SHARED, NIXL], id="one host"),
        pytest.param(endpoint(), endpoint(machine="n"), [NIXL], id="two hosts"),
        pytest.param(endpoint(machine=""), endpoint(machine=""), [NIXL], id="hosts not known"),
        pytest.param(endpoint(device=0), endpoint(device=1), [NIXL], id="two GPUs of a host"),
        pytest.param(endpoint(device=0), endpoint(), [NIXL], id="a GPU and host memory"),
        pytest.param(endpoint(copiers=[NIXL]), endpoint(copiers=[NIXL, SHARED]), [NIXL], id="one in common"),
        pytest.param(endpoint(copiers=[NIXL]), endpoint(copiers=[SHARED]), [], id="none in common"),
    ],
)
def test_what_both_ends_and_the_path_allow(own: KvEndpoint, peer: KvEndpoint, kinds: list[CopierKind]) -> None:
    choice = choose(own, peer)
    assert choice.kinds == kinds
    assert set(choice.refused) == set(BEST_FIRST) - set(kinds)
    assert all(choice.refused.values())


def test_a_forced_order_is_kept_and_nothing_else_is_used() -> None:
    assert choose(endpoint(), endpoint(), forced=[NIXL, SHARED]).kinds == [NIXL, SHARED]
    choice = choose(endpoint(), endpoint(), forced=[NIXL])
    assert choice.kinds == [NIXL]
    assert choice.refused[SHARED] == "not among the forced ones"


def test_the_line_for_an_operator_names_the_choice_and_every_reason() -> None:
    text = choose(endpoint(copiers=[SHARED, NIXL]), endpoint(copiers=[SHARED])).text
    assert text.startswith("shared_memory (")
    assert "nixl: not offered by the peer" in text
    assert "modelled: not available here" in text
    assert choose(endpoint(copiers=[]), endpoint()).text.startswith("no copier (")

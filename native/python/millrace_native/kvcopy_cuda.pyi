"""Compiled from native/kvcopy/cuda; what the arguments mean stands in libs/millrace/kvcopy/cuda_copier.py."""

from collections.abc import Sequence

INTERFACE: int

def devices() -> int: ...
def export_region(address: int, bytes: int, device: int, /) -> tuple[bytes, int]: ...

class Mapping:
    def __init__(self, ipc: bytes, offset: int, bytes: int, device: int, /) -> None: ...
    @property
    def address(self) -> int: ...

class Transfer:
    def __init__(
        self,
        source: Sequence[int],
        target: Sequence[int],
        lengths: Sequence[int],
        source_address: int,
        source_bytes: int,
        target_address: int,
        target_bytes: int,
        device: int,
        /,
    ) -> None: ...
    def advance(self, bytes_max: int, /) -> bool: ...
    def cancel(self) -> None: ...
    @property
    def launches(self) -> int: ...

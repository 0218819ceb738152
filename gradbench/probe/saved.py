"""The bytes that autograd keeps between the forward and the backward pass."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Counts the bytes that autograd keeps for the backward pass: the most at one time, parameters left out.

    Storages count once. What `torch.utils.checkpoint` keeps or computes again is not autograd's and not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        """Leave the parameters of `model` out."""
        self.peak_bytes = self._bytes = 0
        self._uses: Counter[int] = Counter()
        self._left_out = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def counting(self) -> AbstractContextManager[None]:
        """Return the context in which saved tensors are counted."""
        return saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor)

    def keep(self, address: int, size_bytes: int) -> None:
        """Note one more use of a storage."""
        self._uses[address] += 1
        if self._uses[address] == 1 and address not in self._left_out:
            self._bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def drop(self, address: int, size_bytes: int) -> None:
        """Note the end of a use."""
        self._uses[address] -= 1
        if self._uses[address] == 0 and address not in self._left_out:
            self._bytes -= size_bytes


class _Kept:
    """A saved tensor; autograd lets go of it when its node has run."""

    __slots__ = ("_address", "_counter", "_size", "tensor")

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._counter = tensor, counter
        self._address, self._size = storage.data_ptr(), storage.nbytes()
        counter.keep(self._address, self._size)

    def __del__(self) -> None:
        self._counter.drop(self._address, self._size)

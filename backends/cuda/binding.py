"""Torch views of device memory that spantune owns, and addresses of tensors that the user owns."""

from __future__ import annotations

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}


class _Block:
    """Carries an address to torch through the CUDA array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,
        }


def bytes_at(address: int, size: int) -> torch.Tensor:
    """A view of `size` bytes of device memory as u8."""
    return torch.as_tensor(_Block(address, size), device="cuda")


def tensor_at(address: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A view of device memory with a shape and one of the project's dtypes."""
    element = DTYPES[dtype]
    count = element.itemsize
    for extent in shape:
        count *= extent
    return bytes_at(address, count).view(element).view(shape)


def upload(target: int, source: torch.Tensor) -> None:
    """Copies a tensor's bytes to an address, whatever device it is on."""
    flat = source.contiguous().view(-1).view(torch.uint8)
    bytes_at(target, flat.numel()).copy_(flat)

"""What a tensor holds: whether it is finite, in which range, in whose memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

WITHOUT_MEMORY = (UninitializedTensorMixin, FakeTensor, FunctionalTensor)
PACKED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_float(t: object) -> bool:
    """A tensor of real or complex numbers, whose memory can be looked at."""
    if (type(t) is not Tensor and not (isinstance(t, Tensor) and has_memory(t))) or t.is_meta:
        return False
    wrapped = t.is_nested or t._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(t)
    return (t.is_floating_point() or t.is_complex()) and not wrapped


def has_memory(t: Tensor) -> bool:
    """Does it hold numbers itself? Some are made of other tensors, or have given their memory back (FSDP)."""
    made_of = isinstance(t, WITHOUT_MEMORY) or (local(t) is t and is_traceable_wrapper_subclass(t))
    return not made_of and (t.layout is not torch.strided or not t.numel() or local(t).untyped_storage().nbytes() > 0)


def is_composed(kind: type) -> bool:
    """A class of tensors that do each operation with other tensors, such as a DTensor."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(kind, WITHOUT_MEMORY)


def local(t: Tensor) -> Tensor:
    """What this process holds of a DTensor; any other tensor as it is."""
    return getattr(t, "_local_tensor", t)


def plain(t: Tensor) -> Tensor:
    """The numbers of ``t`` as a strided, real tensor, in the same memory where possible."""
    t = local(t).detach()
    if t.layout is not torch.strided:
        t = t._values() if t.layout is torch.sparse_coo else t.values().detach() if t.layout in PACKED else t.to_dense()
    return torch.view_as_real(t.conj() if t.is_conj() else t) if t.is_complex() else t


def wide(t: Tensor) -> Tensor:
    """The same in a dtype that every operation knows: few know float8."""
    return plain(t).float() if t.element_size() == 1 else plain(t)


def key_of(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef((local(t) if t.layout is torch.strided else plain(t)).untyped_storage())


def bad(t: Tensor) -> str:
    """'' | 'inf' | '-inf' | 'nan': the worst value in ``t``. One sum if healthy; as that may overflow, look twice if
    not."""
    t = wide(t) if t.layout is not torch.strided or t.is_complex() or t.element_size() == 1 else local(t)
    if math.isfinite(t.sum().item()):
        return ""
    low, high = (v.item() for v in torch.aminmax(t))
    return "nan" if high != high else "inf" if high == math.inf else "-inf" if low == -math.inf else ""


def bad_mask(t: Tensor) -> Tensor:
    return wide(t) * 0 != 0  # half the time of isfinite()


def big(t: Tensor) -> bool:
    """Is its largest number finite, but so near the end of the dtype as what nan_to_num() puts in place of inf?"""
    return torch.finfo(t.dtype).max ** 0.9 < (wide(t).abs().max().item() if t.numel() else 0) < math.inf


def is_mask(t: Tensor) -> bool:
    """Is each finite number 0, as in a mask that is added?"""
    return not plain(t)[~bad_mask(t)].any()


def span(t: Tensor) -> str:
    """Shape, dtype, range of the finite values, and how many are zero, inf or NaN."""
    text, t = f"{tuple(plain(t).shape)} {str(plain(t).dtype).removeprefix('torch.')}", wide(t)
    good = t[torch.isfinite(t)]
    if good.numel():
        text += " in [{:.3g}, {:.3g}]".format(*(v.item() for v in torch.aminmax(good)))
    counts = {"zero": t == 0, "inf": t == math.inf, "−inf": t == -math.inf, "nan": torch.isnan(t)}
    text += "".join(f", {n} {name}" for name, at in counts.items() if (n := int(at.sum())))
    return text + ", empty" * (t.numel() == 0)


def as_list(value: object) -> list | tuple:
    return value if isinstance(value, (list, tuple)) else [value]

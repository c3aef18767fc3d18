from __future__ import annotations

import pytest
import torch
from torch import nn

from instar.checkpoint.tensor_file import DTYPES
from instar.models.module import check_trainable


def with_buffer(dtype: torch.dtype) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.empty(0, dtype=dtype))
    return module


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_buffer_of_every_dtype_that_a_checkpoint_holds_is_accepted(dtype: torch.dtype) -> None:
    check_trainable(with_buffer(dtype))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e8m0fnu])
def test_a_buffer_that_no_checkpoint_could_hold_is_refused_before_the_first_save(
    dtype: torch.dtype,
) -> None:
    with pytest.raises(ValueError, match=r"table, of type .* cannot be saved"):
        check_trainable(with_buffer(dtype))

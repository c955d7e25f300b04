"""Where these tests run the kernels: on a GPU, or interpreted."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def there(value: Any, device: torch.device = DEVICE) -> Any:
    """The tensors of a value, however nested, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        moved = [there(each, device) for each in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: there(getattr(value, field.name), device) for field in fields(value)})
    return value

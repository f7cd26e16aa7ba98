"""Read tensors that PyTorch wrote, through its weights-only loader, where PyTorch is installed."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

# dtypes that NumPy takes only as bytes, by their name in torch
_BY_BYTES = {
    "torch.bfloat16": ml_dtypes.bfloat16,
    "torch.float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "torch.float8_e5m2": ml_dtypes.float8_e5m2,
    "torch.float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "torch.float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "torch.float8_e8m0fnu": getattr(ml_dtypes, "float8_e8m0fnu", None),
}


def to_numpy(tensor) -> np.ndarray:
    """A torch tensor as a NumPy array, bit for bit; bfloat16 and FP8 through a view of their bytes, because
    neither DLPack nor `Tensor.numpy()` takes them. Raises ValueError for a dtype that NumPy has no name for."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype)
    if name not in _BY_BYTES:
        try:
            return tensor.numpy()
        except TypeError as error:
            raise ValueError(f"torch dtype {name} has no NumPy counterpart ({error})") from None
    if _BY_BYTES[name] is None:
        raise ValueError(f"torch dtype {name}: this ml_dtypes has no such type; version 0.5 or newer is required")
    dtype = np.dtype(_BY_BYTES[name])
    if tensor.dim() == 0:
        return to_numpy(tensor.reshape(1)).reshape(())
    return tensor.view(torch.uint8).numpy().view(dtype)


def to_torch(array: np.ndarray):
    """A NumPy array as a torch tensor, bit for bit, by copy."""
    import torch

    array = np.array(array, order="C")
    name = next((n for n, d in _BY_BYTES.items() if d is not None and array.dtype == d), None)
    if name is None:
        return torch.from_numpy(array)
    dtype = getattr(torch, name.removeprefix("torch."))
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)


def load_object(path: Path):
    """What the file holds, read without running code from it.

    Raises ValueError where torch is absent, the file is broken, or it holds objects other than tensors.
    """
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{path}: reading .pt needs PyTorch, which is not installed; install it, or convert the file where it was "
            "written: numpy.savez, or refmodel.save_tensors for bfloat16 and FP8"
        ) from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds; each means that the file cannot be read safely
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: torch's weights-only loader refused the file ({first[:160]})") from None


def load_torch(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a `.pt` file by name: nested names are joined by dots; one bare tensor gets the file's stem."""
    found: dict[str, np.ndarray] = {}

    def collect(name: str, value) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                collect(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                collect(f"{name}.{i}" if name else str(i), item)
        elif type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach"):
            found[name or path.stem] = to_numpy(value)

    collect("", load_object(path))
    if not found:
        raise ValueError(f"{path}: holds no tensor")
    return found

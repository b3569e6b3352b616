"""What a result was made with: versions, the device, and how kernels ran."""

import importlib.metadata
import platform


def environment() -> dict[str, str]:
    """By name, for reports."""
    import torch

    import tilewise
    from tilewise.ops._host.backend import interpreting

    found = {"tilewise": tilewise.__version__, "python": platform.python_version()}
    found |= {package: importlib.metadata.version(package) for package in ("torch", "triton", "numpy")}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    found["kernels"] = "interpreted" if interpreting() else "compiled"
    return found

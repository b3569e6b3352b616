"""What a result was made with: versions, the device, and how kernels ran."""

import platform

from tilewise.doctor import families, nvidia_smi
from tilewise.doctor.finding import MISSING, version_of


def environment() -> dict[str, str]:
    """By name, for reports.

    On a GPU also CUDA, cuDNN, the driver and the clocks just now, as far as nvidia-smi tells.
    """
    import torch

    import tilewise
    from tilewise.ops._host.backend import interpreting

    found = {"tilewise": tilewise.__version__, "python": platform.python_version()}
    packages = ("torch", "triton", "numpy")
    found |= {name: version_of(name) if families.is_there(name) else MISSING for name in packages}
    gpu = torch.cuda.is_available()
    found["device"] = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    found["kernels"] = "interpreted" if interpreting() else "compiled"
    if gpu:
        found["CUDA"] = str(torch.version.cuda)
        if torch.backends.cudnn.is_available():
            found["cuDNN"] = str(torch.backends.cudnn.version())
        states = nvidia_smi.states()
        # With CUDA_VISIBLE_DEVICES torch numbers otherwise than nvidia-smi, which shows all GPUs.
        if len(states) == torch.cuda.device_count():
            state = states[torch.cuda.current_device()]
            found["clocks"] = f"{state['clocks.sm']} of {state['clocks.max.sm']} MHz, memory {state['clocks.mem']} MHz"
            found["power"] = f"{state['power.draw']} of {state['power.limit']} W"
        if states:
            found["driver"] = states[0]["driver_version"]
    return found

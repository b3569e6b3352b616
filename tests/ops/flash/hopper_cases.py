"""Problems that Hopper's kernels take, as `tilewise verify` writes them: every width, mask and layout, lengths around
the ends of tiles.
"""

import pytest
import torch

from tilewise import workbench
from tilewise.ops._host.launching import capture
from tilewise.ops.flash import launch

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

FORWARD = (
    # Widths, q's and v's apart and together.
    "T=300,D=40,causal=true",
    "B=2,T=384,H=3,D=64",
    "T=511,D=64,Dv=128,causal=true",
    "T=300,D=72,Dv=40",
    "T=333,D=96,causal=true",
    "B=2,T=512,D=128",
    "B=2,T=512,D=128,causal=true",
    "T=700,D=128,Dv=64,causal=true",
    "T=400,H=1,D=192,Dv=128,causal=true",
    "T=400,H=1,D=192",
    "T=300,H=1,D=64,Dv=256",
    "T=300,H=1,D=256,Dv=64,causal=true",
    "T=300,H=1,D=128,Dv=200",
    "T=513,H=1,D=256,causal=true",
    "T=300,H=1,D=256,window=70/20",
    # Lengths: one key tile and a bit, odd ones, more queries than keys and fewer, rows that see nothing.
    "T=257,D=64,causal=true",
    "T=1000,H=1,D=128",
    "T=1,Tk=1000,D=128,causal=true",
    "T=100,Tk=777,D=128,causal=true",
    "T=900,Tk=300,D=128,causal=true",
    "T=900,Tk=300,D=64",
    "T=650,Tk=257,D=128,window=20/0",
    # Windows: masks at both ends, whole tiles between them or none.
    "T=1000,H=1,D=128,window=300/0",
    "T=1000,H=1,D=128,causal=true,window=19/0",
    "T=900,H=1,D=64,window=200/100",
    "T=900,H=1,D=64,window=-1/50",
    "T=900,H=1,D=128,window=400/-1",
    "T=400,Tk=700,D=128,window=3/0",
    # Heads.
    "T=300,H=8,Hk=1,D=128,causal=true",
    "T=300,H=6,Hk=2,D=64,causal=true",
    "B=3,T=290,H=16,Hk=2,D=64",
    # Scores.
    "T=400,D=64,softcap=4.0,causal=true",
    "T=400,D=128,softcap=20.0,window=150/30",
    "T=300,D=128,scale=-0.3,causal=true",
    "T=300,D=64,scale=-0.3,softcap=5.0",
    "T=300,D=128,scale=0.0,causal=true",
    "T=300,D=64,size=2500.0,causal=true",
    # Layouts.
    "B=2,T=300,D=64,layout=transposed,causal=true",
    "B=2,T=300,H=4,Hk=2,D=128,Dv=64,layout=transposed",
    # Packed.
    "lengths=130/0/257/1,H=2,Hk=1,D=128,causal=true",
    "lengths=0/0/128/300/7/0,H=2,D=64,causal=true",
    "lengths=40/0/300/200,H=2,D=128",
    "lengths=5/0/366/9,lengths_k=170/3/0/240,H=2,D=64,causal=true",
    "lengths=300/40,lengths_k=100/400,H=3,Hk=1,D=128,Dv=64",
    "lengths=333/0/64/300,H=2,D=128,window=80/30,softcap=10.0",
    "lengths=200/129,H=1,D=192,Dv=256,causal=true",
    "lengths=300/1/0/450,H=4,Hk=2,D=160,Dv=128",
    "T=600,H=6,Hk=3,D=192,window=200/30",
    "T=513,Tk=300,H=2,D=256,Dv=192,scale=-0.3",
    "T=300,H=2,D=128,Dv=192,causal=true",
    # More items than SMs: programs go from one to the next.
    "B=4,T=1024,H=16,D=64,causal=true",
    "B=4,T=777,H=16,Hk=4,D=128",
    "lengths=300/1/0/700/64/128/129/900/5/200,H=32,Hk=8,D=64,causal=true",
)  # fmt: skip


# Named cases of verify, which alone can catch some of the bugs planted in these kernels.
NAMED = ("packed-128", "long-128", "long-empty", "long-window", "long-packed", "long-192", "long-packed-256")


def forward_kernels(case: str, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Names of the kernels that a case's forward launches on Hopper."""
    return [one.kernel.__name__ for one in forward_launches(case, dtype)]


def forward_launches(case: str, dtype: torch.dtype = torch.bfloat16) -> list:
    """What a case's forward launches on Hopper."""
    problem = workbench.find("flash").load("suite").find(case).problem
    tensors = problem.tensors(lambda _name, shape, _size: torch.zeros(shape, dtype=dtype))
    options = problem.options()
    left, right = options.get("window_size", (-1, -1))
    scale = options.get("scale", problem.D**-0.5)
    with capture(90) as launches:
        launch.forward(
            launch.make_inputs(
                *(tensors.get(name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
                options.get("causal", False), left, right, scale, options.get("softcap", 0.0),
            )
        )  # fmt: skip
    return launches

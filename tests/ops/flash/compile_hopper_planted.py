"""Compiles Hopper's kernels with one of the bugs that `tilewise verify --mutants` plants, and prints what they use as
JSON, in a process of its own.

`compile_hopper_planted.py BUG`: the forward, the backward or both, where the bug is, with all options; where it is of
more than 128 channels, at 192 and without softcap.
"""

import sys
from pathlib import Path

import torch

from tilewise.verify.planting import plant
from tilewise.workbench.flash.planted import HOPPER
from tilewise.workbench.flash.planted_wide import HOPPER_WIDE

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

BOTH = ["forward", "backward"]

if __name__ == "__main__":
    mutant = next(mutant for mutant in HOPPER if mutant.name == sys.argv[1])
    plant(mutant)
    # These import the kernels.
    from compile_launches import print_facts

    from tilewise.workbench.flash.inspect import hopper

    module = mutant.module.rpartition(".")[2]
    directions = {"fwd": ["forward"], "work": ["forward"], "ring": BOTH, "pieces": BOTH}.get(module, ["backward"])
    width, variant = (192, "uncapped") if mutant in HOPPER_WIDE else (64, "all")
    found = hopper(90, torch.bfloat16, width, width, variant)
    print_facts([one.launch for one in found if one.direction in directions], 90)

"""Compiles Hopper's kernels with one of the bugs that `tilewise verify --mutants` plants, and prints what they use as
JSON, in a process of its own.

`compile_hopper_planted.py BUG`: the forward or the backward, where the bug is, with all options.
"""

import sys
from pathlib import Path

import torch

from tilewise.verify.planting import plant
from tilewise.workbench.flash.planted import HOPPER

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

if __name__ == "__main__":
    mutant = next(mutant for mutant in HOPPER if mutant.name == sys.argv[1])
    plant(mutant)
    # These import the kernels.
    from compile_launches import print_facts

    from tilewise.workbench.flash.inspect import hopper

    direction = "forward" if mutant.module.endswith((".fwd", ".work")) else "backward"
    # The backward's first three: in the fixed order.
    print_facts([one.launch for one in hopper(90, torch.bfloat16, 64, 64, "all") if one.direction == direction][:3], 90)

"""Compiles Hopper's forward without a GPU and prints what it uses as JSON:
`compile_hopper_fwd.py DTYPE [CHANNELS VALUES VARIANT]...`.
"""

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from compile_launches import print_facts

from tilewise.workbench.flash.inspect import hopper

words = iter(sys.argv[2:])
problems = list(itertools.zip_longest(words, words, words))
found = [
    one
    for channels, values, variant in problems
    for one in hopper(90, getattr(torch, sys.argv[1]), int(channels), int(values), variant)
]
print_facts([one.launch for one in found if one.direction == "forward"], 90)

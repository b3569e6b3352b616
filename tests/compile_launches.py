"""Compiles an operator's kernels without a GPU and prints what they use as JSON, in a process of its own, for the
tests' process interprets kernels.

`compile_launches.py OPERATOR:FUNCTION ARCHITECTURE DTYPE WORDS...`: what that function of its declaration says is
launched.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterable

import torch

from tilewise.inspect.compile import inspect_launch
from tilewise.ops._host.launching import Launch


def print_facts(launches: Iterable[Launch], architecture: int) -> None:
    found = [inspect_launch(launch, architecture, mix=False, sass=False).facts for launch in launches]
    print(json.dumps([dataclasses.asdict(facts) for facts in found]))


def main(place: str, architecture: int, dtype: torch.dtype, *words: str) -> None:
    module, function = place.split(":")
    launches = getattr(importlib.import_module(f"tilewise.workbench.{module}.inspect"), function)
    found = launches(architecture, dtype, *(int(word) if word.isdecimal() else word for word in words))
    print_facts([one.launch for one in found], architecture)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3]), *sys.argv[4:])

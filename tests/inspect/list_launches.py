"""Prints as JSON which launches there are on sm_90: those that `tilewise inspect --check` compiles, and those of every
configuration.
"""

import json

import torch

from tilewise import workbench
from tilewise.inspect.command import operators
from tilewise.inspect.facts import Wanted
from tilewise.inspect.worker import wanted_launches

checked = [one for _, one in wanted_launches(Wanted(operators(), every=False), 90)]
configurations = {}
for name in workbench.names("configs"):
    configuration = workbench.find(name).load("launches").configuration
    entries = [entry for entry in workbench.find(name).load("configs").entries() if entry.element_size == 2]
    configurations[name] = [[one.name for one in configuration(entry, "", 90, torch.bfloat16)] for entry in entries]
print(
    json.dumps(
        {
            "checked": [(one.launch.kernel.__name__, one.direction, one.label) for one in checked],
            "configurations": configurations,
            "limited": any(
                "nsa_selected_fwd_lists" in one.name and "maxnreg" in one.launch.arguments for one in checked
            ),
        }
    )
)

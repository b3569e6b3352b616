"""Prints a digest of each flash kernel's PTX for sm_90, as it is or with every tap line taken out of the source:
`compile_taps.py [without]`.
"""

import hashlib
import json
import re
import sys

import torch

from tilewise.verify.planting import plant
from tilewise.verify.suite import Mutant


class WithoutTaps(Mutant):
    """Takes out every line that calls tap."""

    def plant(self, source: str) -> str:
        stripped, count = re.subn(r"(?m)^ *tap_\w+\(.*\)\n", "", source)
        assert count >= 2, "there are no taps to take out"
        return stripped


def main(module: str, without: bool) -> None:
    if without:
        plant(WithoutTaps("without-taps", "", module, "", ""))
    from tilewise.inspect.compile import compile_launch
    from tilewise.ops.flash import configs, launch

    q = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16, device="meta")
    inputs = launch.make_inputs(q, q, q, None, None, True, -1, -1, 0.125, 0.0)
    config = configs.Config(64, 64, 4, 2)
    lse = torch.empty(2, 4, 512, device="meta")
    launches = [
        launch.forward_launch(inputs, q, lse, config),
        *launch.backward_launches(inputs, q, lse, q, None, (q, q, q), config, config),
    ]
    digests = {}
    for item in launches:
        compiled = compile_launch(item, 90)
        # Lines of the source are debug information, not code.
        code = re.sub(r"(?m)^\s*\.(loc|file).*\n|^\$L__tmp.*\n|\s*//.*$", "", compiled.ptx.split(".section")[0])
        digests[item.kernel.__name__] = hashlib.sha256(code.encode()).hexdigest()
    print(json.dumps(digests))


main(sys.argv[1], "without" in sys.argv[2:])

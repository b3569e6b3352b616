"""Audits one part of an operator with an overflow planted in its kernels: `audit_planted.py PART MODULE OLD NEW`.
Prints what is wrong with the first launch that it catches as JSON.
"""

import json
import sys

from tilewise.verify.planting import plant
from tilewise.verify.suite import Mutant

part, module, old, new = sys.argv[1:]
plant(Mutant("a narrow offset", "an offset in 32 bits", module, old, new))

from tilewise.inspect.audit_worker import audit_part  # noqa: E402

print(json.dumps(next((entry["wrong"] for entry in audit_part(part) if entry["wrong"]), [])))

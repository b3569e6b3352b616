"""Runs `tilewise trace` with a bug planted: planted.py MODULE OLD NEW OPERATOR ARGUMENT..."""

import sys

from tilewise import interpreter
from tilewise.verify.planting import plant
from tilewise.verify.suite import Mutant

interpreter.use_where_no_gpu()
module, old, new, *arguments = sys.argv[1:]
plant(Mutant("planted", "", module, old, new))

from tilewise.cli import main  # noqa: E402

sys.argv = ["tilewise", "trace", *arguments]
main()

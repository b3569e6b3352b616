"""Bugs planted in native sparse attention over ranks: in where queries stand, in which keys and windows are there, and
in what gradients add up to.
"""

from tilewise.verify.suite import Mutant
from tilewise.workbench.flash.planted_ranks import EXCHANGED

_CALLS, _BRANCHES = "parallel.calls", "parallel.nsa_branches"

MUTANTS = (
    *EXCHANGED,
    Mutant(
        "own-position",
        "a rank's queries stand where its own tokens do",
        _CALLS,
        "torch.full((sequences,), one.start,",
        "torch.full((sequences,), one.row,",
    ),
    Mutant(
        "own-position-packed",
        "so they do where packed",
        _CALLS,
        "index_copy_(0, of, starts)",
        "index_copy_(0, of, rows)",
    ),
    Mutant(
        "local-blocks",
        "given blocks are held against the rank's own numbers of blocks",
        _BRANCHES,
        "own = plan.position_ids.to(q.device)[:, None, None]",
        "own = torch.arange(plan.local_tokens)[:, None, None]",
    ),
    Mutant(
        "windows-of-fetched",
        "learned windows are counted in the keys that were fetched",
        _BRANCHES,
        "whole_offsets(plan, q.device) if self.learned else self.keys.cu",
        "self.keys.cu",
    ),
    Mutant(
        "keys-of-one-part",
        "sequences are as long as the rank's own tokens of them",
        _BRANCHES,
        "lengths[one.sequence] = one.stop",
        "lengths[one.sequence] = plan.local_cu_seqlens.diff()[one.sequence]",
    ),
    Mutant(
        "window-elsewhere",
        "the sliding window's keys are looked for where they would be without the others",
        _BRANCHES,
        "self.rows.count(here[0]), here[0].device, self.reach)",
        "self.rows.count(here[0]), here[0].device)",
    ),
    Mutant(
        "windows-of-own-keys",
        "windows that straddle ranks are compressed from the rank's own keys",
        _BRANCHES,
        "made = self.kernels.compress(x, self",
        "own = torch.isin(torch.arange(x.shape[-3]), self.plan.position_ids)[:, None, None]\n"
        "        made = self.kernels.compress(x * own, self",
    ),
    Mutant(
        "learned-twice",
        "the gradients of k_cmp and v_cmp are added twice",
        _BRANCHES,
        "_add([x[..., heads.keys, :] for x in dwindows], found)",
        "_add([x[..., heads.keys, :] for x in dwindows], [2 * x for x in found])",
    ),
    Mutant(
        "learned-by-rank",
        "the gradients of k_cmp and v_cmp are the whole on every rank",
        _BRANCHES,
        "[x.to(k_cmp.dtype) for x in dwindows]",
        "[(problem.plan.world * x).to(k_cmp.dtype) for x in dwindows]",
    ),
    Mutant(
        "means-lost",
        "gradients of windows' means do not reach keys and values",
        _BRANCHES,
        "_add(totals, [problem.means_backward(x, totals[0].shape[-3]) for x in found])",
        "[problem.means_backward(x, totals[0].shape[-3]) for x in found]",
    ),
    Mutant(
        "last-part-alone",
        "of a rank's chunks and branches the last alone gives gradients to keys",
        _BRANCHES,
        "total += x",
        "total.copy_(x)",
    ),
    Mutant(
        "dq-of-one-branch",
        "a branch's dq takes the place of the others'",
        _BRANCHES,
        "problem.rows.add(dq, part.rows, of_q)",
        "problem.rows.put(dq, part.rows, of_q.to(dq.dtype))",
    ),
)

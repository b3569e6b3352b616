"""Flash attention over the ranks of a ContextPlan, for verify --parallel."""

from tilewise.verify.rank_suite import OverRanks
from tilewise.workbench.flash.cases import Flash
from tilewise.workbench.flash.planted_ranks import MUTANTS


def takes(problem: Flash) -> bool:
    """Self-attention: as many keys as queries."""
    return problem.Tk in (None, problem.T) and problem.lengths_k in ((), problem.lengths)


OVER_RANKS = OverRanks(
    takes,
    offsets=("cu_seqlens_q", "cu_seqlens_k"),
    shared=("q", "k", "v"),
    methods=("all_gather", "ring"),
    mutants=MUTANTS,
    cases=(
        "B=2,T=131,H=6,Hk=2,window=30/7,softcap=3.0",
        "lengths=90/3/0/61,H=4,Hk=2,causal=true,window=25/0,sinks=off",
        "lengths=5/64/2/33,scale=-0.3",
    ),
    few=("window-both", "packed"),
)

"""Native sparse attention over the ranks of a ContextPlan, for verify --parallel."""

from tilewise.verify.rank_suite import OverRanks
from tilewise.workbench.nsa.planted_ranks import MUTANTS

OVER_RANKS = OverRanks(
    lambda _problem: True,
    offsets=("cu_seqlens",),
    shared=("q", "k", "v", "g_cmp", "g_slc", "g_swa", "block_indices"),
    methods=("all_gather",),
    mutants=MUTANTS,
    cases=(
        "lengths=33/0/70,H=4,Hk=2,learned=true",
        "B=2,T=91,H=4,Hk=2,given=true",
        "T=90,Hk=1,gates=swa,window=20",
        "lengths=60/45,H=2,Hk=1,gates=slc,init=0,local=1,count=2",
    ),
    few=("odd-length", "packed"),
)

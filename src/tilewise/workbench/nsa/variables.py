"""Which variables of the kernels of attention to selected blocks hold what, and in words what makes it."""

from tilewise.trace.beside import Kernel
from tilewise.trace.values import Naming

MAKERS = {
    "steps": "what tokens name: how many blocks the union has, or entries the list",
    "Q": "the load of Q: its pointers, strides or mask, or the entries of the list",
    "K": "the load of K: its pointers, strides or mask, or which block the list or the union holds",
    "LSE_part": "the LSE that the programs in key order leave by entry, or which entries there are",
    "LSE2": "the LSE in base 2 over all slots, or of the forward",
    "O_part": "the result that a program in key order left for this slot",
    "W": "the weight of a slot: exp2(its LSE - that of all)",
    "dQ_part": "the part of dQ that a program in key order left for this slot",
}


FORWARD_LISTS = Kernel(
    "nsa_selected_fwd_lists_kernel",
    "forward",
    Naming(
        "S",
        {"Q": ("b_q",), "S": ("b_s",), "M": ("m",), "P": ("b_p",), "L": ("l",), "O": ("b_o",)},
        {"K": ("b_k",), "V": ("b_v",)},
    ),
    "step",
)
MERGE = Kernel(
    "nsa_selected_fwd_merge_kernel",
    "merge",
    Naming(
        "O_part",
        {"O_part": ("b_o",), "W": ("weight",), "O": ("acc",)},
        {"LSE_part": ("b_lse",), "M": ("m",), "L": ("l",), "LSE2": ("total",)},
    ),
    "slot",
)
FORWARD_UNION = Kernel(
    "nsa_selected_fwd_union_kernel",
    "forward",
    Naming(
        "S",
        {"K": ("b_k",), "S": ("b_s",), "M": ("m_new",), "P": ("b_p",), "L": ("l",), "V": ("b_v",), "O": ("acc",)},
        {"Q": ("b_q",)},
    ),
    "block",
)
BACKWARD_LISTS = Kernel(
    "nsa_selected_bwd_lists_kernel",
    "dkdv",
    Naming(
        "S",
        {
            "Q": ("b_q",),
            "dO": ("b_do",),
            "LSE2": ("b_lse",),
            "delta": ("b_delta",),
            "S": ("b_s",),
            "P": ("b_p",),
            "dP": ("b_dp",),
            "dS": ("b_ds",),
        }
        | {"dV": ("acc_dv",), "dK": ("acc_dk",), "dQ": ("b_dq",)},
        {"K": ("b_k",), "V": ("b_v",)},
    ),
    "step",
)
SUM = Kernel("nsa_selected_bwd_queries_kernel", "dq", Naming("dQ_part", {"dQ_part": ("b_dq",), "dQ": ("acc",)}), "slot")
BACKWARD_UNION = Kernel(
    "nsa_selected_bwd_union_kernel",
    "dq",
    Naming(
        "S",
        {
            "K": ("b_k",),
            "S": ("b_s",),
            "V": ("b_v",),
            "dP": ("b_dp",),
            "P": ("b_p",),
            "dS": ("b_ds",),
            "dQ": ("acc_dq",),
        },
        {"Q": ("b_q",), "dO": ("b_do",), "LSE2": ("b_lse",), "delta": ("b_delta",)},
    ),
    "block",
)

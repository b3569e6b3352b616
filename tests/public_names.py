"""What a user may rely on, written out: names with their parameters, members of classes, commands with their options.

Nothing here is read from the documentation or from the code, so that an edit of either cannot shorten it. A name, a
parameter or an option may be added; one that is removed or renamed breaks somebody's program.
"""

# Parameters in order; those behind `*` are given by name alone. Each must stay, and one that is added needs a default.
PARAMETERS = {
    "tilewise.flash_attention": (
        "q k v * causal window_size scale softcap cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "sinks seqused_k leftpad_k page_table num_splits return_lse deterministic backend"
    ),
    "tilewise.flash_attention_with_kvcache": (
        "q k_cache v_cache k v * cache_seqlens leftpad_k page_table causal window_size scale softcap sinks "
        "num_splits return_lse backend"
    ),
    "tilewise.native_sparse_attention": (
        "q k v * g_cmp g_slc g_swa k_cmp v_cmp compress_size compress_stride block_size block_count "
        "window_size init_blocks local_blocks scale cu_seqlens block_indices return_indices backend"
    ),
    "tilewise.compressed_attention": (
        "q k_cmp v_cmp * compress_size compress_stride scale cu_seqlens return_lse backend"
    ),
    "tilewise.select_blocks": (
        "q k_cmp * compress_size compress_stride block_size block_count init_blocks local_blocks scale "
        "cu_seqlens backend"
    ),
    "tilewise.selected_attention": "q k v block_indices * block_size scale cu_seqlens return_lse backend",
    "tilewise.native_sparse_attend": (
        "fq fk fv block_size selected_block_indices fmask sel_scale include_block_causal return_lse "
        "block_dk_dv_use_dot return_sliding_window_out * backend"
    ),
    "tilewise.NSACache": (
        "batch max_len kv_heads D Dv * compress_size compress_stride block_size block_count window_size "
        "init_blocks local_blocks compress dtype device page_table k_pages v_pages"
    ),
    "tilewise.nsa_decode_step": "q k v cache * g_cmp g_slc g_swa scale counts return_indices backend",
    "tilewise.hstu_attention": (
        "q k v seq_offsets * max_seq_len alpha causal num_targets max_attn_len contextual_seq_len backend"
    ),
    "tilewise.block_sparse_attn": (
        "q k v u g_cmp g_slc g_swa block_counts block_size window_size * scale interleave seq_offsets backend"
    ),
    "tilewise.hstu_attention_with_bsa": (
        "num_heads attention_dim linear_dim q k v u x_offsets invalid_attn_mask gate_model block_counts "
        "block_size window_size * backend"
    ),
    "tilewise.explaining_on": "architecture",
    "tilewise.Explanation": (
        "function backend why architecture interpreted forward backward reasons forward_bytes backward_bytes"
    ),
    "tilewise.warmup": "*operators shapes dtypes arch forward_only advanced",
    "tilewise.nn.NativeSparseAttention": (
        "dim heads kv_heads head_dim value_dim * compress_size compress_stride block_size block_count "
        "window_size init_blocks local_blocks compression rotary rotary_base bias backend device dtype"
    ),
    "tilewise.nn.WindowCompression": "size key_dim value_dim * device dtype",
    "tilewise.nn.HSTULayer": (
        "width heads attention_dim linear_dim * attention causal max_attn_len contextual_seq_len block_counts "
        "block_size window_size gate_hidden dropout bias backend device dtype"
    ),
    "tilewise.nn.GateModel": "channels hidden * device dtype",
    "tilewise.parallel.balanced": "cu_seqlens world * causal window_size",
    "tilewise.verify.verify": "op impl * configs dtypes seed fill gradients repeat rtol atol search mutants",
    "tilewise.verify.compare_tensors": "a b name rtol atol verbose",
    "tilewise.verify.Report": "results mutants searched",
    "tilewise.verify.Result": "check comparisons findings seconds",
    "tilewise.verify.Check": "operator implementation case dtype settings",
    "tilewise.verify.Settings": "seed fill gradients repeat rtol atol",
    "tilewise.verify.Comparison": "name max_diff mean_diff std_diff max_rel_diff mean_rel_diff allowed failure",
    "tilewise.verify.Failure": (
        "status problem diagnosis actual_range expected_range exceeding rtol atol elements worst worst_actual "
        "worst_expected heat"
    ),
    "tilewise.verify.Finding": "status message severity",
    "tilewise.verify.MutantResult": "operator name about caught_by status",
    "tilewise.trace.block_flash_attention": (
        "q k v block_m block_n n_warps warp out * causal scale fused_softmax reverse"
    ),
    "tilewise.trace.record.record": "program",
    "tilewise.trace.Recording": "program kernels events",
    "tilewise.trace.Event": "launch function name line value",
    "tilewise.interpreter.use_where_no_gpu": "",
    "tilewise.interpreter.repair": "",
    "tilewise.interpreter.interpreting": "",
    "tilewise.interpreter.quiet": "",
    "mytorch.Function": "",
    "mytorch.no_grad": "",
    "mytorch.gradcheck.gradcheck": "function inputs * eps atol rtol",
    "mytorch.manual_seed": "seed",
    "mytorch.set_cpu_backend": "name",
    "mytorch.cpu_backend": "",
    "mytorch.set_num_threads": "count",
    "mytorch.get_num_threads": "",
    "mytorch.nn.Module": "",
    "mytorch.nn.Sequential": "*modules",
    "mytorch.nn.Linear": "inputs outputs * bias",
    "mytorch.nn.Conv2D": "inputs outputs size * stride padding bias",
    "mytorch.nn.MaxPool2D": "size * stride",
    "mytorch.nn.Embedding": "count width",
    "mytorch.nn.LayerNorm": "width * eps",
    "mytorch.nn.Dropout": "p",
    "mytorch.nn.Flatten": "",
    "mytorch.nn.ReLU": "",
    "mytorch.nn.GELU": "",
    "mytorch.nn.SiLU": "",
    "mytorch.nn.MultiHeadAttention": "width heads * kv_heads causal bias",
    "mytorch.nn.TransformerBlock": "width heads * kv_heads causal hidden dropout",
    "mytorch.nn.CrossEntropyLoss": "",
    "mytorch.nn.MSELoss": "",
    "mytorch.nn.BCELoss": "",
    "mytorch.nn.Sigmoid": "",
    "mytorch.optim.Optimizer": "parameters lr remembered",
    "mytorch.optim.SGD": "parameters lr * momentum weight_decay",
    "mytorch.optim.Adam": "parameters lr * betas eps weight_decay",
    "mytorch.optim.AdamW": "parameters lr * betas eps weight_decay",
    "mytorch.optim.CosineSchedule": "optimizer total_steps warmup_steps minimum",
    "mytorch.optim.clip_grad_norm": "parameters max_norm",
    "mytorch.data.Dataset": "",
    "mytorch.data.ArrayDataset": "*arrays",
    "mytorch.data.DataLoader": "dataset batch_size * shuffle seed drop_last device",
    "mytorch.data.load_idx": "path",
    "tilewise.verify.compare.Comparison": "name max_diff mean_diff std_diff max_rel_diff mean_rel_diff allowed failure",
    "tilewise.doctor.as_json": "findings",
    "tilewise.doctor.examine": "probe",
    "tilewise.doctor.report": "",
    "tilewise.nn.rotary.rotate": "x positions base",
    "mytorch.gradcheck": "function inputs * eps atol rtol",
    "mytorch.autograd.gives_new_memory": "backward",
    "mytorch.cat": "tensors axis",
    "mytorch.stack": "tensors axis * dim",
    "mytorch.einsum": "equation *tensors",
    "mytorch.tensor": "data * dtype device requires_grad",
}

# Public names without parameters of their own: constants, types, enumerations, exceptions, modules.
OTHERS = (
    "mytorch.Device",
    "mytorch.Tensor",
    "mytorch.bool_",
    "mytorch.data",
    "mytorch.float16",
    "mytorch.float32",
    "mytorch.float64",
    "mytorch.int64",
    "mytorch.nn",
    "mytorch.optim",
    "tilewise.__version__",
    "tilewise.explain",
    "tilewise.interpreter",
    "tilewise.verify.UsageError",
    "tilewise.verify.result.CHOICE",
)

# Methods, properties and fields of the classes, as the API page shows them.
MEMBERS = {
    "tilewise.NSACache": "append check compressed gather k k_cmp lengths longest reset v v_cmp windows",
    "tilewise.Explanation": (
        "architecture backend backward backward_bytes forward forward_bytes function interpreted reasons why"
    ),
    "tilewise.nn.NativeSparseAttention": "init_cache step",
    "tilewise.nn.HSTULayer": "reset_parameters",
    "tilewise.nn.GateModel": "reset_parameters",
    "tilewise.verify.Report": "failures mutants passed results searched",
    "tilewise.verify.Result": "check comparisons findings passed seconds statuses worst",
    "tilewise.verify.Check": "case command dtype implementation operator settings",
    "tilewise.verify.Settings": "arguments atol fill gradients repeat rtol seed tolerances",
    "tilewise.verify.Comparison": "allowed failure max_diff max_rel_diff mean_diff mean_rel_diff name passed std_diff",
    "tilewise.verify.Failure": (
        "actual_range atol diagnosis elements exceeding expected_range heat problem rtol status worst "
        "worst_actual worst_expected"
    ),
    "tilewise.verify.Finding": "message severity status",
    "tilewise.verify.MutantResult": "about caught caught_by name operator status",
    "tilewise.trace.Recording": "events hit kernels of_kernel of_launch program",
    "tilewise.trace.Event": "function launch line name value",
    "mytorch.Tensor": (
        "T add arange astype attention backward cat conv2d create data_cpu data_ptr detach device div dropout "
        "dtype embedding exp flatten from_numpy gather gelu grad item layer_norm linear log log_softmax "
        "matmul max max_pool2d mean mul mutable_data_ptr neg numpy ones permute pow randn relu requires_grad "
        "reshape set_grad shape sigmoid silu size slice softmax sqrt strides sub sum tanh to transpose where "
        "zeros "
        "abs argmax chunk clamp clone einsum masked_fill split squeeze stack std unsqueeze var view"
    ),
    "mytorch.Function": "apply backward inputs needs release_saved_inputs save saved",
    "mytorch.Device": "CPU CUDA",
    "mytorch.nn.Module": (
        "astype eval forward load load_state_dict named_modules named_parameters named_tensors options "
        "parameters save state_dict to train training zero_grad"
    ),
    "mytorch.optim.Optimizer": "load_state_dict state_dict step zero_grad",
    "mytorch.optim.CosineSchedule": "at step",
    "mytorch.data.Dataset": "batch",
}

# Commands with all of their options.
OPTIONS = {
    "verify": (
        "--impl --config --dtype --range -r --range-raw --fill --seed --search --rtol --atol --no-grad --mutants "
        "--repeat --json --html --list --all --fail-fast --verbose -v --every-config --kernel --small --diff "
        "--budget --use"
    ),
    "new": "",
    "trace": (
        "--block-m --block-n --kernel-index --seq-blocks --program --warp --warps --head --direction --order "
        "--dtype --causal --targets --context --max-attn-len --range -r --impl --names --against --out --html"
    ),
    "sanity": "--kernel --small --diff --range -r --list",
    "bench": (
        "--impl --baseline --config --shape --mode --dtype --warmup --iterations --json --plot --html "
        "--compare --tolerance --unverified --no-save --list"
    ),
    "inspect": "--impl --arch --config --direction --dtype --sass --diff --json --check --update --audit",
    "warmup": "--shapes --dtype --arch --forward-only",
    "parallel-plan": "--tokens --lengths --heads --dim --world --method --link-gb-per-s --plot",
    "doctor": "--json --report",
}
# Each runs in a second or two.
COMMANDS = (
    *("verify --list", "trace flash --block-m 16 --block-n 16 --seq-blocks 1 --out .", "sanity flash --list"),
    *("new mine.py", "bench flash --list", "inspect --help", "warmup --help", "doctor --report"),
    "parallel-plan --tokens 4096 --heads 8/2 --dim 64 --world 4",
)

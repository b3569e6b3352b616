"""Bugs planted around flash attention's kernels that show in one use of it alone (verify/uses.py)."""

from tilewise.verify.suite import Mutant

_CALL = "given: tuple[Any, ...] = q, k, v, cu_seqlens_q, cu_seqlens_k"
_RETURN = "return (o, lse) if return_lse else o"
_GRADIENTS = "flash_backward.call_checked((do, dlse, q, k, v, o, lse, cu_q, cu_k, sinks), ctx.options)"
_BACKWARD = f"dq, dk, dv, dsinks = {_GRADIENTS}"
_SAVE = "ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks)"
# What lives as long as the process, as a cache does.
_KEPT = "vars(checks).setdefault('kept', {})"


def _before(use: str, name: str, about: str, bug: str) -> Mutant:
    return Mutant(name, about, "flash.api", _CALL, f"{bug}\n    {_CALL}", use=use)


def _after(use: str, name: str, about: str, bug: str) -> Mutant:
    return Mutant(name, about, "flash.api", _RETURN, f"{bug}\n    {_RETURN}", use=use)


def _backward(use: str, name: str, about: str, *lines: str) -> Mutant:
    return Mutant(name, about, "flash.api", _BACKWARD, "\n    ".join(lines), use=use)


USES = (
    _before(
        "no-grad",
        "no-grad-scale",
        "under no_grad the scale is lost",
        "scale = scale if torch.is_grad_enabled() else 1.0",
    ),
    _before(
        "no-grad",
        "no-grad-mask",
        "where no input requires grad the causal mask is lost",
        "causal = causal and any(x.requires_grad for x in (q, k, v))",
    ),
    _before(
        "fewer-outputs",
        "no-lse-scale",
        "where the LSE is not requested scores are not scaled",
        "scale = scale if return_lse else 1.0",
    ),
    _after(
        "fewer-outputs",
        "no-lse-graph",
        "where the LSE is not requested o has no graph",
        "o = o if return_lse else o.detach()",
    ),
    _backward(
        "some-inputs",
        "frozen-queries",
        "where queries are frozen, dk and dv change places",
        _BACKWARD,
        "dk, dv = (dk, dv) if ctx.needs_input_grad[1] else (dv, dk)",
    ),
    _backward(
        "some-inputs",
        "frozen-keys",
        "where keys are frozen, dv is 0",
        _BACKWARD,
        "dv = dv if ctx.needs_input_grad[2] else torch.zeros_like(dv)",
    ),
    _backward(
        "second-backward",
        "backward-once",
        "the backward's result is kept for the next one",
        f"ctx.made = getattr(ctx, 'made', None) or {_GRADIENTS}",
        "dq, dk, dv, dsinks = ctx.made",
    ),
    _backward(
        "second-backward",
        "backward-reuses-lse",
        "the backward leaves its own numbers where the LSE was",
        _BACKWARD,
        "lse.data.copy_(do.float().sum(-1).transpose(-1, -2))",
    ),
    Mutant(
        "one-lse-buffer",
        "all calls of one shape keep their LSE in the same memory",
        "flash.api",
        _SAVE,
        f"lse = {_KEPT}.setdefault(output[1].shape, torch.empty_like(output[1]))\n    lse.data.copy_(output[1])\n"
        "    ctx.save_for_backward(q, k, v, output[0], lse, cu_q, cu_k, sinks)",
        use="two-calls",
    ),
    _after(
        "two-calls",
        "one-output-buffer",
        "all calls of one shape write to the same output",
        f"o.data = {_KEPT}.setdefault((o.shape, o.dtype), torch.empty_like(o.data)).copy_(o.data)",
    ),
    _before(
        "same-tensor",
        "keys-are-values",
        "where keys and values are one tensor, values are scaled as scores are",
        "v = v * 0.5 if k is v else v",
    ),
    _backward(
        "same-tensor",
        "gradients-by-address",
        "gradients are told apart by their inputs' addresses",
        f"*made, dsinks = {_GRADIENTS}",
        "dq, dk, dv = map({x.data_ptr(): dx for x, dx in zip((q, k, v), made)}.get, (q.data_ptr(), k.data_ptr(),"
        " v.data_ptr()))",
    ),
    _before(
        "same-memory",
        "offsets-by-address",
        "offsets are copied once, and known by their address from then on",
        f"cu_seqlens_q, cu_seqlens_k = (x if x is None else {_KEPT}.setdefault((x.data_ptr(), x.shape), (x,"
        " x.clone()))[1] for x in (cu_seqlens_q, cu_seqlens_k))",
    ),
    _before(
        "same-memory",
        "values-by-address",
        "values are copied once, and known by their address from then on",
        f"v = v - v.detach() + {_KEPT}.setdefault((v.data_ptr(), v.shape), (v, v.detach().clone()))[1]",
    ),
    _before(
        "invariance",
        "scale-by-count",
        "the scale is rounded by how many sequences a pack has",
        "scale = (q.shape[-1] ** -0.5 if scale is None else scale) * (1 if cu_seqlens_q is None else 1 + 2e-7 *"
        " len(cu_seqlens_q))",
    ),
    _before(
        "invariance",
        "scale-by-longest",
        "the scale is rounded by a pack's longest sequence",
        "scale = (q.shape[-1] ** -0.5 if scale is None else scale) * (1 if cu_seqlens_q is None else 1 + 2e-8 *"
        " int(cu_seqlens_q.diff().amax()))",
    ),
    _before(
        "plain-memory",
        "start-of-storage",
        "a tensor at the start of its memory is taken for one without a mask",
        "causal = causal and q.storage_offset() > 0",
    ),
    _before(
        "plain-memory",
        "whole-storage",
        "a tensor that fills its memory is not scaled",
        "scale = 1.0 if q.untyped_storage().nbytes() == q.numel() * q.element_size() else scale",
    ),
)

"""Operators in the dtypes that torch.autocast gives them on a CUDA device, where there is none.

torch's own autocast looks at the device of each tensor. Those of a plan are fake ones of a CPU, whose lists are others
(softmax and layer norms stay in 16 bits there), and fake tensors of CUDA end the process of a torch built without it.
So the casts of CUDA stand here once more, by torch's own lists (ATen/autocast_mode.h;
https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference), as kernels of a dispatch key without other uses:
autocast on Graphcore's IPU, for which torch has no kernels. `with GpuAutocast(torch.float16):` turns the key on. As in
torch, operators inside a listed one follow it, backwards run in the types of their forwards, and a weight is cast once
in a block.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from stretto.errors import UsageError
from stretto.nn.preserve import replaced_forward

KEY = "AutocastIPU"
SIXTEEN_BITS = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm
mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa linalg_matrix_sqrth
"""
FLOAT32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""  # by their argument dtype, unless it is given
NORMS = "norm.Scalar norm.ScalarOpt_dim"  # which have the argument in another overload
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
REFUSED = "binary_cross_entropy"
FUSED_CASTS = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}  # from float16 (ATen/native/SoftMax.cpp)
Run = Callable[..., Any]


class GpuAutocast(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this block operators run in `dtype`, in float32 or in the widest of their operands' types, as on CUDA."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        register()
        self.dtype = dtype
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # of weights, by which tensor they are; held, as ids return
        self._open: list[ExitStack] = []

    def __enter__(self) -> "GpuAutocast":
        """Turn the casts on."""
        stack = ExitStack()
        stack.callback(torch.set_autocast_enabled, "ipu", torch.is_autocast_enabled("ipu"))
        torch.set_autocast_enabled("ipu", True)
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(getattr(torch._C.DispatchKey, KEY)))
        self._open.append(stack)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Turn them off, and forget the casts of weights."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._open.pop().close()
        self._casts.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator as it is: casts happen above autograd, which has to see them."""
        return func(*args, **(kwargs or {}))

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor in another type; of a weight in 16 bits the one that this block has already made."""
        if not casts(tensor) or tensor.dtype == dtype:
            return tensor
        if dtype != self.dtype or not (tensor.is_leaf and tensor.requires_grad) or tensor._is_view():
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor, tensor.to(dtype)
        return self._casts[id(tensor)][1]


@contextmanager
def autocasting(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """In this block the module's forward has a GpuAutocast of its own, also when it runs again in a backward."""
    forward = module.forward

    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        with GpuAutocast(dtype):
            return forward(*args, **kwargs)

    with replaced_forward(module, cast_forward):
        yield


def casts(tensor: Tensor) -> bool:
    """Whether autocast changes a tensor's type at all: that of numbers with a fraction, but for float64."""
    return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.dtype != torch.float64


def current_autocast() -> GpuAutocast:
    """The innermost autocast block that is open."""
    modes = _get_current_dispatch_mode_stack()
    found: GpuAutocast = next(mode for mode in reversed(modes) if isinstance(mode, GpuAutocast))
    return found


@cache
def register() -> tuple[library.Library, library.Library]:
    """Give the operators of the lists that this torch casts their kernels under KEY, and all others none; kept here."""
    others = library.Library("_", "IMPL", KEY)  # type: ignore[no-untyped-call]
    others.fallback(library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    listed = library.Library("aten", "IMPL", KEY)  # type: ignore[no-untyped-call]
    kinds: Mapping[str, Callable[[Run, Any, Any], Any]] = {
        SIXTEEN_BITS: in_sixteen_bits,
        FLOAT32: in_float32,
        FLOAT32_RESULT: to_float32,
        NORMS: norm_to_float32,
        WIDEST: in_widest,
        REFUSED: refuse_low_precision,
    }
    known = set(torch._C._dispatch_get_all_op_names())
    for names, kind in kinds.items():
        for name in names.split():
            whole = f"aten::{name}"
            if whole in known and torch._C._dispatch_has_kernel_for_dispatch_key(whole, "AutocastCUDA"):
                listed.impl(name, kernel(name, kind))  # type: ignore[no-untyped-call]
    return listed, others


def kernel(name: str, kind: Callable[[Run, Any, Any], Any]) -> Run:
    """The kernel of an operator: what `kind` makes of its arguments, outside of autocast."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if overload == "int" and packet in ("softmax", "log_softmax"):
        kind = partial(softmax_to_float32, getattr(torch.ops.aten, FUSED_CASTS[name]).default)
    off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(off):
            return kind(operator, args, kwargs)

    return run


def cast_all(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Arguments whose tensors have a type."""
    mode = current_autocast()
    return tree_map_only(Tensor, lambda tensor: mode.cast(tensor, dtype), (args, kwargs))


def in_sixteen_bits(operator: Run, args: Any, kwargs: Any) -> Any:
    """Run a product, or what tensor cores compute."""
    args, kwargs = cast_all(current_autocast().dtype, args, kwargs)
    return operator(*args, **kwargs)


def in_float32(operator: Run, args: Any, kwargs: Any) -> Any:
    """Run what needs the range and the digits of float32."""
    args, kwargs = cast_all(torch.float32, args, kwargs)
    return operator(*args, **kwargs)


def to_float32(operator: Run, args: Any, kwargs: Any) -> Any:
    """Run what has an argument `dtype`, which is float32 unless it is given."""
    if casts(args[0]) and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return operator(*args, **kwargs)


def softmax_to_float32(fused: Run, operator: Run, args: Any, kwargs: Any) -> Any:
    """Run a softmax, `operator(x, dim, dtype)`: from float16 to float32 without a cast before it, as CUDA has it."""
    given = (*args, kwargs.get("dtype"))
    if args[0].dtype == torch.float16 and given[2] in (None, torch.float32):
        return fused(args[0], args[1], True)
    return operator(args[0], args[1], torch.float32 if casts(args[0]) and given[2] is None else given[2])


def norm_to_float32(operator: Run, args: Any, kwargs: Any) -> Any:
    """Run a norm, `operator(x, p)` or `operator(x, p, dim, keepdim)`, whose result is float32."""
    if not casts(args[0]):
        return operator(*args, **kwargs)
    x, p, dim, keepdim = (*args, None, False)[:4] if len(args) == 2 else (*args, False)[:4]
    norm = torch.ops.aten.norm
    if dim is None:
        return norm.ScalarOpt_dtype(x, p, dtype=torch.float32)
    return norm.ScalarOpt_dim_dtype(x, p, dim, kwargs.get("keepdim", keepdim), dtype=torch.float32)


def in_widest(operator: Run, args: Any, kwargs: Any) -> Any:
    """Run what takes operands of one type, the widest of theirs."""
    found = {tensor.dtype for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor) and casts(tensor)}
    if torch.float32 in found:
        args, kwargs = cast_all(torch.float32, args, kwargs)
    return operator(*args, **kwargs)


def refuse_low_precision(operator: Run, args: Any, kwargs: Any) -> Any:
    """Raise UsageError, as torch refuses the operator under autocast."""
    raise UsageError(
        f"{operator} under autocast: torch refuses it, as its gradients can be too large for 16 bits; take "
        "binary_cross_entropy_with_logits, without a sigmoid before it"
    )

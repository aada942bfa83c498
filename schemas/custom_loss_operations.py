"""What a custom loss may call, as data: everything that is not named here is refused.

Left out on purpose: whatever changes a tensor in place, draws random numbers, reads or writes anything outside, leaves
tensors (`item`, `tolist`), has a result whose size depends on values (`nonzero`, `unique`), makes many small tensors
(`split`, `unbind`), or costs much more than the size of its result (products of matrices, convolutions).
"""

# ruff: noqa: SIM905 - one name a line would hide the shape of the list
from __future__ import annotations

_ELEMENTWISE = frozenset(
    "abs absolute acos add atan atan2 ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq erf "
    "erfc exp exp2 expm1 float_power floor fmax fmin frac ge greater greater_equal gt heaviside hypot isclose isfinite "
    "isinf isnan le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not "
    "logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative not_equal pow "
    "reciprocal relu remainder floor_divide round rsqrt sigmoid sign sgn sin sinc sinh softmax log_softmax sqrt square "
    "sub subtract tan tanh true_divide trunc where xlogy bitwise_and bitwise_or bitwise_not bitwise_xor".split()
)
_REDUCTIONS = frozenset(
    "all amax amin any argmax argmin count_nonzero cummax cummin cumsum dot logcumsumexp logsumexp max mean median min "
    "nanmean nansum norm numel prod sort argsort topk std sum var kthvalue".split()
)
_SHAPES = frozenset(
    "broadcast_to clone detach diagonal flatten flip gather index_select masked_select movedim narrow permute ravel "
    "reshape roll scatter_add squeeze swapaxes t take_along_dim tile transpose tril triu unflatten unsqueeze".split()
)
_FUNCTIONS_ONLY = frozenset(
    "arange cat concat concatenate full full_like hstack linspace ones ones_like scalar_tensor stack std_mean tensor "
    "var_mean vstack zeros zeros_like".split()
)
_METHODS_ONLY = frozenset(
    "bfloat16 bool contiguous dim double expand expand_as float half int is_floating_point long ndimension new_full "
    "new_ones new_zeros repeat reshape_as size sum_to_size to type_as view view_as".split()
)
_FUNCTIONAL = frozenset(
    "binary_cross_entropy binary_cross_entropy_with_logits elu gelu hardtanh hinge_embedding_loss huber_loss kl_div "
    "l1_loss leaky_relu log_softmax logsigmoid margin_ranking_loss mse_loss normalize relu relu6 sigmoid silu "
    "smooth_l1_loss softmax softmin softplus softsign tanh tanhshrink threshold".split()
)

FUNCTIONS: frozenset[str] = frozenset(
    {f"torch.{name}" for name in _ELEMENTWISE | _REDUCTIONS | _SHAPES | _FUNCTIONS_ONLY}
    | {f"torch.nn.functional.{name}" for name in _FUNCTIONAL}
    # The names under which torch.fx knows some functions of torch.nn.functional.
    | {f"torch._C._nn.{name}" for name in ("softplus", "log_sigmoid", "gelu")}
)
METHODS: frozenset[str] = _ELEMENTWISE | _REDUCTIONS | _SHAPES | _METHODS_ONLY

OPERATORS: frozenset[str] = frozenset(
    "abs add and_ eq floordiv ge getitem gt inv invert le lt mod mul ne neg or_ pos pow sub truediv xor".split()
)
MATH: frozenset[str] = frozenset(
    "acos asin atan atan2 ceil cos cosh erf erfc exp expm1 fabs floor hypot isfinite isinf isnan lgamma log log10 "
    "log1p log2 pow sin sinh sqrt tan tanh trunc".split()
)

TENSOR_ATTRIBUTES: frozenset[str] = frozenset({"shape", "dtype", "device", "ndim", "T", "mT"})
RESULT_ATTRIBUTES: frozenset[str] = frozenset({"values", "indices"})
"""Of what `max`, `sort` and the like return."""

DTYPES: frozenset[str] = frozenset({"float32", "float64", "float16", "bfloat16", "int64", "int32", "bool"})
TEXTS: frozenset[str] = TENSOR_ATTRIBUTES | RESULT_ATTRIBUTES | {"none", "mean", "sum", "batchmean", "fro"}
TEXTS |= {"floor", "tanh"}
"""Texts as arguments: names of attributes, reductions, roundings. Not the rounding mode `trunc`: the smallest integer
divided by -1 with it ends the process."""

KEYWORDS: frozenset[str] = frozenset(
    "alpha approximate beta chunks condition copy correction decimals delta descending device diagonal dim dim0 dim1 "
    "dims dtype end eps equal_nan exponent fill_value index inplace input keepdim k largest layout length log_target "
    "margin mask max max_val memory_format min min_val nan negative_slope neginf non_blocking offset other p "
    "pos_weight posinf reduce reduction repeats rounding_mode rtol atol self shape shifts size size_average sizes "
    "sorted source src stable start step steps target tensor tensors threshold unbiased value values weight".split()
)
"""Names of arguments. `inplace` must be false; `layout` and `memory_format` change nothing and are left out."""

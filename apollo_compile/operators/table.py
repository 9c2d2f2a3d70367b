"""The operator table: one entry per operator. Nothing else in this package lists names of operators.

    OPERATORS              entries by name of an operator, `aten.sum`, or of an overload, `aten.max.dim`
    find_operator(name)    the entry of an overload; `UNLISTED` if the table has none

A row has a namespace, the entry that its operators share, and their names. To add an operator, put its name into the
row that fits, or write a new row; `entry.py` has the constructors of entries, `formulas.py` the formulas. Each formula
is tested by a row of tests/operators/test_formulas.py.

Note [What Inductor fuses]: an operator is fusible if Inductor of torch 2.13 fuses it between two pointwise operators; a
test compares the table with Inductor's lowerings. An operator that is fused on some devices only is not fusible here:
sorts, scans and searches are loops on a GPU and calls on a CPU. Random numbers are drawn in loops by the prims that
replace ATen's operators in Inductor; the operators that Inductor keeps (`fallback_random`) are calls. A scatter is a
loop, but its result is complete only when the loop has ended. Operators that Inductor decomposes before capture are
fusible if their parts are; they occur only in graphs that did not come through Inductor.
"""

from __future__ import annotations

from collections.abc import Mapping

from apollo_compile.ir import KernelKind
from apollo_compile.operators import formulas
from apollo_compile.operators.entry import (
    Operator,
    attention,
    attention_backward,
    by_bytes,
    constant,
    convolution,
    convolution_backward,
    copy,
    free,
    gather,
    lookup,
    matmul,
    pointwise,
    pointwise_on_lists,
    random,
    reduction,
    scatter,
    view,
)

UNLISTED = by_bytes()
"""Entry for operators that are not in the table: a library call whose work is its bytes alone."""

_ROWS: tuple[tuple[str, Operator, str], ...] = (
    # --------------------------------------------------------------------------------------------------- no work at all
    (
        "aten",
        view(),
        "alias as_strided chunk _conj detach diagonal expand expand_as lift lift_fresh narrow _neg_view permute real "
        "reshape _reshape_alias split split_with_sizes squeeze swapaxes t transpose unbind unfold "
        "unsqueeze view _unsafe_view view_as_complex view_as_real",
    ),
    ("prims", view(), "broadcast_in_dim split_dim view_of"),
    ("aten", view(takes_part=True), "select slice"),
    ("", view(takes_part=True), "getitem"),
    (
        "aten",
        free(),
        "_functional_assert_async item _local_scalar_dense sym_is_contiguous sym_numel sym_size sym_storage_offset "
        "sym_stride",
    ),
    ("prims", free(), "inductor_force_stride_order"),
    ("prims", free(stays_with_input=True), "inductor_lookup_seed"),  # its index would make equal layers differ
    ("_c10d_functional", free(stays_with_input=True, waits=True), "wait_tensor"),
    (
        "aten",
        free(reads_only="asserts"),
        "_assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size "
        "_linalg_check_errors _validate_compressed_sparse_indices _validate_sparse_bsc_tensor_args "
        "_validate_sparse_bsr_tensor_args _validate_sparse_compressed_tensor_args _validate_sparse_coo_tensor_args "
        "_validate_sparse_csc_tensor_args _validate_sparse_csr_tensor_args",
    ),
    ("aten", free(reads_only="prints a text"), "_print"),
    (
        "aten",
        free(reads_only="changes a cache of the library"),
        "_cufft_clear_plan_cache _cufft_set_plan_cache_max_size",
    ),
    ("prims", free(reads_only="ends the order of effects, whose tokens are empty"), "_sink_tokens"),
    (
        "aten",
        constant(),
        "arange empty empty_like empty_permuted empty_strided eye full full_like new_empty new_empty_strided new_full "
        "new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like",
    ),
    ("prims", constant(), "iota"),
    # ------------------------------------------------------------------------------- pointwise, by flops for an element
    (
        "aten",
        pointwise(1),
        "abs add bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp "
        "clamp_max clamp_min copysign eq fill floor ge gt isfinite isinf isnan le logical_and logical_not logical_or "
        "logical_xor lt masked_fill max.other maximum min.other minimum mul ne neg nextafter relu round rsub sign "
        "signbit square sub threshold threshold_backward trunc where __and__ __lshift__ __or__ __rshift__ __xor__",
    ),
    (
        "aten",
        pointwise(2),
        "addcdiv addcmul hardtanh hardtanh_backward leaky_relu leaky_relu_backward lerp native_dropout_backward",
    ),
    ("prims", pointwise(2), "fma"),
    (
        "aten",
        pointwise(4),
        "div floor_divide fmod frexp glu hardsigmoid hardswish nan_to_num reciprocal remainder rsqrt sqrt true_divide",
    ),
    # Polynomials and range reduction, as in SLEEF: about this many vector instructions.
    (
        "aten",
        pointwise(12),
        "cos exp exp2 expm1 hypot ldexp log log10 log1p log2 sigmoid sigmoid_backward sin tanh_backward",
    ),
    (
        "aten",
        pointwise(20),
        "acos acosh asin asinh atan atan2 atanh cosh elu erf erfc erfinv logaddexp mish pow silu silu_backward sinh "
        "softplus tan tanh",
    ),
    (
        "aten",
        pointwise(30),
        "digamma gelu gelu_backward i0 igamma igammac lgamma polygamma special_airy_ai special_bessel_j0 "
        "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t "
        "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx "
        "special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e "
        "special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta",
    ),
    (
        "aten",
        pointwise_on_lists(1),
        "_foreach_abs _foreach_add _foreach_clamp_max _foreach_clamp_min _foreach_maximum _foreach_minimum "
        "_foreach_mul _foreach_neg _foreach_sign _foreach_sub",
    ),
    ("aten", pointwise_on_lists(2), "_foreach_addcdiv _foreach_addcmul _foreach_lerp"),
    ("aten", pointwise_on_lists(4), "_foreach_div _foreach_reciprocal _foreach_rsqrt _foreach_sqrt"),
    ("aten", pointwise_on_lists(20), "_foreach_pow"),
    # --------------------------------------------------------------------- reductions, by flops for an element of input
    (
        "aten",
        reduction(1),
        "all amax amin aminmax any argmax argmin count_nonzero max.default max.dim mean min.default min.dim prod sum",
    ),
    ("prims", reduction(1), "xor_sum"),
    ("aten", reduction(2), "linalg_vector_norm norm"),
    ("aten", reduction(4), "std std_mean var var_mean _weight_norm_interface"),
    ("aten", reduction(8, is_fusible=False), "_weight_norm_interface_backward"),
    (
        "aten",
        reduction(8),
        "_batch_norm_with_update _batch_norm_with_update_functional _log_softmax_backward_data logsumexp "
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training native_group_norm native_layer_norm _softmax_backward_data",
    ),
    (
        "aten",
        reduction(16),
        "batch_norm_backward _log_softmax native_batch_norm_backward native_group_norm_backward "
        "native_layer_norm_backward _safe_softmax _softmax",
    ),
    (
        "aten",
        reduction(4),  # losses
        "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss l1_loss "
        "mse_loss mse_loss_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward "
        "smooth_l1_loss smooth_l1_loss_backward",
    ),
    (
        "aten",
        reduction(1),  # pools
        "_adaptive_avg_pool2d adaptive_avg_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d "
        "avg_pool2d_backward avg_pool3d avg_pool3d_backward fractional_max_pool2d fractional_max_pool3d "
        "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices",
    ),
    ("prims", reduction(1), "_low_memory_max_pool_offsets_to_indices _low_memory_max_pool_with_offsets"),
    (
        "aten",
        reduction(1, is_fusible=False),
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward "
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward fractional_max_pool2d_backward "
        "fractional_max_pool3d_backward max_pool3d_with_indices_backward",
    ),
    # ----------------------------------------------------------------------------------------------- copies and gathers
    (
        "aten",
        copy(),
        "as_strided_copy as_strided_scatter cat clone constant_pad_nd contiguous diagonal_copy diagonal_scatter "
        "expand_copy flip im2col lift_fresh_copy pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d "
        "reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d roll squeeze_copy "
        "stack to _to_copy tril triu view_copy",
    ),
    ("aten", copy(puts_part=True), "select_scatter slice_scatter"),
    ("aten", copy(is_fusible=False), "complex select_copy slice_copy"),
    ("prims", copy(), "convert_element_type device_put rev"),
    ("aten", copy(formulas.all_but_first_input), "copy"),
    ("aten", gather(read=formulas.indexed), "gather index index_select take _unsafe_index _unsafe_masked_index"),
    ("aten", gather(read=formulas.embedded), "embedding"),
    ("aten", gather(1, is_fusible=False), "_embedding_bag _embedding_bag_forward_only"),
    (
        "aten",
        gather(16),
        "grid_sampler_2d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_trilinear3d",
    ),
    (
        "aten",
        gather(16, is_fusible=False),
        "grid_sampler_2d_backward upsample_bicubic2d_backward upsample_bilinear2d_backward "
        "upsample_nearest1d_backward _upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_linear1d_backward "
        "upsample_trilinear3d_backward",
    ),
    # ---------------------------------------------------------------- scatters, by where the values are that they write
    ("aten", scatter(formulas.scattered(2)), "index_put masked_scatter _unsafe_index_put"),
    (
        "aten",
        scatter(formulas.scattered(3)),
        "index_add index_copy index_reduce scatter scatter_add scatter_reduce _unsafe_masked_index_put_accumulate",
    ),
    ("aten", scatter(formulas.filled), "index_fill"),
    ("aten", scatter(formulas.scattered(0), replaces=False), "col2im masked_scatter_backward"),
    (
        "aten",
        scatter(formulas.scattered(0), replaces=False, launches=formulas.launches(2)),  # zeros first
        "embedding_dense_backward",
    ),
    # ------------------------------------------------------------------------------------------ lookups, random numbers
    (
        "aten",
        lookup(),
        "bincount bucketize cummax cummin cumprod cumsum histc kthvalue logcumsumexp masked_select median mode "
        "nanmedian nonzero searchsorted sort topk _unique2 unique_consecutive unique_dim",
    ),
    # Ten Philox rounds of four instructions a number.
    (
        "aten",
        random(40, is_fusible=False),
        "bernoulli exponential multinomial native_dropout normal rand rand_like randint randint_like randn randn_like "
        "randperm uniform",
    ),
    ("prims", random(40, is_fusible=True), "inductor_randint inductor_random"),
    ("prims", random(1, is_fusible=True), "inductor_seed"),
    ("prims", random(1, is_fusible=False, draws=True), "inductor_seeds"),
    # --------------------------------------------------------------------------------- matmuls, convolutions, attention
    ("aten", matmul(formulas.matmul_flops(0)), "dot _int_mm mm mv _scaled_mm"),
    ("aten", matmul(formulas.matmul_flops(1)), "addmm addmv"),
    ("aten", matmul(formulas.matmul_flops(0), kernel=KernelKind.BATCHED_MATMUL), "bmm"),
    ("aten", matmul(formulas.matmul_flops(1), kernel=KernelKind.BATCHED_MATMUL), "addbmm baddbmm"),
    ("aten", matmul(formulas.linear_flops, formulas.linear_tiles), "linear"),
    ("aten", convolution(formulas.any_convolution_flops), "convolution _convolution convolution_overrideable"),
    ("aten", convolution(formulas.convolution_flops), "conv1d conv2d conv3d"),
    ("aten", convolution(formulas.transposed_convolution_flops), "conv_transpose1d conv_transpose2d conv_transpose3d"),
    ("aten", convolution_backward(), "convolution_backward"),
    (
        "aten",
        attention(),
        "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable",
    ),
    ("aten", attention_backward(1), "_scaled_dot_product_flash_attention_for_cpu_backward"),
    # First the sums of gradient times output; last, the query's gradient is converted from float32.
    (
        "aten",
        attention_backward(3),
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_fused_attention_overrideable_backward",
    ),
    # ------------------------------------------------------------------------------- counted by their bytes, on purpose
    (
        "aten",
        by_bytes(),
        "_cdist_backward _cdist_forward _embedding_bag_backward _fft_c2c _fft_c2r _fft_r2c linalg_householder_product "
        "_pdist_forward resize_ _trilinear",
    ),
    ("inductor", by_bytes(resizes_storage=True), "resize_storage_bytes_"),
    ("inductor", by_bytes(writes=("variable", "variable_grad")), "accumulate_grad_"),
    ("fsdp", by_bytes(writes=("all_gather_output",)), "all_gather_copy_in"),
)

OPERATORS: Mapping[str, Operator] = {
    f"{namespace}.{name}".removeprefix("."): operator for namespace, operator, names in _ROWS for name in names.split()
}


def find_operator(name: str) -> Operator:
    """Return the entry of an overload, such as `aten.add_.Tensor`; `UNLISTED` if the table has none.

    Names are tried in this order: the overload, the operator, its functional form, and for a prim the ATen operator of
    the same name.
    """
    operator, _, _ = name.rpartition(".")
    functional = operator.removesuffix("_")
    for key in (name, operator, functional, functional.replace("prims.", "aten.")):
        if key in OPERATORS:
            return OPERATORS[key]
    return UNLISTED

// The index of the C++ side: every operator of the library, in one table, grouped.
//
// Public operators are composite: autograd/ implements them over torch::autograd::Function, so that
// their collectives are visible to torch.compile, CommDebugMode and activation checkpointing.
// Primitive operators (leading underscore) are opaque kernels: cpu/, cuda/ and a fake in
// tp_ext/_ops/, without communication and without autograd of their own. tp_ext/_ops/ declares
// every operator for Python.
//
// `group` is the name of a process group, followed by this rank and the size if the caller knows
// them ("0@1/4"); "" means no parallelism (one rank). `sizes` holds one length per rank.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <sstream>

static constexpr const char* kSchemas = R"(
// Regions: identity | sum, slice | concatenate, concatenate | summed slice, exchange
copy_to_region(Tensor(a) x, str group) -> Tensor(a)
reduce_from_region(Tensor(a) x, str group) -> Tensor(a)
scatter_to_region(Tensor(a) x, str group, int dim=-1, SymInt[]? sizes=None) -> Tensor(a)
gather_from_region(Tensor(a) x, str group, int dim=-1, SymInt[]? sizes=None) -> Tensor(a)
all_gather_region(Tensor(a) x, str group, int dim=0, SymInt[]? sizes=None) -> Tensor(a)
reduce_scatter_region(Tensor(a) x, str group, int dim=0, SymInt[]? sizes=None) -> Tensor(a)
all_to_all_region(Tensor(a) x, str group, int split_dim, int concat_dim, SymInt[]? split_sizes=None,
    SymInt[]? concat_sizes=None) -> Tensor(a)
// Rows [local_starts[i], + lengths[i]) of x are replicas, on several ranks, of rows
// full_starts[i].. of a full tensor with full_size rows: forward identity, backward sums each row
// over its replicas; and the conjugate.
copy_replicas_to_region(Tensor(a) x, str group, int[] local_starts, int[] lengths, int[]
    full_starts, int full_size) -> Tensor(a)
reduce_replicas_from_region(Tensor(a) x, str group, int[] local_starts, int[] lengths, int[]
    full_starts, int full_size) -> Tensor(a)
// copy_to_region or copy_replicas_to_region of each of xs, backward one all-reduce per dtype;
// replicas: see coalesced.cpp
copy_to_region_coalesced(Tensor(a)[] xs, str group, int[] replicas=[]) -> Tensor(a)[]

// Blocks of a collective, one per rank, sizes[k] of dim each: [p, *shard] with zeros after the
// shorter ones, or, not padded, as many elements as full in one dim, block after block
_pack_shards(Tensor x, int dim, SymInt[] sizes, bool padded=True) -> Tensor
_unpack_shards(Tensor blocks, int dim, SymInt[] sizes, SymInt[]? shape=None) -> Tensor

// a b, with a [.., m_local, k/y], b [k/x, n_local] and the result sharded over rows (x) and columns
// (y); k: of the full matrices; summa: panels are broadcast, else both operands are gathered
matmul_2d(Tensor a, Tensor b, str rows, str columns, int? k=None, bool summa=False) -> Tensor

// Linear layers; under sequence_parallel x (column) or the result (row) is sharded on dim 0. With
// main_grad the gradient of weight is added to it. overlap_chunks: see linear_overlap.h; without
// sum_bias_grad the bias gradient of a row under sequence_parallel is this rank's partial
column_parallel_linear(Tensor x, Tensor weight, Tensor? bias, str group, bool
    sequence_parallel=False, SymInt[]? sizes=None, Tensor? main_grad=None, int overlap_chunks=1) ->
    Tensor
row_parallel_linear(Tensor x, Tensor weight, Tensor? bias, str group, bool sequence_parallel=False,
    SymInt[]? sizes=None, Tensor? main_grad=None, int overlap_chunks=1, bool sum_bias_grad=True) ->
    Tensor
// weight [out, in] sharded on both dims: dim 0 (column) or 1 (row) over group, the other one, of
// weight_size, over weight_group, and so is bias; activations: "replicated", "tokens" or "hidden"
linear_2d(Tensor x, Tensor weight, Tensor? bias, str group, str weight_group, SymInt weight_size,
    bool row, str activations, SymInt[]? sizes=None, bool reshard_after_forward=True) -> Tensor
// all_to_all_region(rows, group, 0, 0, ..) during y = x weight^T; the gradient of weight as above
all_to_all_linear(Tensor(a) rows, str group, SymInt[]? split_sizes, SymInt[]? concat_sizes, Tensor
    x, Tensor weight, Tensor? main_grad=None) -> (Tensor(a) rows, Tensor y)
// y_r = weight_e x_r for the counts[e] rows r of each e; the gradient of weight times grad_scale.
// grouped_gemm: by torch's grouped GEMM, else a GEMM for each e; default: where it is supported
grouped_linear(Tensor x, Tensor weight, int[] counts, Tensor? main_grad=None, float grad_scale=1.0,
    bool? grouped_gemm=None) -> Tensor
// Linears whose three products are of 8-bit floating point. by_row: a scale per row of each
// operand, along the contracted dim, else one for a tensor; forward, gradient: float8_e4m3fn or
// float8_e5m2; communicate: gathers move 8 bits
float8_column_linear(Tensor x, Tensor weight, Tensor? bias, str group, bool sequence_parallel,
    SymInt[]? sizes, bool by_row, ScalarType forward, ScalarType gradient, bool communicate, bool
    sum_input_grad=True) -> Tensor
float8_row_linear(Tensor x, Tensor weight, Tensor? bias, str group, bool sequence_parallel,
    SymInt[]? sizes, bool by_row, ScalarType forward, ScalarType gradient, bool communicate, bool
    sum_bias_grad=True) -> Tensor
// grouped_linear of 8-bit floating point; the ranks of group share the weights along their outputs,
// or inputs
float8_grouped_linear(Tensor x, Tensor weight, int[] counts, str group, bool inputs, bool by_row,
    ScalarType forward, ScalarType gradient, float grad_scale=1.0) -> Tensor
// Of the finite elements of x [m, n], in fp32: [1, 1], of each row (dim 1) [m, 1] or column (dim 0)
// [1, n]; and the values with the scales that this gives, with the inverse of these
_finite_amax(Tensor x, int? dim=None) -> Tensor
_float8_quantize(Tensor x, Tensor amax, ScalarType dtype) -> (Tensor, Tensor)
// Rows of a frozen weight in fp32, or rounded from it to dtype: of int8 [m, n] with a scale per
// row, or with a block of uint8 [m, n / 2] with a scale per block of inputs, input 2j in the low
// and 2j + 1 in the high bits; and the product x W^T of few tokens x [tokens, n] with it, in the
// dtype of x
_dequantize_low_bits(Tensor packed, Tensor scale, int? block=None, ScalarType? dtype=None) -> Tensor
_low_bits_product(Tensor x, Tensor packed, Tensor scale, int? block=None) -> Tensor
// The linears in blocks of tp_invariant: sums are one tree over `blocks` blocks. segments: triples
// (block, start, length) of the sharded dim on this rank; block -1: copies of another rank's
block_column_linear(Tensor x, Tensor weight, Tensor? bias, str group, bool sequence_parallel,
    SymInt[]? sizes, int[] blocks, int[] segments) -> Tensor
block_row_linear(Tensor x, Tensor weight, Tensor? bias, str group, bool sequence_parallel, int[]
    blocks, int[] segments) -> Tensor
// x for each block of this rank, whose gradients are summed over all blocks; and products a_i b_i
// of [n, rows, k] and [n, k, columns]
block_copies(Tensor(a) x, str group, int[] blocks) -> Tensor(a)[]
// The tree over all blocks, from the complete nodes of this rank, [nodes, ..]; scatter: this rank's
// slice of the dim after that of the nodes
block_sum(Tensor nodes, str group, int[] blocks, bool scatter=False) -> Tensor
block_bmm(Tensor a, Tensor b) -> Tensor
// Of the last dim of x [n, rows, columns]; blind: rows of -inf become 0, not NaN
block_softmax(Tensor x, bool blind) -> Tensor
// Attention of q [batch, heads, n, head_dim], the last n of m keys, whose rows depend on their own
// query and keys alone. padding: leading keys of each sequence that nothing sees; kv_heads: the
// head of k and v of each head of q
block_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? padding, int[] kv_heads, bool
    causal, float? scale, int? window, float? softcap) -> Tensor
// softmax(scale q k^T) v of [batch, heads, rows, width]
attention(Tensor q, Tensor k, Tensor v, float? scale=None, bool causal=False) -> Tensor
// The sums of the columns of a matrix, each in the order of its rows; lengths: of the slices of
// columns whose results must not depend on the others
_column_sums(Tensor x, int[] lengths) -> Tensor
// The root of the tree of nodes [nodes, ..]: how many sums that wait are added after each of them
_tree_total(Tensor nodes, int[] joins, ScalarType dtype) -> Tensor
// main_grad += dy^T x
_add_weight_grad_(Tensor(a!) main_grad, Tensor dy, Tensor x) -> ()
// Identity; the gradient is added to main_grad and goes no further
accumulate_grad_into(Tensor(a) x, Tensor main_grad) -> Tensor(a)

// Activations; activation is gelu, gelu_tanh, relu, silu or, gated, swiglu, geglu. x of a gated one
// is [.., gate | up]
bias_act(Tensor x, Tensor? bias, str activation) -> Tensor
_bias_act_fwd(Tensor x, Tensor? bias, str activation) -> Tensor
_bias_act_bwd(Tensor grad, Tensor x, Tensor? bias, str activation) -> (Tensor, Tensor)
gated_act(Tensor x, Tensor? bias, str activation) -> Tensor
_gated_act_fwd(Tensor x, Tensor? bias, str activation) -> Tensor
_gated_act_bwd(Tensor grad, Tensor x, Tensor? bias, str activation) -> (Tensor, Tensor)

// Normalisation over the last dim; statistics in fp32 (fp64 for fp64). With a residual: sum = x +
// residual, y = norm(sum), and dx, with grad_sum added, is the gradient of both. output_mask: the
// needed gradients; the others are empty
rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor
rms_norm_residual(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor y, Tensor sum)
// rms_norm_residual of the sum of x over the ranks
all_reduce_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, str group) -> (Tensor y,
    Tensor sum)
// The last dim, of n elements, is sharded over group
sharded_rms_norm(Tensor x, Tensor? weight, float eps, str group, int n) -> Tensor
sharded_layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str group, int n) -> Tensor
_rms_norm_fwd(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)
_rms_norm_residual_fwd(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor y, Tensor
    sum, Tensor rstd)
_rms_norm_bwd(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? grad_sum=None, bool[2]
    output_mask=[True, True]) -> (Tensor dx, Tensor dweight)
layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor
layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor
    y, Tensor sum)
_layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor
    rstd)
_layer_norm_residual_fwd(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) ->
    (Tensor y, Tensor sum, Tensor mean, Tensor rstd)
_layer_norm_bwd(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor?
    grad_sum=None, bool[3] output_mask=[True, True, True]) -> (Tensor dx, Tensor dweight, Tensor
    dbias)

// Rotary embedding: x [tokens, heads, head_dim] or [batch, seq, heads, head_dim], cos and sin
// [positions, rotary_dim / 2], positions [tokens] or [batch, seq], default 0, 1, .. of each
// sequence. The tables of positions, computed in fp64: amplitude times cosine and sine of position
// * frequencies[i], default base^(-2 i / rotary_dim)
_rope_tables(Tensor positions, int rotary_dim, float base, ScalarType dtype, float[]?
    frequencies=None, float amplitude=1.0) -> (Tensor cos, Tensor sin)
rope(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, Tensor? positions=None) -> Tensor
_rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse, Tensor? positions=None) ->
    Tensor

// Attention of q, k, v [batch, tokens_local, heads_local, head_dim], whose tokens are cut over the
// group: chunks are the lengths of chunks_per_sequence chunks of each sequence (context_tiles.h).
// Keys and values travel round a ring, or are gathered. seeds [sequences]: of the dropout masks, by
// the index in num_heads heads of the full layer, of which first_head is the first one here
context_attention(Tensor q, Tensor k, Tensor v, Tensor? seeds, str group, bool ring, int[] chunks,
    int chunks_per_sequence, bool causal, float scale, int? sliding_window=None, float?
    softcap=None, float dropout=0.0, int num_heads=0, int first_head=0) -> Tensor

// Randomness by global index: element i of a contiguous local tensor is element (i / local_inner) *
// full_inner + offset + i % local_inner of the full one. The seed of dropout is 0-d, or [2]:
// followed by the number of the first row, or [1 + rows]: by that of each row
bias_dropout_residual(Tensor x, Tensor? bias, Tensor? residual, Tensor seed, float p, SymInt
    local_inner, SymInt full_inner, SymInt offset) -> Tensor
_bias_dropout_residual_fwd(Tensor x, Tensor? bias, Tensor? residual, Tensor seed, float p, SymInt
    local_inner, SymInt full_inner, SymInt offset) -> Tensor
_dropout_bwd(Tensor grad, Tensor seed, float p, SymInt local_inner, SymInt full_inner, SymInt
    offset) -> Tensor
_bias_dropout_bwd(Tensor grad, Tensor seed, float p, SymInt local_inner, SymInt full_inner, SymInt
    offset) -> (Tensor, Tensor)
_philox_uniform_(Tensor(a!) self, Tensor seed, float low, float high, SymInt local_inner, SymInt
    full_inner, SymInt offset) -> ()
_philox_normal_(Tensor(a!) self, Tensor seed, float mean, float std, SymInt local_inner, SymInt
    full_inner, SymInt offset) -> ()
_philox_truncated_normal_(Tensor(a!) self, Tensor seed, float mean, float std, float low, float
    high, SymInt local_inner, SymInt full_inner, SymInt offset) -> ()

// Vocabulary: rows or columns [vocab_start, vocab_start + vocab_local) of the full vocabulary are
// on this rank
vocab_parallel_embedding(Tensor ids, Tensor weight, str group, SymInt vocab_start, SymInt
    vocab_local, SymInt vocab_size, bool sequence_parallel=False, SymInt[]? sizes=None) -> Tensor
_vocab_embedding_fwd(Tensor weight, Tensor ids, SymInt vocab_start, SymInt vocab_local, SymInt
    vocab_size) -> Tensor
_vocab_embedding_bwd(Tensor grad, Tensor ids, SymInt num_rows, SymInt vocab_start, SymInt
    vocab_local) -> Tensor
vocab_parallel_cross_entropy(Tensor logits, Tensor target, str group, SymInt vocab_start, SymInt
    vocab_local, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss, str
    reduction, bool inplace_backward, bool vocab_size_given=True, int[] blocks=[], SymInt[]?
    sizes=None) -> Tensor
// The argmax of logits, and a draw from softmax(logits / temperature); sizes, here and above: the
// ranks' numbers of columns, if the caller gave them
vocab_parallel_argmax(Tensor logits, str group, SymInt vocab_start, SymInt vocab_local, SymInt
    vocab_size, SymInt[]? sizes=None) -> Tensor
vocab_parallel_sample(Tensor logits, str group, SymInt vocab_start, SymInt vocab_local, SymInt
    vocab_size, float temperature, int? top_k, float? top_p, SymInt[]? sizes=None) -> Tensor
_vocab_ce_stats(Tensor logits, Tensor target, SymInt vocab_start, SymInt vocab_local, SymInt
    vocab_size, int ignore_index, bool shard_row=False, bool vocab_size_given=True) -> Tensor
_vocab_ce_loss(Tensor stats, Tensor target, SymInt vocab_size, int ignore_index, float
    label_smoothing, float z_loss) -> (Tensor loss, Tensor lse)
_vocab_ce_bwd(Tensor grad, Tensor logits, Tensor target, Tensor lse, SymInt vocab_start, SymInt
    vocab_local, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor
_vocab_ce_bwd_(Tensor grad, Tensor(a!) logits, Tensor target, Tensor lse, SymInt vocab_start, SymInt
    vocab_local, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> ()

// The products of a chunk of tokens with the rows of a vocabulary: logits = x weight^T + bias;
// dlogits weight; dw = dlogits^T x, or dw += it
_vocab_chunk_logits_(Tensor(a!) logits, Tensor x, Tensor weight, Tensor? bias) -> ()
_vocab_chunk_input_grad(Tensor dlogits, Tensor weight) -> Tensor
_vocab_chunk_weight_grad_(Tensor(a!) dw, Tensor dlogits, Tensor x, bool add) -> ()

// vocab_parallel_cross_entropy of the logits x weight^T + bias, which exist for one chunk of tokens
// at a time; entropy: of each row's probabilities, else empty
linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, str group, SymInt
    vocab_start, SymInt vocab_local, SymInt vocab_size, int ignore_index, float label_smoothing,
    float z_loss, str reduction, bool sequence_parallel=False, SymInt[]? sizes=None, Tensor?
    main_grad=None, bool entropy=False, int? chunk_tokens=None, bool vocab_size_given=True) ->
    (Tensor loss, Tensor entropy)

// Mixture of experts. rows [tokens, choices]: the row of y that a choice of a token has, or -1, no
// row twice. sort: experts [tokens, choices], -1 for none, to rows in order of expert and token,
// and the rows of each expert. permute: y[rows[t, j]] = weights[t, j] * x[t], other rows 0;
// unpermute: x[t] = sum over j of weights[t, j] * y[rows[t, j]]; dot: weights[t, j] = <x[t],
// y[rows[t, j]]>; _moe_unpermute_bwd: permute and dot of grad
_moe_sort(Tensor experts, int num_experts) -> (Tensor rows, Tensor counts)
moe_permute(Tensor x, Tensor rows, SymInt num_rows, Tensor? weights=None) -> Tensor
_moe_permute(Tensor x, Tensor rows, SymInt num_rows, Tensor? weights) -> Tensor
moe_unpermute(Tensor y, Tensor rows, Tensor? weights=None) -> Tensor
_moe_unpermute(Tensor y, Tensor rows, Tensor? weights) -> Tensor
_moe_unpermute_bwd(Tensor grad, Tensor y, Tensor rows, Tensor weights) -> (Tensor dy, Tensor
    dweights)
moe_dot(Tensor x, Tensor y, Tensor rows) -> Tensor
_moe_dot(Tensor x, Tensor y, Tensor rows) -> Tensor

// All tensors at once, any floating dtypes, one device: the sum of the squares in fp64, of at least
// one tensor; and a multiplication by a 0-d scale, which leaves every bit if it is 1. Copies to
// tensors of the same shapes, any dtypes, on a CPU
_multi_tensor_squared_norm(Tensor[] xs) -> Tensor
_multi_tensor_scale_(Tensor(a!)[] xs, Tensor scale) -> ()
_multi_tensor_copy_(Tensor(a!)[] outs, Tensor[] values) -> ()
// Gradients compressed to blocks of codes with a scale each (kernels/compressed_blocks.h). places
// [ranks, 3]: first element, elements and byte of the wire of what each rank owns. x + residual to
// the wire; the sum of received [ranks, bytes] and residual to the wire; the mean of the wire
_compress_blocks_(Tensor x, Tensor(a!)? residual, Tensor(b!) wire, Tensor places, int block, bool
    float8) -> ()
_sum_compressed_blocks_(Tensor received, Tensor(a!)? residual, Tensor(b!) wire, int byte, int count,
    int block, bool float8) -> ()
_decompress_blocks_(Tensor wire, Tensor(a!) out, Tensor places, int block, bool float8) -> ()
)";

// A schema starts at the begin of a line; indented lines go on with it
TORCH_LIBRARY(tp_ext, m) {
  m.set_python_module("tp_ext._ops.binding");
  std::istringstream lines(kSchemas);
  std::string schema;
  const auto define = [&] {
    if (!schema.empty()) m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
    schema.clear();
  };
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '/') continue;
    if (line[0] != ' ') define();
    schema += line;
  }
  define();
}

// [Note: exported graphs call whole operators]
// Public operators as kernels of the CPU, which record nothing and which a compiler does not take
// apart. Their fakes are in tp_ext/_ops/exported.py.
struct WholeOperator : c10::OperatorKernel {
  explicit WholeOperator(c10::OperatorHandle op) : composite(std::move(op)) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView unrecorded;
    composite.callBoxed(stack);
  }

  c10::OperatorHandle composite;
};

TORCH_LIBRARY(tp_ext_whole, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const std::string name : {"all_reduce_rms_norm", "attention", "column_parallel_linear",
                                 "row_parallel_linear", "vocab_parallel_embedding"}) {
    const auto op = dispatcher.findSchemaOrThrow(("tp_ext::" + name).c_str(), "");
    m.def(op.schema().cloneWithName("tp_ext_whole::" + name, ""), {at::Tag::pt2_compliant_tag});
    auto kernel = torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WholeOperator>(op));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, std::move(kernel)));
  }
}

#ifndef TP_EXT_WITH_CUDA
// A CPU-only build refuses CUDA tensors with a message of its own: the dispatcher's would not give
// the reason.
static void refuse_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": this is a CPU-only build of tp_ext, it has no CUDA kernels; build it",
      " with the CUDA toolkit of this torch and TP_EXT_CUDA=1");
}

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("tp_ext::_", 0) == 0)  // primitives only
      m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_cuda>());
}
#endif

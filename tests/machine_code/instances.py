"""Every kernel of csrc/kernels with the template arguments that its launcher gives it, and its block's threads."""

from dataclasses import dataclass
from itertools import product

DOUBLE, FLOAT, BFLOAT16, HALF = "double", "float", "__nv_bfloat16", "__half"
TYPES = (DOUBLE, FLOAT, BFLOAT16, HALF)
VECTOR = {DOUBLE: 2, FLOAT: 4, BFLOAT16: 8, HALF: 8}  # elements of 16 bytes
BOOLS = ("false", "true")


@dataclass(frozen=True)
class Instance:
    header: str  # of csrc/kernels
    kernel: str
    arguments: tuple
    threads: int  # of the largest block that it is launched with
    dtype: str

    def __str__(self) -> str:
        return self.kernel + (f"<{', '.join(map(str, self.arguments))}>" if self.arguments else "")


def widths(dtype: str) -> tuple[int, int]:
    """Elements per access: a vector where all is aligned, else one."""
    return VECTOR[dtype], 1


def columns():
    for dtype, bias in product(TYPES, BOOLS):
        for width, way in product(widths(dtype), ("forward", "backward")):
            for act in ("Gelu", "GeluTanh", "Relu", "Silu"):
                yield Instance("bias_act", f"bias_act_{way}_kernel", (act, bias, width, dtype), 256, dtype)
            for act in ("Gelu", "Silu"):
                yield Instance("gated_act", f"gated_act_{way}_kernel", (act, bias, width, dtype), 256, dtype)
    for dtype in TYPES:
        yield Instance("column_sum", "sum_partials_kernel", (dtype,), 256, dtype)


def norms():
    parameters = [(t, t) for t in TYPES] + [(BFLOAT16, FLOAT), (HALF, FLOAT)]
    for (dtype, weight), centred in product(parameters, BOOLS):
        many = VECTOR[dtype]
        kept, in_memory = (1, 2, 4) if many == 8 else (4,), ((many, 0, "true"), (1, 0, "true"))
        for shape in (*product((many,), kept, BOOLS), *in_memory):
            yield Instance("norm_fwd", "norm_fwd_kernel", (dtype, weight, centred, *shape), 512, dtype)
        for shape in (*product((many,), kept, BOOLS), *in_memory):
            yield Instance("norm_bwd", "norm_bwd_kernel", (dtype, weight, centred, *shape), 512, dtype)
        staged = () if many != 8 else (1, 2) if centred == "true" else kept
        for shape in product((many,), staged, BOOLS):
            yield Instance("norm_bwd", "norm_bwd_staged_kernel", (dtype, weight, centred, *shape), 512, dtype)
    for dtype in TYPES:
        yield Instance("norm_bwd", "norm_sum_kernel", (DOUBLE if dtype == DOUBLE else FLOAT, dtype), 512, dtype)


def ropes():
    for dtype in TYPES:
        for width, interleaved in product(widths(dtype), BOOLS):
            yield Instance("rope", "rope_kernel", (dtype, width, interleaved, "InRange"), 256, dtype)
    frequencies = ("RopeSeries", "RopeFrequencies")
    for dtype, positions, frequency in product((DOUBLE, FLOAT), ("int64_t", DOUBLE), frequencies):
        yield Instance("rope", "rope_tables_kernel", (dtype, positions, frequency), 256, dtype)


def vocabularies():
    for dtype in TYPES:
        yield Instance("vocab_cross_entropy", "ce_stats_kernel", (dtype, "InRange"), 512, dtype)
        yield Instance("vocab_cross_entropy", "ce_bwd_kernel", (dtype,), 512, dtype)
        if dtype != DOUBLE:
            yield Instance("vocab_cross_entropy", "ce_stats_ahead_kernel", (dtype, "InRange"), 256, dtype)
            yield Instance("vocab_cross_entropy", "ce_bwd_ahead_kernel", (dtype,), 256, dtype)
        for width in widths(dtype):
            for ids in ("int64_t", "int32_t"):
                arguments = (width, dtype, ids, "InRange")
                yield Instance("vocab_embedding", "embedding_fwd_kernel", arguments, 256, dtype)
            for rows in (4, 8):
                yield Instance("vocab_embedding", "embedding_bwd_kernel", (width, rows, dtype), 256, dtype)
    for dtype in (DOUBLE, FLOAT):
        yield Instance("vocab_cross_entropy", "ce_loss_kernel", (dtype,), 256, dtype)
        yield Instance("vocab_cross_entropy", "ce_check_kernel", (dtype, "InRange", "InRange"), 256, dtype)
    for row in ("int64_t", "int32_t", "short"):
        yield Instance("vocab_embedding", "embedding_segments_kernel", (row,), 256, row)
        for ids in ("int64_t", "int32_t"):
            yield Instance("vocab_embedding", "embedding_rows_kernel", (ids, row), 256, ids)


def random_words():
    for dtype in TYPES:
        for form, rows in product(range(3), (1, 2)):
            arguments = (dtype, f"(DropoutForm){form}", rows)  # as the compiler calls it
            yield Instance("bias_dropout_residual", "dropout_vector_kernel", arguments, 256, dtype)
        yield Instance("bias_dropout_residual", "dropout_general_kernel", (dtype,), 256, dtype)
        truncated = [f"TruncatedDraw<(Truncation){by}>" for by in range(3)]  # as the compiler calls it
        for draw in ("Uniform", "Normal", *truncated):
            yield Instance("random_fill", "random_fill_kernel", (dtype, draw), 256, dtype)


def shards():
    for unit, way in product(("uint4", "uint2", "unsigned int", "unsigned short", "unsigned char"), ("unpack", "pack")):
        yield Instance("shard_pack", f"{way}_shards_kernel", (unit,), 256, unit)


def lists():
    for dtype in TYPES:
        for kernel in ("squared_norm_kernel", "multi_tensor_scale_kernel"):
            yield Instance("multi_tensor", kernel, (dtype,), 256, dtype)
        yield Instance("tree_total", "tree_total_kernel", (dtype,), 256, dtype)
    yield Instance("multi_tensor", "sum_of_partials_kernel", (), 1024, DOUBLE)


def compressed():
    for code in ("Int8Code", "E4m3Code"):
        for dtype in TYPES:
            if dtype != DOUBLE:
                for kernel in ("compress_blocks_kernel", "decompress_blocks_kernel"):
                    yield Instance("compressed_blocks", kernel, (code, dtype), 256, dtype)
        yield Instance("compressed_blocks", "sum_compressed_kernel", (code,), 256, FLOAT)


def low_bits():
    for four in BOOLS:
        for width in (2 if four == "true" else 4, 1):
            yield Instance("low_bits", "low_bits_rows_kernel", (four, width), 256, FLOAT)
        for dtype, width in product((FLOAT, BFLOAT16, HALF), (16, 1)):
            yield Instance("low_bits", "low_bits_product_kernel", (four, width, dtype), 256, dtype)


def experts():
    for dtype in TYPES:
        for width in widths(dtype):
            for kernel in ("moe_permute_kernel", "moe_unpermute_kernel"):
                yield Instance("moe_permute", kernel, (width, dtype, "InRange"), 256, dtype)
            for gradient in BOOLS:
                yield Instance("moe_permute", "moe_dot_kernel", (width, gradient, dtype, "InRange"), 256, dtype)
    yield Instance("moe_permute", "moe_slots_kernel", ("InRange",), 256, "int64_t")
    yield Instance("moe_sort", "moe_keys_kernel", ("InRange",), 256, "int64_t")
    yield Instance("moe_sort", "moe_rows_kernel", (), 256, "int64_t")


INSTANCES = [
    *columns(),
    *norms(),
    *ropes(),
    *vocabularies(),
    *random_words(),
    *shards(),
    *lists(),
    *experts(),
    *compressed(),
    *low_bits(),
]

// fp32 products of matrices by the library that is fastest on this processor, inside of Functions
// that have a backward of their own.
//
// torch's products are MKL's, which leaves the 512-bit units of AMD's processors idle. oneDNN, which
// every torch has inside, uses them, at 2.0 to 2.4 times the rate; on Intel's processors both are as
// fast. Which one multiplies is measured once a machine, for products of few and of many
// multiplications, and kept in a file: a rerun has the same bits, and so have the ranks of a machine.
// Traced calls (the compiler has products of its own), other types and small products are torch's.
//
// [Note: products by the fastest library]

#pragma once

#include <string>

#include "tp_ext/export.h"
#include "types.h"

namespace tp_ext::products {

// x w^T + b; x [.., in], w [out, in]
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias = std::nullopt);
// a b of matrices
Tensor mm(const Tensor& a, const Tensor& b);
// out = a b + bias
void mm_out(const Tensor& out, const Tensor& a, const Tensor& b,
            const OptionalTensor& bias = std::nullopt);
// c += a b; returns c
Tensor add_mm_(const Tensor& c, const Tensor& a, const Tensor& b);

// Whether MKL's products are independent of alignment and leading dimension (MKL_CBWR=..,STRICT);
// true where torch has no MKL. All products are torch's then: the bits may have been promised
TP_EXT_API bool are_strict();

// Whether x w^T + b is oneDNN's where a Function computes it
bool differs(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

// Whether attention of q to k and v, [batch, heads, tokens, width], is faster by tiled_attention.h:
// torch's has MKL's products
bool attend(const Tensor& q, const Tensor& k, const Tensor& v);

// The table of this process: "torch" or "onednn", and why
TP_EXT_API std::string describe();

}  // namespace tp_ext::products

// Cosine and sine in fp64, as polynomials (coefficients: fdlibm) in explicit fma: every operation
// is correctly rounded by IEEE 754, so each CPU and each GPU computes the same bits, and the host's
// loops vectorise.

#pragma once

#include "scalar.h"

namespace tp_ext {

struct CosSin {
  double cos, sin;
};

// cos and sin of y + quadrant pi / 2, |y| at most pi / 4 and a rounding error. Error below 1 ulp.
TP_HD CosSin cos_sin_from(uint32_t quadrant, double y) {
  const double z = y * y;
  double s = 1.58969099521155010221e-10;
  s = ::fma(s, z, -2.50507602534068634195e-08);
  s = ::fma(s, z, 2.75573137070700676789e-06);
  s = ::fma(s, z, -1.98412698298579493134e-04);
  s = ::fma(s, z, 8.33333333332248946124e-03);
  s = ::fma(s, z, -1.66666666666666324348e-01);
  s = ::fma(z * y, s, y);
  double c = -1.13596475577881948265e-11;
  c = ::fma(c, z, 2.08757232129817482790e-09);
  c = ::fma(c, z, -2.75573143513906633035e-07);
  c = ::fma(c, z, 2.48015872894767294178e-05);
  c = ::fma(c, z, -1.38888888888741095749e-03);
  c = ::fma(c, z, 4.16666666666666019037e-02);
  c = ::fma(z * z, c, ::fma(-0.5, z, 1.0));
  const double cosine = quadrant & 1 ? s : c, sine = quadrant & 1 ? c : s;
  return {(quadrant + 1) & 2 ? -cosine : cosine, quadrant & 2 ? -sine : sine};
}

// cos and sin of an angle below 2^51 in size. The quadrant is the nearest whole number of right
// angles, in the low bits of `shifted`; pi / 2 in three parts, of which the first product is
// subtracted exactly: the remainder has an error of half an ulp of 1 at most.
TP_HD CosSin cos_sin_of(double angle) {
  const double shifter = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = ::fma(angle, 6.36619772367581382433e-01, shifter);
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const double n = shifted - shifter;
  double y = ::fma(-n, 1.57079632679489655800e+00, angle);
  y = ::fma(-n, 6.12323399573676603587e-17, y);
  y = ::fma(-n, -1.49738490485916983294e-33, y);
  return cos_sin_from(static_cast<uint32_t>(bits), y);
}

}  // namespace tp_ext

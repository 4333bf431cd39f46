// The exponential of the kernels over scores.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline double exponential(double x) { return std::exp(x); }

// exp in float32 for x <= 0, within 2 ulp: a polynomial, so that the compiler can vectorise the loop around it.
inline float exponential(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;  // written so that NaN stays NaN
    const float n = std::floor(clamped * 1.44269504f + 0.5f);
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : y * power;
}

}  // namespace

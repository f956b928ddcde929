// The caller may have set flush-to-zero, denormals-are-zero or another rounding mode; the numbers must not notice.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace fp4comm {

class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__x86_64__) || defined(_M_X64)
    DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    DefaultFloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

  private:
    std::fenv_t saved_;
#endif
};

}  // namespace fp4comm

/* Checks the structure layouts of the header. src/layout.rs asserts the same numbers for the
   library. */
#include <fishplate.h>

#ifdef __cplusplus
#define HOLDS(condition) static_assert (condition, #condition)
#else
#define HOLDS(condition) _Static_assert (condition, #condition)
#endif

HOLDS (sizeof (fp_options) == 64 && offsetof (fp_options, flags) == 8
       && offsetof (fp_options, providers) == 40 && offsetof (fp_options, local_rank) == 56);
HOLDS (sizeof (fp_tag) == 16 && offsetof (fp_tag, high) == 8);
HOLDS (sizeof (fp_message) == 40 && offsetof (fp_message, len) == 16
       && offsetof (fp_message, source) == 32);
HOLDS (sizeof (fp_completion) == 80 && offsetof (fp_completion, id) == 8
       && offsetof (fp_completion, value) == 24);
HOLDS (offsetof (fp_completion, message) == 32 && offsetof (fp_completion, may_land) == 72);
HOLDS (sizeof (fp_stats_t) == 88 && offsetof (fp_stats_t, passes) == 80);

int main (void)
{
  return fp_version () == FP_VERSION ? 0 : 1;
}

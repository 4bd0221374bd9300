/* Counts calls whose status is not the expected one, and makes random numbers. */
#include <fishplate.h>

#include <stdint.h>
#include <stdio.h>

static int failed, cases;
static uint64_t random_state = 1;

static void expect (int got, int want, const char *what, int line)
{
  cases++;
  if (got != want) {
    failed++;
    fprintf (stderr, "line %d: %s: %d (%s), not %d\n", line, what, got,
             got < 0 ? fp_last_error () : "", want);
  }
}
#define EXPECT(call, want) expect (call, want, #call, __LINE__)

static uint64_t below (uint64_t n)
{
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % n;
}

/* Ends the program at the first condition that does not hold. */
#include <stdio.h>
#include <stdlib.h>

#define MUST(condition)                                           \
  do                                                              \
    if (!(condition))                                             \
      {                                                           \
        printf ("line %d: expected: %s\n", __LINE__, #condition); \
        exit (1);                                                 \
      }                                                           \
  while (0)

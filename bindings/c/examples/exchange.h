/* Helpers of the examples: ends the program at an error, and exchanges bytes through the files of a
 * folder. A program started by MPI exchanges them with MPI_Allgather instead. */
#include <fishplate.h>

#include <stdio.h>
#include <stdlib.h>

static int check (int status, const char *what)
{
  if (status < 0) {
    fprintf (stderr, "%s: %s (%s)\n", what, fp_last_error (), fp_strerror (status));
    exit (1);
  }
  return status;
}

/* Publishes bytes of a rank under a name. */
static void publish (const char *folder, const char *name, int rank, const void *bytes, size_t len)
{
  char path[512], hidden[520];
  snprintf (path, sizeof path, "%s/%s.%d", folder, name, rank);
  snprintf (hidden, sizeof hidden, "%s.part", path);
  FILE *file = fopen (hidden, "wb");
  if (file == NULL || fwrite (bytes, 1, len, file) != len || fclose (file) != 0
      || rename (hidden, path) != 0) {
    perror (path);
    exit (1);
  }
}

/* Waits for the bytes of a rank, reads them, and returns their number. */
static size_t look_up (fp_node *node, const char *folder, const char *name, int rank, void *into,
                       size_t room)
{
  char path[512];
  FILE *file;
  snprintf (path, sizeof path, "%s/%s.%d", folder, name, rank);
  while ((file = fopen (path, "rb")) == NULL)
    check (fp_progress (node), "progress");
  size_t len = fread (into, 1, room, file);
  fclose (file);
  return len;
}

/* A ring of SIZE processes. Each process sends its rank to the next process, receives from the
 * previous one, and forwards until all processes have seen every rank. The processes exchange
 * addresses through files in FOLDER. usage: tagged RANK SIZE FOLDER */
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

static fp_peer meet (fp_node *node, const char *folder, int rank)
{
  char path[512], address[FP_ADDRESS_MAX];
  snprintf (path, sizeof path, "%s/%d", folder, rank);
  FILE *file;
  while ((file = fopen (path, "rb")) == NULL)
    check (fp_progress (node), "progress");
  size_t len = fread (address, 1, sizeof address, file);
  fclose (file);
  fp_peer peer;
  check (fp_peer_connect (node, address, len, &peer), "connect");
  return peer;
}

int main (int count, char **arguments)
{
  if (count != 4)
    return 2;
  int rank = atoi (arguments[1]), size = atoi (arguments[2]);
  char address[FP_ADDRESS_MAX], path[512], hidden[520];
  size_t len = sizeof address;
  fp_node *node;
  check (fp_node_open (NULL, &node), "open");
  check (fp_node_address (node, address, &len), "address");
  snprintf (path, sizeof path, "%s/%d", arguments[3], rank);
  snprintf (hidden, sizeof hidden, "%s.part", path);
  FILE *file = fopen (hidden, "wb");
  if (file == NULL || fwrite (address, 1, len, file) != len || fclose (file) != 0
      || rename (hidden, path) != 0)
    return 1;
  fp_peer next = meet (node, arguments[3], (rank + 1) % size);
  fp_peer before = meet (node, arguments[3], (rank + size - 1) % size);
  fp_tag exact = { 0, 0 };
  int sum = rank, passed = rank;
  for (int step = 1; step < size; step++) {
    fp_tag tag = { (uint64_t) step, 0 };
    check (fp_send (node, next, tag, &passed, sizeof passed), "send");
    check (fp_recv (node, before, tag, exact, &passed, sizeof passed, 20000, NULL), "recv");
    sum += passed;
  }
  printf ("rank %d: %d\n", rank, sum);
  check (fp_node_close (node, 20000), "close");
  return 0;
}

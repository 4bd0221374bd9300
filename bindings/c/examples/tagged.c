/* A ring of SIZE processes. Each process sends its rank to the next process, receives from the
 * previous one, and forwards until all processes have seen every rank. The processes exchange
 * addresses through files in FOLDER. usage: tagged RANK SIZE FOLDER */
#include "exchange.h"

static fp_peer meet (fp_node *node, const char *folder, int rank)
{
  char address[FP_ADDRESS_MAX];
  fp_peer peer;
  size_t len = look_up (node, folder, "address", rank, address, sizeof address);
  check (fp_peer_connect (node, address, len, &peer), "connect");
  return peer;
}

int main (int count, char **arguments)
{
  if (count != 4)
    return 2;
  int rank = atoi (arguments[1]), size = atoi (arguments[2]);
  const char *folder = arguments[3];
  char address[FP_ADDRESS_MAX];
  size_t len = sizeof address;
  fp_node *node;
  check (fp_node_open (NULL, &node), "open");
  check (fp_node_address (node, address, &len), "address");
  publish (folder, "address", rank, address, len);
  fp_peer next = meet (node, folder, (rank + 1) % size);
  fp_peer before = meet (node, folder, (rank + size - 1) % size);
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

/* Rank 0 puts with a signal and sends a tagged message. Rank 1 waits for both, then exits without
 * closing its node, and rank 0 detects that. The ranks exchange addresses through files in FOLDER.
 * usage: put_signal 0|1 FOLDER */
#include "exchange.h"

#include <unistd.h>

int main (int count, char **arguments)
{
  if (count != 3)
    return 2;
  int rank = atoi (arguments[1]);
  const char *folder = arguments[2];
  fp_node *node;
  fp_peer peer;
  fp_mem inbox;
  fp_remote theirs;
  char bytes[FP_ADDRESS_MAX], text[16] = "";
  size_t len = sizeof bytes;
  fp_tag tag = { 7, 0 }, exact = { 0, 0 };

  check (fp_node_open (NULL, &node), "open");
  check (fp_node_address (node, bytes, &len), "address");
  publish (folder, "address", rank, bytes, len);
  len = look_up (node, folder, "address", 1 - rank, bytes, sizeof bytes);
  check (fp_peer_connect (node, bytes, len, &peer), "connect");
  check (fp_mem_alloc (node, 4096, &inbox), "alloc");
  len = sizeof bytes;
  check (fp_mem_export (node, inbox, bytes, &len), "export");
  publish (folder, "memory", rank, bytes, len);
  len = look_up (node, folder, "memory", 1 - rank, bytes, sizeof bytes);
  check (fp_mem_import (node, peer, bytes, len, &theirs), "import");
  if (rank == 1) {
    check (fp_wait_signal (node, inbox, 0, FP_EQ, 1, peer, 10000, NULL), "wait");
    check (fp_mem_read (node, inbox, 8, text, 5), "read");
    check (fp_recv (node, peer, tag, exact, text + 5, 6, 10000, NULL), "recv");
    printf ("%s\n", text);
    fflush (stdout);
    _exit (0); /* as if it had been killed */
  }
  check (fp_mem_write (node, inbox, 64, "hello", 5), "write");
  check (fp_put_signal (node, inbox, 64, 5, theirs, 8, theirs, 0, FP_SIGNAL_SET, 1, NULL),
         "put_signal");
  check (fp_send (node, peer, tag, " world", 6), "send");
  int status = fp_wait_signal (node, inbox, 0, FP_EQ, 1, peer, 10000, NULL);
  printf ("the peer is gone: %s\n", fp_strerror (status));
  fp_node_close (node, 1000);
  return status < 0 ? 0 : 1;
}

/* Rank 0 puts with a signal and sends a tagged message. Rank 1 waits for both, then exits without
 * closing its node, and rank 0 detects that. The ranks exchange addresses through files in FOLDER.
 * usage: put_signal 0|1 FOLDER */
#include <fishplate.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int check (int status, const char *what)
{
  if (status < 0) {
    fprintf (stderr, "%s: %s (%s)\n", what, fp_last_error (), fp_strerror (status));
    exit (1);
  }
  return status;
}

/* Publishes our bytes under a name, and reads the bytes of the other rank. */
static size_t swap (const char *folder, int rank, const char *name, const void *ours, size_t len,
                    void *theirs, size_t room, fp_node *node)
{
  char path[512], hidden[520];
  snprintf (path, sizeof path, "%s/%s.%d", folder, name, rank);
  snprintf (hidden, sizeof hidden, "%s.part", path);
  FILE *file = fopen (hidden, "wb");
  if (file == NULL || fwrite (ours, 1, len, file) != len || fclose (file) != 0
      || rename (hidden, path) != 0) {
    perror (path);
    exit (1);
  }
  snprintf (path, sizeof path, "%s/%s.%d", folder, name, 1 - rank);
  while ((file = fopen (path, "rb")) == NULL)
    check (fp_progress (node), "progress");
  size_t got = fread (theirs, 1, room, file);
  fclose (file);
  return got;
}

int main (int count, char **arguments)
{
  if (count != 3)
    return 2;
  int rank = atoi (arguments[1]);
  fp_node *node;
  fp_peer peer;
  fp_mem inbox;
  fp_remote theirs;
  char ours[FP_ADDRESS_MAX], got[FP_ADDRESS_MAX], text[16] = "";
  size_t len = sizeof ours;
  fp_tag tag = { 7, 0 }, exact = { 0, 0 };

  check (fp_node_open (NULL, &node), "open");
  check (fp_node_address (node, ours, &len), "address");
  len = swap (arguments[2], rank, "address", ours, len, got, sizeof got, node);
  check (fp_peer_connect (node, got, len, &peer), "connect");
  check (fp_mem_alloc (node, 4096, &inbox), "alloc");
  len = sizeof ours;
  check (fp_mem_export (node, inbox, ours, &len), "export");
  len = swap (arguments[2], rank, "memory", ours, len, got, sizeof got, node);
  check (fp_mem_import (node, peer, got, len, &theirs), "import");
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

/* Rank 1 sends messages and puts with signals, then dies. Rank 0 waits for them, and for rank 1's
 * death, in an epoll loop. usage: events 0|1 FOLDER. The ranks exchange addresses through files. */
#include <fishplate.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>
#define MESSAGES 100

static int check (int status, const char *what)
{
  if (status < 0) {
    fprintf (stderr, "%s: %s (%s)\n", what, fp_last_error (), fp_strerror (status));
    exit (1);
  }
  return status;
}

static size_t swap (const char *folder, int rank, char what, const void *ours, size_t len,
                    void *theirs, fp_node *node)
{
  char path[512], hidden[520];
  snprintf (path, sizeof path, "%s/%c%d", folder, what, rank);
  snprintf (hidden, sizeof hidden, "%s.part", path);
  FILE *file = fopen (hidden, "wb");
  if (!file || fwrite (ours, 1, len, file) != len || fclose (file) || rename (hidden, path))
    exit (1);
  snprintf (path, sizeof path, "%s/%c%d", folder, what, 1 - rank);
  while ((file = fopen (path, "rb")) == NULL)
    check (fp_progress (node), "progress");
  len = fread (theirs, 1, FP_ADDRESS_MAX, file);
  fclose (file);
  return len;
}

int main (int count, char **arguments)
{
  if (count != 3)
    return 2;
  int rank = atoi (arguments[1]), got = 0, wait, state = 0, loop = epoll_create1 (EPOLL_CLOEXEC);
  static fp_options options; /* zeroed, so the other options are the defaults */
  fp_node *node;
  fp_peer peer;
  fp_mem mine;
  fp_remote theirs;
  fp_tag tag = { 7, 0 }, exact = { 0, 0 };
  char ours[FP_ADDRESS_MAX], text[FP_ADDRESS_MAX];
  size_t len = sizeof ours, size = sizeof ours;
  options.struct_size = sizeof options;
  options.flags = FP_WAIT_FD;
  check (fp_node_open (&options, &node), "open");
  check (fp_node_address (node, ours, &len), "address");
  len = swap (arguments[2], rank, 'a', ours, len, text, node);
  check (fp_peer_connect (node, text, len, &peer), "connect");
  check (fp_mem_alloc (node, 4096, &mine), "alloc");
  check (fp_mem_export (node, mine, ours, &size), "export");
  len = swap (arguments[2], rank, 'm', ours, size, text, node);
  check (fp_mem_import (node, peer, text, len, &theirs), "import");
  for (int n = 0; rank == 1 && n < MESSAGES; n++) {
    check (fp_send (node, peer, tag, &n, sizeof n), "send");
    check (fp_put_signal (node, mine, 64, 8, theirs, 64, theirs, 0, FP_SIGNAL_ADD, 1, NULL), "put");
    usleep (1000);
  }
  if (rank == 1 && check (fp_quiet (node, peer, 10000), "quiet") == 0)
    _exit (0); /* as if it had been killed */
  struct epoll_event event = { EPOLLIN, { NULL } };
  epoll_ctl (loop, EPOLL_CTL_ADD, check (fp_node_fd (node, &wait), "descriptor"), &event);
  while (state >= 0) {
    check (fp_node_fd (node, &wait), "descriptor");
    for (int n; fp_recv (node, peer, tag, exact, &n, sizeof n, 0, NULL) == 0; wait = 0)
      got += n == got;
    state = fp_peer_state (node, peer);
    if (wait > 0 && state >= 0)
      epoll_wait (loop, &event, 1, wait);
  }
  check (fp_wait_signal (node, mine, 0, FP_EQ, MESSAGES, FP_ANY, 0, NULL), "signals");
  printf ("%d messages, the peer is gone: %s\n", got, fp_strerror (state));
  fp_node_close (node, 1000);
  return got != MESSAGES;
}

/* Two processes check the data that these calls move: fp_mem_register,
 * fp_put_bytes, fp_get, fp_atomic, fp_fence, fp_send_mem, fp_post_recv, fp_cancel and fp_test. They
 * exchange addresses and handles over a socket. usage: data [PROVIDER]. Uses shared memory, or only
 * rails of this libfabric provider. */
#include <fishplate.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 1 << 20, LONG = 300000, MORE = 50 };
#define SOON 20000

static int rank;
static fp_node *node;
static fp_peer peer;

static int check (int status, const char *what)
{
  if (status < 0) {
    fprintf (stderr, "rank %d: %s: %s (%s)\n", rank, what, fp_last_error (), fp_strerror (status));
    exit (1);
  }
  return status;
}

static void expect (int holds, const char *what)
{
  if (!holds) {
    fprintf (stderr, "rank %d: wrong: %s\n", rank, what);
    exit (1);
  }
}

/* Sends our bytes to the other process, and receives at most `room` bytes of it. */
static size_t swap (int link, const void *ours, size_t len, void *theirs, size_t room)
{
  expect (send (link, ours, len, 0) == (ssize_t) len, "sent");
  for (;;) {
    ssize_t got = recv (link, theirs, room, MSG_DONTWAIT);
    if (got > 0)
      return (size_t) got;
    expect (got != 0, "the other process is there");
    check (fp_progress (node), "progress");
  }
}

/* Byte `at` of the pattern that a rank writes in a step. */
static unsigned char pattern (int writer, int step, size_t at)
{
  return (unsigned char) (at * 7 + (at >> 8) + (size_t) (writer * 91 + step * 13));
}

static void fill (unsigned char *into, int step, size_t len)
{
  for (size_t at = 0; at < len; at++)
    into[at] = pattern (rank, step, at);
}

static int holds (const unsigned char *bytes, int writer, int step, size_t len)
{
  for (size_t at = 0; at < len; at++)
    if (bytes[at] != pattern (writer, step, at))
      return 0;
  return 1;
}

/* Takes completions until one has this id. */
static fp_completion take (uint32_t kind, uint64_t id)
{
  fp_completion completion;
  for (;;)
    if (check (fp_poll (node, &completion, 1), "poll") == 1) {
      expect (completion.kind == kind && completion.id == id, "the completion is the one awaited");
      return completion;
    }
}

/* Waits until fp_test reports the operation, unless it was complete at once. */
static void tested (fp_token token)
{
  fp_completion completion;
  if (token == FP_OVER)
    return;
  while (check (fp_test (node, token, &completion), "test") == 0)
    check (fp_progress (node), "progress");
  expect (completion.kind == FP_OPERATION && completion.id == token && completion.status == 0,
          "tested");
  expect (fp_test (node, token, &completion) < 0, "a completion is taken once");
}

static uint64_t word (fp_mem memory, uint64_t offset)
{
  uint64_t value;
  check (fp_mem_read (node, memory, offset, &value, sizeof value), "read");
  return value;
}

int main (int count, char **arguments)
{
  int links[2];
  expect (socketpair (AF_UNIX, SOCK_SEQPACKET, 0, links) == 0, "socketpair");
  pid_t child = fork ();
  rank = child == 0;
  int link = links[rank], other = 1 - rank;
  close (links[other]);

  fp_options options = { .struct_size = sizeof options, .flags = FP_NO_FABRIC };
  if (count > 1) {
    options.flags = FP_NO_SHARED_MEMORY | FP_REQUIRE_FABRIC;
    options.providers = arguments[1];
  }
  check (fp_node_open (&options, &node), "open");
  char ours[FP_ADDRESS_MAX], theirs[FP_ADDRESS_MAX];
  size_t len = sizeof ours;
  check (fp_node_address (node, ours, &len), "address");
  len = swap (link, ours, len, theirs, sizeof theirs);
  check (fp_peer_connect (node, theirs, len, &peer), "connect");

  /* Memory of the program, registered. The last 4 KiB hold 8-byte words for atomics and signals. */
  unsigned char *bytes = aligned_alloc (4096, SIZE + 4096);
  memset (bytes, 0, SIZE + 4096);
  fp_mem memory, inbox;
  fp_remote remote, box;
  check (fp_mem_register (node, bytes, SIZE + 4096, &memory), "register");
  check (fp_mem_alloc (node, SIZE, &inbox), "alloc");
  len = sizeof ours;
  check (fp_mem_export (node, memory, ours, &len), "export");
  len = swap (link, ours, len, theirs, sizeof theirs);
  check (fp_mem_import (node, peer, theirs, len, &remote), "import");
  len = sizeof ours;
  check (fp_mem_export (node, inbox, ours, &len), "export");
  len = swap (link, ours, len, theirs, sizeof theirs);
  check (fp_mem_import (node, peer, theirs, len, &box), "import");

  /* fp_put_bytes: short and long buffers, reused at once. fp_fence makes a later put land after
   * the data. */
  unsigned char *scratch = malloc (LONG);
  fp_token token;
  for (int step = 1; step <= MORE; step++) {
    size_t length = step % 2 ? (size_t) step : LONG;
    fill (scratch, step, length);
    check (fp_put_bytes (node, scratch, length, box, 8), "put_bytes");
    memset (scratch, 0xee, length);
    check (fp_fence (node, peer), "fence");
    uint64_t number = (uint64_t) step;
    check (fp_put_bytes (node, &number, sizeof number, box, 0), "put_bytes of the number");
    /* The number arrives after the data. A put is no signal, so the wait polls. */
    check (fp_wait_signal (node, inbox, 0, FP_EQ, number, FP_ANY, SOON, NULL),
           "wait for the number");
    unsigned char *seen = malloc (LONG);
    check (fp_mem_read (node, inbox, 8, seen, length), "read");
    expect (holds (seen, other, step, length), "data before the fenced number");
    free (seen);
    char turn;
    swap (link, "x", 1, &turn, 1);
  }

  /* fp_get reads the peer's registered memory, and fp_test reports the completion. */
  fill (bytes, 100, SIZE / 2);
  swap (link, "x", 1, theirs, 1);
  check (fp_get (node, memory, SIZE / 2, SIZE / 2, remote, 0, &token), "get");
  tested (token);
  expect (holds (bytes + SIZE / 2, other, 100, SIZE / 2), "data of a get");
  swap (link, "x", 1, theirs, 1);

  /* fp_atomic: each rank adds 1,000 times to an 8-byte word and a 4-byte word of the other rank. */
  for (int n = 0; n < 1000; n++) {
    check (fp_atomic (node, remote, SIZE, FP_AMO_ADD, 8, 3, 0, NULL), "atomic");
    check (fp_atomic (node, remote, SIZE + 12, FP_AMO_INC, 4, 0, 0, NULL), "atomic of 4 bytes");
  }
  check (fp_atomic (node, remote, SIZE + 16, FP_AMO_COMPARE_SWAP, 8, 77, 0, &token),
         "compare and swap");
  tested (token);
  check (fp_quiet (node, peer, SOON), "quiet");
  swap (link, "x", 1, theirs, 1);
  expect (word (memory, SIZE) == 3000, "3,000 after 1,000 additions of 3");
  expect (word (memory, SIZE + 8) == (uint64_t) 1000 << 32,
          "only the 4 bytes of the other word changed");
  expect (word (memory, SIZE + 16) == 77, "the word was swapped");

  /* fp_send_mem and fp_post_recv: short and long messages with tags 1 to 50. The receives are
   * posted in reverse order. */
  fp_tag exact = { 0, 0 };
  fp_request requests[MORE + 1];
  for (int n = MORE; n >= 1; n--) {
    fp_tag tag = { (uint64_t) n, 9 };
    check (fp_post_recv (node, peer, tag, exact, inbox, (uint64_t) n * 16384, 16384,
                         (uint64_t) n * 11, &requests[n]),
           "post_recv");
  }
  fill (bytes, 200, SIZE / 2);
  for (int n = 1; n <= MORE; n++) {
    fp_tag tag = { (uint64_t) n, 9 };
    check (fp_send_mem (node, peer, tag, memory, 0, n % 2 ? (size_t) n : 16000, NULL), "send_mem");
  }
  int received = 0;
  while (received < MORE) {
    fp_completion done;
    if (check (fp_poll (node, &done, 1), "poll") == 0)
      continue;
    size_t n = (size_t) done.message.tag.low;
    expect (done.kind == FP_RECEIVE && done.status == 0 && n >= 1 && n <= MORE, "a receive");
    size_t length = n % 2 ? n : 16000;
    expect (done.id == requests[n] && done.word == n * 11 && done.value == length,
            "its word and length");
    expect (done.message.len == length && done.message.source == peer && done.message.tag.high == 9,
            "its message");
    check (fp_mem_read (node, inbox, n * 16384, scratch, length), "read");
    expect (holds (scratch, other, 200, length), "data of a message");
    received++;
  }
  check (fp_quiet (node, peer, SOON), "quiet");

  /* fp_cancel: a receive that nothing matches is cancelled, and does not write its buffer. */
  fp_tag never = { 999, 0 };
  fp_request request;
  check (fp_mem_write (node, inbox, 0, "before", 6), "write");
  check (fp_post_recv (node, peer, never, exact, inbox, 0, 6, 5, &request), "post_recv");
  expect (check (fp_cancel (node, request), "cancel") == 1, "cancelled");
  fp_completion cancelled = take (FP_RECEIVE, request);
  expect (cancelled.status < 0 && cancelled.word == 5, "a cancelled receive");
  swap (link, "x", 1, theirs, 1);
  check (fp_send (node, peer, never, "after!", 6), "send");
  char text[6];
  check (fp_recv (node, peer, never, exact, text, sizeof text, SOON, NULL), "recv");
  expect (memcmp (text, "after!", 6) == 0, "the message went to the next receive");
  check (fp_mem_read (node, inbox, 0, text, 6), "read");
  expect (memcmp (text, "before", 6) == 0, "a cancelled receive wrote nothing");

  check (fp_quiet (node, peer, SOON), "quiet");
  swap (link, "x", 1, theirs, 1);
  check (fp_node_close (node, SOON), "close");
  free (scratch);
  free (bytes);
  int status = 0;
  expect (rank == 1 || (waitpid (child, &status, 0) == child && status == 0),
          "the other rank ended well");
  return 0;
}

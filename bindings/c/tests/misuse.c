/* Misuse must return an error and must not crash. Passes invalid nodes to every function
 * that takes a node. Passes wrong arguments from a table, and random arguments, to most of them.
 * usage: misuse [SEED] */
#include "expect.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* Loads a word: waits for any value, with a timeout of 0. */
static int load (fp_node *node, fp_mem memory, uint64_t offset, uint64_t *value)
{
  return fp_wait_signal (node, memory, offset, FP_GE, 0, FP_ANY, 0, value);
}

static fp_node *open_node (void);

/* Values that random calls choose from. Entry 0 becomes valid during the test. */
static uint64_t memories[8] = { 0, 1, UINT64_MAX, 1ull << 32, 5 },
                remotes[8] = { 0, 1, UINT64_MAX, 7ull << 32 };
static uint32_t peers[8] = { 0, 1, FP_ANY, 77, 1u << 16 };
static uint64_t tokens[8] = { 0, 1, UINT64_MAX }, requests[8] = { 0, 1, UINT64_MAX };
static const uint64_t offsets[] = {
  0, 8, 64, 3, 4095, 4096, UINT64_MAX, UINT64_MAX - 7, 1ull << 63
};
static const size_t lengths[] = { 0, 1, 8, 64, 4096, 4097, 20000 };
static const uint64_t values[] = { 0, 1, UINT64_MAX };

#define PICK(list) list[below (sizeof list / sizeof list[0])]

enum { FUNCTIONS = 34 };
static char buffer[20000];

/* Calls the function with index `which` with random arguments. */
static int call (int which, fp_node *node)
{
  int waits;
  uint64_t seen, *token = below (2) ? &PICK (tokens) : NULL, *request = &PICK (requests);
  size_t len = PICK (lengths), room = below (4) ? FP_ADDRESS_MAX : 3;
  uint64_t memory = PICK (memories), offset = PICK (offsets), remote = PICK (remotes);
  uint64_t remote_offset = PICK (offsets);
  fp_peer peer = PICK (peers);
  fp_tag tag = { below (3), below (4) ? 0 : UINT32_MAX },
         ignore = { below (2) ? 0 : UINT64_MAX, 0 };
  int op = (int) below (12) - 1;
  fp_message message;
  fp_completion ends[3];
  fp_stats_t stats = { .struct_size = below (4) ? sizeof stats : below (200) };
  switch (which) {
  case 0: return fp_node_address (node, buffer, &room);
  case 1: return fp_progress (node);
  case 2: return fp_peer_connect (node, buffer, PICK (lengths), &PICK (peers));
  case 3: return fp_peer_state (node, peer);
  case 4: return fp_peer_disconnect (node, below (8) ? 77 : peer);
  case 5: return fp_mem_alloc (node, PICK (lengths), &memories[1 + below (7)]);
  case 6: return fp_mem_register (node, NULL, len, &memories[1 + below (7)]);
  case 7: return fp_mem_free (node, memories[1 + below (7)]);
  case 8: return fp_mem_export (node, memory, buffer, &room);
  case 9: return fp_mem_import (node, peer, buffer, len, &remotes[1 + below (7)]);
  case 10: return fp_mem_release (node, remotes[1 + below (7)]);
  case 11: return fp_mem_write (node, memory, offset, buffer, len);
  case 12: return fp_mem_read (node, memory, offset, buffer, len);
  case 13: return fp_node_fd (node, &waits);
  case 14: return fp_mem_store (node, memory, offset, 1);
  case 15: return fp_put (node, memory, offset, len, remote, remote_offset, token);
  case 16: return fp_put_bytes (node, buffer, len, remote, remote_offset);
  case 17:
    return fp_put_signal (node, memory, offset, len, remote, remote_offset, PICK (remotes),
                          PICK (offsets), op, 1, token);
  case 18: return fp_get (node, memory, offset, len, remote, remote_offset, token);
  case 19:
    return fp_atomic (node, remote, offset, op, (uint32_t) below (10), PICK (values), 0, token);
  case 20: return fp_atomic_fetch (node, remote, offset, op, (uint32_t) below (10), 1, 0, &seen, 0);
  case 21: return fp_fence (node, peer);
  case 22: return fp_quiet (node, peer, 0);
  case 23:
    return fp_wait_signal (node, memory, offset, op, PICK (values), peer, 0,
                           below (2) ? &seen : NULL);
  case 24: return fp_send (node, peer, tag, buffer, len);
  case 25: return fp_send_mem (node, peer, tag, memory, offset, len, token);
  case 26: return fp_recv (node, peer, tag, ignore, buffer, len, 0, below (2) ? &message : NULL);
  case 27: return fp_post_recv (node, peer, tag, ignore, memory, offset, len, 9, request);
  case 28: return fp_cancel (node, *request);
  case 29: return fp_probe (node, peer, tag, ignore, (int) below (2), &message);
  case 30: return fp_recv_claimed (node, below (20), memory, offset, len, 9, request);
  case 31: return fp_poll (node, ends, below (4));
  case 32: return fp_test (node, PICK (tokens), ends);
  default: return fp_stats (node, &stats);
  }
}

static void *elsewhere (void *node)
{
  for (int which = 0; which < FUNCTIONS; which++)
    EXPECT (call (which, (fp_node *) node), -EPERM);
  EXPECT (fp_node_unbind ((fp_node *) node), -EPERM);
  EXPECT (fp_node_close ((fp_node *) node, 0), -EPERM);
  return NULL;
}

static void *takes_over (void *node)
{
  EXPECT (fp_progress ((fp_node *) node), 0);
  EXPECT (fp_node_unbind ((fp_node *) node), 0);
  return NULL;
}

static void run (void *(*body) (void *), void *node)
{
  pthread_t thread;
  if (pthread_create (&thread, NULL, body, node) != 0 || pthread_join (thread, NULL) != 0)
    exit (1);
}

static fp_node *interrupted;
static int from_handler[4];

/* Calls into the node that the interrupted call uses. */
static void handler (int number)
{
  (void) number;
  from_handler[0] = fp_progress (interrupted);
  from_handler[1] = call (17, interrupted);
  from_handler[2] = fp_node_unbind (interrupted);
  from_handler[3] = fp_node_close (interrupted, 0);
}

static void signals (fp_node *node)
{
  struct sigaction action = { .sa_handler = handler };
  struct itimerval soon = { .it_value = { 0, 20000 } };
  interrupted = node;
  sigaction (SIGALRM, &action, NULL);
  setitimer (ITIMER_REAL, &soon, NULL);
  EXPECT (fp_wait_signal (node, memories[0], 0, FP_EQ, 99, FP_ANY, 100, NULL), -ETIMEDOUT);
  for (int at = 0; at < 4; at++)
    EXPECT (from_handler[at], -EBUSY);
  EXPECT (fp_progress (node) >= 0, 1);
}

/* Tests that numbers of one node are invalid at another node. */
static void foreign (fp_node *node)
{
  fp_node *other = open_node ();
  uint64_t value;
  fp_mem memory;
  fp_completion end;
  EXPECT (fp_mem_alloc (other, 4096, &memory), 0);
  EXPECT (load (node, memory, 0, &value), -EBADR);
  EXPECT (fp_mem_free (node, memory), -EBADR);
  EXPECT (load (other, memories[0], 0, &value), -EBADR);
  EXPECT (fp_put (other, memory, 0, 8, remotes[0], 0, NULL), -EBADR);
  EXPECT (fp_put_signal (other, memory, 0, 8, remotes[0], 0, remotes[0], 8, FP_SIGNAL_SET, 1, NULL),
          -EBADR);
  EXPECT (fp_send (other, peers[0], (fp_tag) { 1, 0 }, "x", 1), -ENXIO);
  EXPECT (load (node, 0, 0, &value), -EBADR);
  EXPECT (fp_peer_state (node, 0), -ENXIO);
  EXPECT (fp_test (other, tokens[1], &end), -EBADR);
  EXPECT (fp_mem_free (other, memory), 0);
  EXPECT (fp_node_close (other, 0), 0);
}

/* Tests that a forked child cannot use its parent's nodes, but can open its own. */
static void forked (fp_node *node)
{
  int status = -1, now;
  pid_t child = fork ();
  if (child == 0) {
    int before = failed;
    for (int which = 0; which < FUNCTIONS; which++)
      EXPECT (call (which, node), -EBADF);
    EXPECT (fp_node_unbind (node), -EBADF);
    EXPECT (fp_node_close (node, 0), -EBADF);
    fp_node *own = open_node ();
    EXPECT (fp_progress (own), 0);
    EXPECT (fp_node_close (own, 1000), 0);
    _exit (failed != before);
  }
  EXPECT (waitpid (child, &status, 0) == child && status == 0, 1);
  now = fp_progress (node);
  EXPECT (now >= 0, 1);
}

/* Tests that numbers of a closed node are invalid at the next node, which uses the same slot. */
static void reopened (void)
{
  fp_node *first = open_node (), *second;
  size_t len = sizeof buffer;
  uint64_t value;
  fp_mem memory;
  fp_remote remote;
  fp_peer peer;
  EXPECT (fp_node_address (first, buffer, &len), 0);
  EXPECT (fp_peer_connect (first, buffer, len, &peer), 0);
  EXPECT (fp_mem_alloc (first, 4096, &memory), 0);
  len = sizeof buffer;
  EXPECT (fp_mem_export (first, memory, buffer, &len), 0);
  EXPECT (fp_mem_import (first, peer, buffer, len, &remote), 0);
  EXPECT (fp_node_close (first, 1000), 0);
  EXPECT (fp_node_close (first, 0), -EBADF);
  second = open_node ();
  fp_mem own;
  EXPECT (fp_mem_alloc (second, 4096, &own), 0);
  EXPECT (fp_progress (first), -EBADF);
  EXPECT (fp_put_signal (first, memory, 0, 8, remote, 0, remote, 8, FP_SIGNAL_SET, 1, NULL),
          -EBADF);
  EXPECT (fp_put_signal (second, own, 0, 8, remote, 0, remote, 8, FP_SIGNAL_SET, 1, NULL), -EBADR);
  EXPECT (fp_put_signal (second, memory, 0, 8, remote, 0, remote, 8, FP_SIGNAL_SET, 1, NULL),
          -EBADR);
  EXPECT (load (second, memory, 0, &value), -EBADR);
  EXPECT (fp_mem_free (second, memory), -EBADR);
  EXPECT (fp_peer_state (second, peer), -ENXIO);
  EXPECT (fp_mem_import (second, peer, buffer, len, &remote), -ENXIO);
  EXPECT (fp_node_close (second, 1000), 0);
}

static fp_node *open_node (void)
{
  fp_options options = { .struct_size = sizeof options,
                         .flags = FP_NO_FABRIC | FP_WAIT_FD,
                         .patience_ms = 1,
                         .connect_timeout_ms = 1 };
  fp_node *node = NULL;
  EXPECT (fp_node_open (&options, &node), 0);
  return node;
}

/* Counts the open files of this process that are pages of counters. */
static int pages (void)
{
  char path[64], target[64];
  int count = 0;
  for (int fd = 0; fd < 1024; fd++) {
    snprintf (path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t len = readlink (path, target, sizeof target - 1);
    target[len < 0 ? 0 : len] = 0;
    count += strstr (target, "fishplate-counters") != NULL;
  }
  return count;
}

/* Tests that a text stays valid after the next failure. */
static void last_error (void)
{
  EXPECT (fp_progress (NULL), -EBADF);
  const char *text = fp_last_error ();
  EXPECT (fp_node_open (NULL, NULL), -EINVAL);
  EXPECT (fp_last_error () == text && strlen (text) > 0, 1);
}

static void wrong_options (void)
{
  fp_options good = { .struct_size = sizeof good, .flags = FP_NO_FABRIC }, bad;
  struct { fp_options known; uint64_t later; } longer = { good, 0 };
  longer.known.struct_size = sizeof longer;
  fp_node *node;
  EXPECT (fp_node_open (&good, NULL), -EINVAL);
#define BAD(field, value)                                                                          \
  bad = good;                                                                                      \
  bad.field = value;                                                                               \
  EXPECT (fp_node_open (&bad, &node), -EINVAL);                                                    \
  EXPECT (node != NULL, 0)
  BAD (struct_size, 0);
  BAD (struct_size, 7);
  BAD (struct_size, 1u << 20);
  BAD (flags, 64);
  BAD (flags, FP_NO_FABRIC | FP_REQUIRE_FABRIC);
  BAD (peers, 65536);
  BAD (regions, 65536);
  BAD (imports, UINT32_MAX);
  BAD (operations, 4000000000u);
  EXPECT (strstr (fp_last_error (), "operations must be at most 1048576") != NULL, 1);
  BAD (max_rails, 17);
  BAD (providers, "\xff\xfe");
  EXPECT (fp_node_open (&longer.known, &node), 0);
  EXPECT (fp_node_close (node, 0), 0);
  longer.later = 1;
  EXPECT (fp_node_open (&longer.known, &node), -EINVAL);
  bad = good;
  bad.struct_size = sizeof (size_t);
  bad.flags = 99; /* beyond struct_size, so ignored */
  EXPECT (fp_node_open (&bad, &node), 0);
  EXPECT (fp_node_close (node, 0), 0);
  bad = good;
  bad.struct_size = offsetof (fp_options, local_rank); /* of an older header */
  EXPECT (fp_node_open (&bad, &node), 0);
  EXPECT (fp_node_close (node, 0), 0);
  bad = good;
  bad.local_rank = UINT32_MAX;
  EXPECT (fp_node_open (&bad, &node), 0);
  EXPECT (fp_node_close (node, 0), 0);
  setenv ("FISHPLATE_LOCAL_RANK", "-1", 1);
  EXPECT (fp_node_open (&bad, &node), 0); /* no environment without FP_LAUNCHER */
  EXPECT (fp_node_close (node, 0), 0);
  BAD (flags, FP_NO_FABRIC | FP_LAUNCHER);
  setenv ("FISHPLATE_LOCAL_RANK", "1", 1);
  EXPECT (fp_node_open (&bad, &node), 0);
  EXPECT (fp_node_close (node, 0), 0);
  unsetenv ("FISHPLATE_LOCAL_RANK");
  bad = good;
  bad.flags = FP_NO_FABRIC | FP_COUNTERS;
  EXPECT (fp_node_open (&bad, &node), 0);
  EXPECT (pages (), 1);
  EXPECT (fp_node_close (node, 0), 0);
  EXPECT (pages (), 0);
  bad = good;
  bad.flags = FP_REQUIRE_FABRIC;
  bad.providers = "no-such-provider";
  EXPECT (fp_node_open (&bad, &node), -ENODEV);
}

static void wrong_arguments (fp_node *node, fp_peer me)
{
  fp_mem memory = memories[0];
  fp_remote remote = remotes[0];
  fp_tag tag = { 1, 0 };
  size_t room = 3;
  uint64_t value;
  fp_token token;
  fp_request request;
  fp_message message;
  EXPECT (fp_node_address (node, buffer, NULL), -EINVAL);
  EXPECT (fp_node_address (node, buffer, &room), -EMSGSIZE);
  EXPECT (room > 3 && room <= FP_ADDRESS_MAX, 1);
  EXPECT (fp_node_address (node, NULL, &room), -EINVAL);
  EXPECT (fp_peer_connect (node, "x", 1, &me), -EINVAL);
  EXPECT (fp_peer_connect (node, NULL, 8, &me), -EINVAL);
  EXPECT (fp_peer_state (node, 77), -ENXIO);
  EXPECT (fp_mem_alloc (node, 0, &value), -EINVAL);
  EXPECT (fp_mem_alloc (node, SIZE_MAX, &value) < 0, 1);
  EXPECT (fp_mem_alloc (node, 8, NULL), -EINVAL);
  EXPECT (fp_mem_alloc (node, 8, (uint64_t *) 3), -EINVAL);
  EXPECT (fp_mem_register (node, NULL, 8, &value), -EINVAL);
  EXPECT (fp_mem_free (node, memory), -EBUSY);
  EXPECT (fp_mem_free (node, 12345), -EBADR);
  /* Memory of this node and of a peer are not interchangeable. */
  EXPECT (fp_mem_free (node, remote), -EBADR);
  EXPECT (fp_mem_export (node, remote, buffer, &room), -EBADR);
  EXPECT (fp_mem_release (node, memory), -EBADR);
  EXPECT (fp_mem_write (node, remote, 0, buffer, 8), -EBADR);
  EXPECT (fp_mem_read (node, remote, 0, buffer, 8), -EBADR);
  EXPECT (fp_put_bytes (node, buffer, 8, memory, 0), -EBADR);
  EXPECT (fp_put (node, remote, 0, 8, remote, 0, NULL), -EBADR);
  EXPECT (fp_get (node, memory, 0, 8, memory, 0, NULL), -EBADR);
  EXPECT (fp_atomic (node, memory, 0, FP_AMO_ADD, 8, 1, 0, NULL), -EBADR);
  EXPECT (fp_put_signal (node, remote, 0, 8, remote, 0, remote, 8, FP_SIGNAL_SET, 1, NULL), -EBADR);
  EXPECT (fp_put_signal (node, memory, 0, 8, memory, 0, remote, 8, FP_SIGNAL_SET, 1, NULL), -EBADR);
  EXPECT (fp_put_signal (node, memory, 0, 8, remote, 0, memory, 8, FP_SIGNAL_SET, 1, NULL), -EBADR);
  EXPECT (fp_mem_export (node, 12345, buffer, &room), -EBADR);
  EXPECT (fp_mem_import (node, me, "rubbish", 7, &value) < 0, 1);
  EXPECT (fp_mem_release (node, 12345), -EBADR);
  EXPECT (fp_mem_write (node, memory, 4090, buffer, 8), -ERANGE);
  EXPECT (fp_mem_write (node, memory, UINT64_MAX, buffer, 8), -ERANGE);
  EXPECT (fp_mem_write (node, memory, 0, NULL, 8), -EINVAL);
  EXPECT (fp_mem_read (node, memory, 4096, buffer, 1), -ERANGE);
  EXPECT (load (node, memory, 4, &value), -EINVAL);
  EXPECT (fp_mem_store (node, 9, 0, 1), -EBADR);
  EXPECT (fp_put (node, memory, 0, 5000, remote, 0, NULL), -ERANGE);
  EXPECT (fp_put (node, memory, 0, 8, remote, 4090, NULL), -ERANGE);
  EXPECT (fp_put (node, memory, 0, 8, 12345, 0, NULL), -EBADR);
  EXPECT (fp_put_signal (node, memory, 0, 8, remote, 0, remote, 12, 1, 1, NULL), -EINVAL);
  EXPECT (fp_put_signal (node, memory, 0, 8, remote, 0, remote, 16, 3, 1, NULL), -EINVAL);
  EXPECT (fp_atomic (node, remote, 0, 0, 8, 1, 0, NULL), -EINVAL);
  EXPECT (fp_atomic (node, remote, 0, 10, 8, 1, 0, NULL), -EINVAL);
  EXPECT (fp_atomic (node, remote, 0, FP_AMO_ADD, 3, 1, 0, NULL), -EINVAL);
  EXPECT (fp_atomic (node, remote, 0, FP_AMO_ADD, 256 + 8, 1, 0, NULL), -EINVAL);
  EXPECT (fp_atomic_fetch (node, remote, 0, FP_AMO_ADD, 8, 1, 0, NULL, 0), -EINVAL);
  EXPECT (fp_wait_signal (node, memory, 0, 7, 0, FP_ANY, 0, NULL), -EINVAL);
  EXPECT (fp_wait_signal (node, memory, 0, FP_EQ, 99, FP_ANY, 1, NULL), -ETIMEDOUT);
  EXPECT (fp_fence (node, 77), -ENXIO);
  EXPECT (fp_quiet (node, 77, 0), -ENXIO);
  EXPECT (fp_send (node, 77, tag, "x", 1), -ENXIO);
  fp_token *misaligned = (fp_token *) 3;
  EXPECT (fp_put (node, memory, 0, 8, remote, 64, misaligned), -EINVAL);
  EXPECT (fp_put_signal (node, memory, 0, 8, remote, 8, remote, 16, 1, 1, misaligned), -EINVAL);
  EXPECT (fp_get (node, memory, 0, 8, remote, 8, misaligned), -EINVAL);
  EXPECT (fp_atomic (node, remote, 0, FP_AMO_ADD, 8, 1, 0, misaligned), -EINVAL);
  EXPECT (fp_send_mem (node, me, tag, memory, 0, 8, misaligned), -EINVAL);
  EXPECT (fp_quiet (node, me, 1000), 0);
  EXPECT (fp_probe (node, me, tag, (fp_tag) { 0, 0 }, 0, &message), 0);
  EXPECT (fp_recv (node, me, tag, tag, buffer, 8, 1, NULL), -ETIMEDOUT);
  EXPECT (fp_send (node, me, tag, buffer, 64), 0);
  EXPECT (fp_recv (node, me, tag, (fp_tag) { 0, 0 }, buffer, 8, 1000, &message), -EMSGSIZE);
  EXPECT (fp_post_recv (node, me, tag, tag, memory, 4090, 8, 0, &request), -ERANGE);
  EXPECT (fp_cancel (node, 12345), -EBADR);
  EXPECT (fp_recv_claimed (node, 12345, memory, 0, 8, 0, &request), -EBADR);
  EXPECT (fp_poll (node, NULL, 1), -EINVAL);
  EXPECT (fp_poll (node, NULL, 0), 0);
  EXPECT (fp_test (node, 12345, NULL), -EINVAL);
  EXPECT (fp_stats (node, NULL), -EINVAL);
  /* Correct calls still work. */
  EXPECT (fp_put (node, memory, 0, 8, remote, 64, &token), 0);
  EXPECT (fp_quiet (node, me, 1000), 0);
  EXPECT (fp_atomic_fetch (node, remote, 128, FP_AMO_ADD, 8, 5, 0, &value, 1000), 0);
  EXPECT (load (node, memory, 128, &value), 0);
  EXPECT (value == 5, 1);
  EXPECT (fp_send (node, me, tag, "claimed", 8), 0);
  EXPECT (fp_quiet (node, me, 1000), 0);
  EXPECT (fp_probe (node, me, tag, (fp_tag) { 0, 0 }, 1, &message), 1);
  EXPECT (fp_probe (node, me, tag, (fp_tag) { 0, 0 }, 0, &message), 0);
  EXPECT (fp_recv_claimed (node, message.claim, memory, 256, 8, 4, &request), 0);
  fp_completion end;
  while (fp_poll (node, &end, 1) == 0 || end.kind != FP_RECEIVE) {
  }
  EXPECT (end.status == 0 && end.word == 4 && end.value == 8 && end.id == request
              && end.message.source == me,
          1);
}

int main (int count, char **arguments)
{
  uint64_t seed = count > 1 ? strtoull (arguments[1], NULL, 10) : 1;
  random_state = seed * 2654435761u + 1;
  fp_node *node = open_node (), *closed = open_node ();
  EXPECT (fp_node_close (closed, 0), 0);
  fp_node *none[] = { NULL,
                      closed,
                      (fp_node *) 1,
                      (fp_node *) UINTPTR_MAX,
                      (fp_node *) &node,
                      (fp_node *) ((char *) node + 64) };
  for (size_t at = 0; at < sizeof none / sizeof none[0]; at++) {
    for (int which = 0; which < FUNCTIONS; which++)
      EXPECT (call (which, none[at]), -EBADF);
    EXPECT (fp_node_close (none[at], 0), -EBADF);
    EXPECT (fp_node_unbind (none[at]), -EBADF);
  }
  run (elsewhere, node);
  EXPECT (fp_node_unbind (node), 0);
  run (takes_over, node);

  size_t len = sizeof buffer;
  EXPECT (fp_node_address (node, buffer, &len), 0);
  EXPECT (fp_peer_connect (node, buffer, len, &peers[0]), 0);
  EXPECT (fp_peer_state (node, peers[0]), 1);
  EXPECT (fp_mem_alloc (node, 4096, &memories[0]), 0);
  len = sizeof buffer;
  EXPECT (fp_mem_export (node, memories[0], buffer, &len), 0);
  EXPECT (fp_mem_import (node, peers[0], buffer, len, &remotes[0]), 0);
  last_error ();
  wrong_options ();
  wrong_arguments (node, peers[0]);
  foreign (node);
  reopened ();
  forked (node);
  signals (node);

  for (int n = 0; n < 20000; n++)
    call ((int) below (FUNCTIONS), node);
  EXPECT (fp_node_close (node, 0) <= 0, 1);
  EXPECT (fp_progress (node), -EBADF);
  printf ("%d cases and 20000 random calls, seed %llu: %d wrong\n", cases,
          (unsigned long long) seed, failed);
  return failed != 0;
}
